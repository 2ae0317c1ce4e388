"""vLLM: argv from typed arms, counters on recorded bytes of 0.32.0, log lines as 0.33.0's source formats them."""

import json
from pathlib import Path
from typing import Any

import pytest

from campaign.client.base import Outcome, Usage
from campaign.engines import effective
from campaign.engines.base import BootOrder, Counters
from campaign.engines.flags.check import check
from campaign.engines.flags.table import shipped
from campaign.engines.vllm import API_KEY_ENV, VLLM, arguments
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Runtime, Speculation

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
MODELS = {"m": Model(hub="org/big", revision="abc"), "head": Model(hub="org/head", revision="def")}
ARM = Arm(
    engine="vllm", model="m", tp=4, context=16384, kv_dtype="fp8", max_running_requests=8, memory_fraction=0.9,
    graph_sizes=(6, 12, 48), dtype="bfloat16", load_format="dummy", quantization="modelopt_fp4", ep=4,
    attention_backend="FLASHINFER", moe_backend="flashinfer_trtllm", prefix_cache=False, trust_remote_code=True,
    speculation=Speculation(method="eagle3", depth=5, draft_model="head"),
)  # fmt: skip
# The two lines, in the words and order of the sources of 0.24.0 and 0.33.0; a test of form, not a recording.
LOG = (
    "INFO non-default args: {'model_tag': 'org/big', 'max_num_seqs': 8, 'gpu_memory_utilization': 0.9,"
    " 'cudagraph_capture_sizes': [6, 12, 48]}\n"
    "INFO Initializing a V1 LLM engine (v0.33.0) with config: model='org/big', "
    "speculative_config=SpeculativeConfig(method='eagle3', model='org/head', num_spec_tokens=5), "
    "tokenizer='org/big', skip_tokenizer_init=False, dtype=torch.bfloat16, max_seq_len=16384, "
    "load_format=dummy, tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=1, "
    "quantization=modelopt_fp4, enforce_eager=False, kv_cache_dtype=fp8, enable_prefix_caching=False, seed=0\n"
    "INFO Using FLASHINFER attention backend out of potential backends\n"
    "INFO GPU KV cache size: 46,592 tokens\n"
)


def outcome(completion: int | None, timings: dict[str, Any] | None = None) -> Outcome:
    usage = None if completion is None else Usage(64, completion, 0)
    return Outcome(
        "r", "ok", 0, 0, 1, 2, 3, "user", 1, 1, 1, usage, None, "length", 200, None, None, None, timings
    )


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_both_versions_know_every_flag(version: str) -> None:
    runtime = Runtime(pip=f"vllm=={version}")
    argv = arguments(ARM, MODELS, 8000, runtime)
    table = shipped("vllm", version)
    assert table is not None
    assert check(table, argv[1:], {}) == []
    assert ("--per-request-spec-decode-metrics" in argv) == (version == "0.33.0")
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "num_speculative_tokens": 5, "model": "org/head", "revision": "def"}
    text = " ".join(argv)
    assert "--no-enable-prefix-caching" in argv
    assert "--cudagraph-capture-sizes 6 12 48" in text
    assert "--enable-expert-parallel" in argv
    assert "--revision abc" in text


def test_a_words_of_sglang_are_no_words_of_vllm() -> None:
    with pytest.raises(PreflightError, match="not one of vllm"):
        arguments(ARM.model_copy(update={"speculation": Speculation(method="nextn", depth=3)}), MODELS, 1)


