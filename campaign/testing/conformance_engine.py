"""What every `Engine` promises, as a suite to inherit from in a test module.

::

    class TestMine(EngineSuite):
        def case(self) -> EngineCase:
            return EngineCase(engine=..., arm=..., models=...)

The checks of a live server boot the real engine through `LocalEngineHost`; nothing is emulated. A case that
replays recorded bytes says which answers there are (`lengths`), since no others can be had. On a server that
somebody else runs (`campaign.testing.conformance_live`) the checks that would end or stop it are skipped by name.
"""

import json
import os
import signal
import unittest
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign.client.base import Job, Outcome, Usage
from campaign.client.http import HttpClient
from campaign.engines import fetch, procfs
from campaign.engines.base import BootOrder, BootRecord, Counters, Engine, StepCounts
from campaign.engines.host import LocalEngineHost
from campaign.engines.prometheus import NotPrometheus
from campaign.errors import EngineError, PreflightError
from campaign.session.ports import EngineHost
from campaign.spec.models import Arm, Model

PROMPT = 'Repeat this JSON exactly five times: {"id": 1, "name": "alpha", "tags": ["a", "b"], "score": 0.5}'
"""Repetitive, so that an n-gram drafter has something to draft."""


@dataclass(frozen=True)
class EngineCase:
    """An engine, an arm that boots on this node, and arms that must be refused."""

    engine: Engine
    arm: Arm
    models: Mapping[str, Model]
    speculative: Arm | None = None
    refused: Mapping[str, Arm] = field(default_factory=dict)
    """Arms that `preflight` refuses, by a word that its message must contain."""
    pages: tuple[tuple[str, Mapping[str, int | None]], ...] = ()
    """Metrics pages of this engine, and values of `Counters` fields that they must read to."""
    boot_timeout_s: float = 60.0
    life_tokens: int = 8
    """Length of the one request of `test_life`."""
    lengths: tuple[int, ...] = (1, 2, 9, 33, 64)
    """Output lengths on which the identity of steps is checked."""
    stream_tokens: int = 24
    """Length of the stream that the load client reads."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, e.g. `return_meta_info`."""
    grows: int | None = None
    """By how much the counter of generated tokens grows over the request of `test_life`; None is its length.
    Recorded pages were taken around other requests than the recorded answer."""
    answers: bool = True
    """False where no answer outside a stream is to be had."""
    recorded: bool = False
    """The counters are a recording: they do not say what this request did."""


async def request(engine: Engine, arm: Arm, record: BootRecord, *, max_tokens: int, **extra: Any) -> Outcome:
    """One request outside the load client, as far as `Engine.steps` looks at it."""
    body = {
        "model": record.model_id,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        **engine.request_extras(arm),
        **extra,
    }
    status, raw = await fetch.post(record.base_url + "/v1/chat/completions", record.headers, body, 120)
    answer = json.loads(raw)
    assert status == 200, answer
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        request_id="conformance",
        state="ok",
        sent_ns=0,
        sent_utc_ns=0,
        first_ns=None,
        last_ns=None,
        done_ns=None,
        stamp_source="user",
        reads=1,
        events=0,
        content_chunks=0,
        usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens")),
        first_chunk_tokens=None,
        finish=answer["choices"][0]["finish_reason"],
        http_status=status,
        error_code=None,
        error=None,
        text_sha256=None,
        timings=_report(answer),
    )


