"""Silent traps of engines: refused with file, line, field, value and fix, or made a written field."""

import json
from pathlib import Path

import pytest

from campaign.errors import SpecError
from campaign.spec.load import load_bytes
from campaign.spec.traps import graph_need

CASES = Path(__file__).parent.parent / "data" / "cases"
SPEC = """\
version: 1
campaign: demo
budget: {{cap_usd: 40}}
nodes:
  gpu: {{provider: local, usd_per_hour: 4, max_hours: 3, gpus: [0, 1]}}
models:
  big: {{hub: org/big, revision: abc123}}
  head: {{hub: org/head, revision: def456}}
  folder: {{path: /models/x}}
runtimes:
  new: {{pip: "sglang==0.5.23"}}
arms:
  base: {{engine: sglang, model: big, max_running_requests: 8}}
  arm: {arm}
workloads:
  chat: {{pack: quickstart-chat, n: 6, max_tokens: 48}}
anchor: {{arm: base, workload: chat, drift_delta: 0.05}}
pairs:
  p: {pair}
sessions:
  main: {{node: gpu, pairs: [p]}}
"""
PAIR = "{a: base, b: arm, workload: chat}"


def load(arm: str, pair: str = PAIR):
    return load_bytes(SPEC.format(arm=arm, pair=pair).encode(), "f.yaml", (), {})


def refused(arm: str, pair: str = PAIR) -> str:
    with pytest.raises(SpecError) as caught:
        load(arm, pair)
    assert all(p.line and p.fix for p in caught.value.problems)
    return str(caught.value)


NGRAM = (
    "{engine: sglang, model: big, max_running_requests: 8, speculation: {method: ngram, depth: 3, breadth: 1"
)
EAGLE = "{engine: sglang, model: big, max_running_requests: 8, speculation: {method: eagle3, depth: 3, draft_model: head"


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("{engine: sglang, model: big, speculation: {method: ngram, depth: 3, breadth: 1}}", "48"),
        (NGRAM.replace(", breadth: 1", "") + "}}", "tree of breadth 1 to 10"),
        (NGRAM + ", topk: 2}}", "derives topk"),
        (NGRAM + ", draft_tokens: 3}}", "depth 3 makes it 4"),
        (NGRAM + ", ngram_size: 3}}", "ngram_size means nothing to sglang"),
        (NGRAM + ", draft_model: head}}", "no use with ngram"),
        (EAGLE + ", steps: 5}}", "steps 5 is depth 5"),
        (EAGLE + ", topk: 4}}", "not the depth"),
        (EAGLE.replace(", draft_model: head", "") + "}}", "needs a draft_model"),
        (EAGLE + "}, quantization: modelopt_fp4}", "inherit quantization modelopt_fp4"),
        ("{engine: sglang, model: big, max_running_requests: 8, kv_dtype: fp8}", "vLLM only"),
        (
            "{engine: sglang, model: big, max_running_requests: 8, graph_sizes: [1, 4]}",
            "those steps are eager",
        ),
        ("{engine: vllm, model: big, tp: 2, ep: 3}", "tp x dp"),
        ("{engine: vllm, model: folder, trust_remote_code: true}", "not pinned"),
        (
            (
                "{engine: vllm, model: big, max_running_requests: 6, graph_sizes: [7, 40],"
                " speculation: {method: ngram, depth: 6}}"
            ),
            "no multiple of 1 + depth = 7",
        ),
        (
            (
                "{engine: vllm, model: big, max_running_requests: 6, graph_sizes: [7, 35],"
                " speculation: {method: ngram, depth: 6}}"
            ),
            "take 42",
        ),
        (
            "{engine: sglang, model: big, max_running_requests: 8, graphs: false, graph_sizes: [8]}",
            "turns off",
        ),
        ("{engine: sglang, model: big, max_running_requests: 8, threads: 2}", "means nothing to sglang"),
        (
            "{engine: sglang, model: big, max_running_requests: 8, env: {SGLANG_SIMULATE_ACC_LEN: 2.5}}",
            "speculation.simulated_acceptance",
        ),
        ("{engine: command}", "has no `command:`"),
        ("{engine: api}", "has no `api:`"),
    ],
)
def test_a_trap_is_refused(arm: str, words: str) -> None:
    assert words in refused(arm)


@pytest.mark.parametrize(
    "arm",
    [
        NGRAM + "}}",
        NGRAM + ", draft_tokens: 4, simulated_acceptance: 2.5}}",
        EAGLE + ", draft_quantization: none}, quantization: modelopt_fp4}",
        EAGLE + ", topk: 4, steps: 3, draft_tokens: 4}}",
        "{engine: vllm, model: big, tp: 2, ep: 2, trust_remote_code: true}",
        (
            "{engine: vllm, model: big, kv_dtype: fp8, quantization: fp8,"
            " speculation: {method: eagle3, depth: 5, draft_model: head}}"
        ),
        (
            "{engine: sglang, model: folder, runtime: new, tp: 1, kv_dtype: fp8_e5m2, max_running_requests: 8,"
            " graph_sizes: [1, 2, 4, 8], prefill_graphs: false, memory_fraction: 0.6, attention_backend: triton,"
            " load_format: dummy, context: 8192, extra_args: [--sampling-backend, pytorch]}"
        ),
    ],
)
def test_what_says_what_it_means_loads(arm: str) -> None:
    load(arm)


def test_the_base_is_pinned_where_its_partner_speculates() -> None:
    text = SPEC.format(arm=NGRAM + "}}", pair=PAIR).replace(
        "base: {engine: sglang, model: big, max_running_requests: 8}", "base: {engine: sglang, model: big}"
    )
    with pytest.raises(SpecError, match=r"arms\.base.*48"):
        load_bytes(text.encode(), "f.yaml", (), {})


def test_a_ladder_of_depths_needs_a_fixed_depth() -> None:
    text = SPEC.format(arm=EAGLE + ", adaptive: true}}", pair=PAIR).replace(
        "pairs:",
        "ladders:\n  d: {base: base, from: arm, field: speculation.depth, values: [3, 5], workload: chat}\npairs:",
        1,
    )
    with pytest.raises(SpecError, match="changes its depth by itself"):
        load_bytes(text.encode(), "f.yaml", (), {})


def test_one_request_at_a_time() -> None:
    arm = "{engine: command, model: big, command: {argv: [srv, --port, '{port}'], one_at_a_time: true}}"
    load(arm)
    assert "serves one at a time" in refused(arm, "{a: base, b: arm, workload: chat, concurrency: [1, 4]}")


def test_graph_cover_of_the_reported_failures() -> None:
    document = json.loads((CASES / "17_graph_cover.json").read_text())
    for case in document["cases"]:
        need = graph_need(case["max_num_seqs"], case["spec_tokens"])
        assert need == case["need"]
        assert (case["max_capture"] >= need) is case["covered"]
    assert graph_need(32, 3, concurrency=1) == 4


def test_names_that_differ_only_by_default_keep_their_hash() -> None:
    from campaign.spec.models import Arm
    from campaign.spec.resolve import arm_hash

    # Hashes of arms written before these fields existed.
    assert arm_hash(Arm(engine="llamacpp", threads=1), {}) == arm_hash(
        Arm(engine="llamacpp", threads=1, patches=(), allow_unknown=(), trust_remote_code=False), {}
    )