def test_the_key_is_in_the_environment_and_fresh() -> None:
    order = BootOrder("b", "a", "0" * 16, ARM, MODELS, "p0", (0, 1, 2, 3), (), "x", 1.0)
    one, two = VLLM().launch(order, 1), VLLM().launch(order, 1)
    assert one.env[API_KEY_ENV] != two.env[API_KEY_ENV]
    assert one.headers == {"Authorization": f"Bearer {one.env[API_KEY_ENV]}"}
    assert one.env[API_KEY_ENV] not in one.argv
    assert one.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_what_the_log_says_is_in_force() -> None:
    in_force = VLLM().effective({"log": LOG})
    asked = effective.requested(ARM)
    assert effective.diff(asked, {**in_force, "attention_backend": "FLASHINFER"}) == ()
    assert in_force["kv_capacity_tokens"] == 46592
    assert in_force["attention_backend.resolved"] == "FLASHINFER"
    assert set(effective.unconfirmed(asked, in_force)) == {
        "attention_backend", "moe_backend", "ep", "trust_remote_code",
    }  # fmt: skip
    assert VLLM().effective({"log": ""}) == {}


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("kv_cache_dtype=fp8", "kv_cache_dtype=auto", "kv_dtype"),
        ("num_spec_tokens=5", "num_spec_tokens=3", "speculation.depth"),
        ("speculative_config=SpeculativeConfig(method='eagle3', model='org/head', num_spec_tokens=5)",
         "speculative_config=None", "speculation.method"),
        ("tensor_parallel_size=4", "tensor_parallel_size=1", "tp"),
        ("'max_num_seqs': 8", "'max_num_seqs': 4", "max_running_requests"),
        ("enable_prefix_caching=False", "enable_prefix_caching=True", "prefix_cache"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_a_difference(old: str, new: str, field: str) -> None:
    assert old in LOG
    found = effective.diff(effective.requested(ARM), VLLM().effective({"log": LOG.replace(old, new)}))
    assert [d.field for d in found] == [field]


def test_counters_of_the_recorded_page() -> None:
    c = VLLM().read_counters((FIXTURES / "vllm_cpu_metrics.txt").read_text())
    zero = Counters(drafts=0, drafted=0, accepted=0, accept_pos=(0, 0, 0), generated=0)
    d = VLLM().steps(ARM, zero, c, outcome(112))
    assert (d.drafts, d.drafted, d.accepted, d.accept_pos) == (17, 51, 27, (12, 8, 7))
    assert (d.steps, d.undrafted) == (84, 67)
    assert "other_traffic" in VLLM().steps(ARM, zero, c, outcome(48)).reasons


def test_the_engines_own_report_of_a_request() -> None:
    own = {"num_spec_steps": 10, "num_draft_tokens": 50, "num_accepted_draft_tokens": 30,
           "acceptance_histogram": [2, 1, 1, 2, 2, 2]}  # fmt: skip
    assert sum(j * n for j, n in enumerate(own["acceptance_histogram"])) == 27
    own["num_accepted_draft_tokens"] = 27
    counts = VLLM().steps(ARM, None, None, outcome(38, {"metrics": {"speculative_decoding": own}}))
    assert (counts.steps, counts.drafts, counts.undrafted, counts.accepted) == (10, 10, 0, 27)
    assert counts.accept_pos == (8, 7, 6, 4, 2)
    assert counts.source == "metrics.speculative_decoding"


def test_a_last_step_that_was_cut() -> None:
    own = {"num_spec_steps": 10, "num_draft_tokens": 50, "num_accepted_draft_tokens": 27}
    counts = VLLM().steps(ARM, None, None, outcome(36, {"metrics": {"speculative_decoding": own}}))
    assert (counts.steps, counts.undrafted, counts.accepted) == (10, 0, 25)
    assert counts.reasons == ()
    far = VLLM().steps(ARM, None, None, outcome(20, {"metrics": {"speculative_decoding": own}}))
    assert far.steps is None
    assert "out_of_range" in far.reasons


def test_absent_is_none_with_a_reason() -> None:
    assert VLLM().steps(ARM, None, None, outcome(9)).steps is None
    plain = ARM.model_copy(update={"speculation": None})
    assert VLLM().steps(plain, None, None, outcome(9)).steps == 8


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("vllm: error: unrecognized arguments: --no-such-flag 3", "config"),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig", "config"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
            "oom",
        ),
        ("OSError: org/none is not a local folder and is not a valid model identifier", "missing_model"),
        ("OSError: [Errno 98] Address already in use", "port_taken"),
    ],
)
def test_known_failures(line: str, kind: str) -> None:
    assert VLLM().failure(f"INFO\n{line}\n") == (kind, line)


def test_a_healthy_log_names_no_failure() -> None:
    assert VLLM().failure(LOG) is None