def _report(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """The engine's own words on a request, as the load client keeps them from a stream."""
    out = dict(answer.get("timings") or {})
    holders = (answer, *answer["choices"])
    for name in ("sglext", "meta_info", "metrics"):
        found = next((h[name] for h in holders if isinstance(h.get(name), dict)), None)
        if found is not None:
            out[name] = found
    return out or None


async def stream(engine: Engine, arm: Arm, record: BootRecord, *, max_tokens: int, **extra: Any) -> Outcome:
    """One request through the load client, as a measured one is sent."""
    body = {
        "model": record.model_id,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **engine.request_extras(arm),
        **extra,
    }
    client = HttpClient()
    try:
        return await client.run(
            Job(
                "conformance",
                record.base_url,
                "/v1/chat/completions",
                body,
                120.0,
                max_tokens,
                dict(record.headers),
            )
        )
    finally:
        await client.close()


class EngineSuite:
    """Inherit, and give `case`."""

    def case(self) -> EngineCase:
        """The engine under test."""
        raise NotImplementedError

    def host(self, case: EngineCase, **options: Any) -> EngineHost:
        """What boots the server; the live suite gives a server that already runs."""
        return LocalEngineHost(**{"engines": lambda _: case.engine, **options})

    owned = True
    """Whether the server is ours to stop and to kill."""

    def need_own(self) -> None:
        """Skip, by name, what would end or stop a server that is not ours."""
        if not self.owned:
            raise unittest.SkipTest("the server belongs to somebody else: it is not stopped or killed")

    def order(self, case: EngineCase, tmp_path: Path, arm: Arm, name: str = "s/g/r0/a@0") -> BootOrder:
        """A boot order as a session would give it."""
        log = tmp_path / f"{name.replace('/', '~')}.log"
        return BootOrder(name, "a", "0" * 16, arm, case.models, "p0", (), (), str(log), case.boot_timeout_s)

    # --- without starting anything

    def test_is_an_engine(self) -> None:
        case = self.case()
        assert isinstance(case.engine, Engine)
        assert case.engine.name == case.arm.engine

    def test_preflight(self) -> None:
        case = self.case()
        case.engine.preflight(case.arm, case.models)
        for word, arm in case.refused.items():
            try:
                case.engine.preflight(arm, case.models)
            except PreflightError as error:
                text = str(error)
                assert word in text, (word, text)
                assert "Fix:" in text, text
            else:
                raise AssertionError(f"not refused: {word}")

    def test_argv_is_a_list_for_loopback(self, tmp_path: Path) -> None:
        case = self.case()
        launch = case.engine.launch(self.order(case, tmp_path, case.arm), 18999)
        assert all(isinstance(word, str) for word in launch.argv)
        assert "18999" in launch.argv
        assert "0.0.0.0" not in launch.argv  # noqa: S104  # its absence is the point
        for secret in launch.headers.values():
            assert secret.rpartition(" ")[2] not in launch.argv

    def test_pages(self) -> None:
        case = self.case()
        for page, expected in case.pages:
            counters = case.engine.read_counters(page)
            for name, value in expected.items():
                assert getattr(counters, name) == value, name
            absent = {r.partition(":")[0] for r in counters.reasons}
            none = {f for f in ("drafts", "accepted", "generated") if getattr(counters, f) is None}
            assert none <= absent, "a field that is None has a reason"
        for junk in ("[]", '{"a": 1}', "<html></html>", ""):
            try:
                case.engine.read_counters(junk)
            except NotPrometheus:
                continue
            raise AssertionError(f"read as a metrics page: {junk!r}")

    def test_steps_without_scrapes_are_never_invented(self) -> None:
        case = self.case()
        empty = Outcome(
            *("r", "failed", 0, 0, None, None, None, "user", 0, 0, 0, None, None, None, None, None, None),
            None,
            None,
        )
        counts = case.engine.steps(case.speculative or case.arm, None, None, empty)
        assert counts.steps is None
        assert counts.reasons

    # --- the real server

    async def test_life(self, tmp_path: Path) -> None:
        """Boot, provenance, counters, one request, stop: one server's whole life."""
        case = self.case()
        host = self.host(case)
        order = self.order(case, tmp_path, case.arm)
        try:
            record = await host.boot(order)
            self.check_record(case, record)
            before = await host.counters(order.boot_id)
            outcome = await self.ask(case, case.arm, record, case.life_tokens)
            after = await host.counters(order.boot_id)
            counts = case.engine.steps(case.arm, before, after, outcome)
            assert outcome.usage is not None
            assert outcome.usage.completion_tokens == case.life_tokens
            if case.arm.speculation is None:
                assert counts.steps == case.life_tokens - 1
            if before and after and before.generated is not None and after.generated is not None:
                assert after.generated - before.generated == (
                    case.life_tokens if case.grows is None else case.grows
                )
                assert after.started == before.started
            assert await host.alive(order.boot_id)
            if self.owned:
                await self.check_stop(host, record)
        finally:
            await host.close()

    async def check_stop(self, host: EngineHost, record: BootRecord) -> None:
        """Nothing of a stopped server is left; a second stop does nothing."""
        pids = procfs.tree(record.pid)
        await host.stop(record.boot_id)
        await host.stop(record.boot_id)
        assert [p for p in pids if procfs.state(p) not in {None, "Z"}] == []
        assert procfs.port_is_free(record.port)
        assert not await host.alive(record.boot_id)

    async def ask(self, case: EngineCase, arm: Arm, record: BootRecord, max_tokens: int) -> Outcome:
        """A request of so many tokens, by the way that the case has answers for."""
        send = request if case.answers else stream
        return await send(case.engine, arm, record, max_tokens=max_tokens, **case.extra)

    async def test_stream(self, tmp_path: Path) -> None:
        """What the load client reads of a measured request: usage, text, stamps in order, a proper end."""
        case = self.case()
        host = self.host(case)
        arm = case.speculative or case.arm
        order = self.order(case, tmp_path, arm)
        try:
            record = await host.boot(order)
            outcome = await stream(case.engine, arm, record, max_tokens=case.stream_tokens)
        finally:
            await host.close()
        assert outcome.state == "ok", outcome
        assert outcome.usage is not None
        assert outcome.usage.completion_tokens == case.stream_tokens
        assert outcome.usage.prompt_tokens
        assert 1 <= outcome.content_chunks <= case.stream_tokens
        assert outcome.first_ns is not None
        assert outcome.last_ns is not None
        assert outcome.sent_ns < outcome.first_ns <= outcome.last_ns
        assert outcome.finish == "length"
        assert outcome.text_sha256

    def check_record(self, case: EngineCase, record: BootRecord) -> None:
        """What was recorded comes from the live process, and holds no secret."""
        if not self.owned:
            assert record.provenance["effective"], "no page of the server says what is in force"
            return
        listening = procfs.sockets(procfs.tree(record.pid))
        ours = [x for x in procfs.listeners() if x.inode in listening]
        assert {x.address for x in ours} == {"127.0.0.1"}
        text = json.dumps(record.provenance)
        for secret in record.headers.values():
            assert secret.rpartition(" ")[2] not in text
        assert record.boot_ns > 0
        assert record.provenance["argv"]
        for name, value in record.provenance["requested"].items():
            assert record.provenance["effective"].get(name, value) == value
        assert case.engine.name == record.provenance["engine"]

    async def test_identity_of_steps(self, tmp_path: Path) -> None:
        """The identity completion - 1 = accepted + drafts + undrafted, on real requests of several lengths."""
        case = self.case()
        if case.speculative is None:
            raise unittest.SkipTest("the case has no speculative arm")
        host = self.host(case)
        order = self.order(case, tmp_path, case.speculative)
        drafted = 0
        try:
            record = await host.boot(order)
            for max_tokens in case.lengths:
                before = await host.counters(order.boot_id)
                outcome = await self.ask(case, case.speculative, record, max_tokens)
                after = await host.counters(order.boot_id)
                counts = case.engine.steps(case.speculative, before, after, outcome)
                self.check_identity(counts, outcome, before, after)
                drafted += counts.drafted or 0
        finally:
            await host.close()
        assert drafted > 0, "the drafter never drafted: this shows nothing"

    def check_identity(
        self, counts: StepCounts, outcome: Outcome, before: Counters | None, after: Counters | None
    ) -> None:
        """The identity itself; engines with a counter of forward passes override it with a proof."""
        del before, after
        assert outcome.usage is not None
        completion = outcome.usage.completion_tokens
        assert completion is not None
        assert counts.steps is not None
        assert counts.drafts is not None
        assert counts.undrafted is not None
        assert counts.accepted is not None
        assert completion - 1 == counts.accepted + counts.drafts + counts.undrafted
        assert counts.steps == counts.drafts + counts.undrafted

    async def test_a_server_that_dies_is_found(self, tmp_path: Path) -> None:
        self.need_own()
        case = self.case()
        host = self.host(case)
        order = self.order(case, tmp_path, case.arm)
        try:
            record = await host.boot(order)
            os.kill(record.pid, signal.SIGKILL)
            assert not await host.alive(order.boot_id)
            kind, text = await host.why_dead(order.boot_id)
            assert kind in {"died", "oom"}
            assert text
        finally:
            await host.close()

    async def test_a_server_that_hangs_is_found(self, tmp_path: Path) -> None:
        self.need_own()
        case = self.case()
        host = self.host(case, token_timeout_s=2.0)
        order = self.order(case, tmp_path, case.arm)
        try:
            record = await host.boot(order)
            os.kill(record.pid, signal.SIGSTOP)
            assert not await host.alive(order.boot_id)
            assert (await host.why_dead(order.boot_id))[0] == "hung"
            await host.stop(order.boot_id)
            assert procfs.state(record.pid) in {None, "Z"}
        finally:
            await host.close()

    async def test_an_unknown_flag_ends_the_boot_at_once(self, tmp_path: Path) -> None:
        """Even where preflight is passed by: the server's own refusal is a config error, without retries."""
        self.need_own()
        case = self.case()
        arm = case.arm.model_copy(update={"extra_args": ("--no-such-flag", "3")})

        class Unchecked:
            def __getattr__(self, name: str) -> Any:
                return getattr(case.engine, name)

            def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
                del arm, models

        host = self.host(case, engines=lambda _: Unchecked())
        caught: EngineError | None = None
        try:
            await host.boot(self.order(case, tmp_path, arm))
        except EngineError as error:
            caught = error
        finally:
            await host.close()
        assert caught is not None, "a server started with a flag that it does not know"
        assert caught.kind == "config", str(caught)
        assert "no-such-flag" in str(caught)
