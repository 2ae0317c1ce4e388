"""Weights of a session against the disk of its node: what is fetched, what it takes, and who is refused."""

import pytest

from campaign.errors import SpecError
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.spec.load import load_bytes
from campaign.spec.models import Model
from campaign.spec.storage import FETCH_GB_S, KEEP_GB, disk_gb, fetch_s, fetched

SPEC = """\
version: 1
campaign: disks
budget: {{cap_usd: 400}}
nodes: {{gpu: {{provider: sky, accelerators: "H100:2", max_usd_per_hour: 6, max_hours: 4, disk_gb: {disk}}}}}
models:
  one: {{hub: o/one, revision: a{cache}, gb: 140}}
  two: {{hub: o/two, revision: b, gb: 60}}
  head: {{hub: o/head, revision: c, gb: 3}}
runtimes: {{s: {{pip: "sglang==0.5.23"}}}}
arms:
  a: {{engine: sglang, runtime: s, model: one, tp: 2, max_running_requests: 1,
      speculation: {{method: eagle3, depth: 3, draft_model: head, draft_quantization: none}}}}
  b: {{engine: sglang, runtime: s, model: two, tp: 2, max_running_requests: 1}}
workloads: {{w: {{pack: health, n: 2, max_tokens: 8}}}}
anchor: {{arm: b, workload: w, drift_delta: 0.1}}
pairs: {{ab: {{a: a, b: b, workload: w, primary: decode_tok_s}}}}
sessions: {{main: {{node: gpu, pairs: [ab]}}}}
"""


def spec(disk: int, cache: str = ""):
    return load_bytes(SPEC.format(disk=disk, cache=cache).encode(), "e.yaml", (), {}).spec


def test_every_model_of_a_session_lies_on_the_disk_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        spec(262)
    (problem,) = caught.value.problems
    assert (problem.line, problem.field) == (4, "nodes.gpu.disk_gb")
    assert "two 60 GB, one 140 GB, head 3 GB beside 60 GB" in problem.why
    assert "263" in problem.fix
    # 140 + 60 + 3 and what the system takes.
    assert spec(263)
    # A folder of the node is not fetched.
    assert spec(150, ", cache: /mnt/weights")


def test_fetching_is_part_of_the_sessions_minutes_and_dollars() -> None:
    fetching, there = spec(2000), spec(2000, ", cache: /mnt/weights")
    (slow,) = build(fetching, declared_prices(fetching)).sessions
    plan = build(there, declared_prices(there))
    (fast,) = plan.sessions
    assert slow.seconds - fast.seconds == pytest.approx(140 / FETCH_GB_S)
    assert slow.usd_expected > fast.usd_expected
    (line,) = (a for a in plan.assumptions if "weights" in a)
    assert line.startswith(
        "session main: weights two 55.9 GiB (fetched in 2.0 min), one 130.4 GiB (from /mnt/weights), head 2.8 GiB"
    )
    assert "189.1 GiB of a disk of 1863 GiB, 2.1 min of set-up at 0.5 GB/s" in line


def test_unknown_sizes_refuse_nothing() -> None:
    models = {"a": Model(hub="o/a", revision="r"), "b": Model(hub="o/b", revision="r", gb=10.0),
              "p": Model(path="/m", gb=99.0), "s": Model(hub="o/s", revision="r", gb=5.0, cache="s3://b/s")}  # fmt: skip
    assert disk_gb(["a", "b"], models) is None
    assert disk_gb(["p"], models) is None
    assert disk_gb(["b", "p", "s"], models) == KEEP_GB + 15
    assert fetch_s(["a", "b", "p"], models) == 10 / FETCH_GB_S
    assert [fetched(m) for m in models.values()] == [True, True, False, True]
