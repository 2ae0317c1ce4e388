"""SGLang: argv from typed arms, and what recorded bytes of 0.5.14 on an H200 say. Nothing is started here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign.client.base import Outcome, Usage
from campaign.engines import effective, gpu
from campaign.engines.base import BootOrder, Counters
from campaign.engines.flags.check import check
from campaign.engines.flags.table import shipped
from campaign.engines.sglang import SGLang, arguments, own_env
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Runtime, Speculation

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
MODELS = {
    "m": Model(path="/models/tiny", tokenizer="/models/tiny"),
    "hub": Model(hub="org/big", revision="abc"),
    "head": Model(hub="org/head", revision="def"),
}
NGRAM = Speculation(method="ngram", depth=3, breadth=1)
ARM = Arm(
    engine="sglang",
    model="m",
    context=8192,
    attention_backend="triton",
    graph_sizes=(1, 2, 4, 8),
    prefill_graphs=False,
    max_running_requests=8,
    memory_fraction=0.6,
    load_format="dummy",
    prefix_cache=True,
    speculation=NGRAM,
    extra_args=("--sampling-backend", "pytorch", "--grammar-backend", "none", "--decode-log-interval", "20",
                "--random-seed", "1"),
)  # fmt: skip


def info(arm: str) -> dict[str, Any]:
    return {
        "/server_info": json.loads((FIXTURES / f"sglang_{arm}.server_info.json").read_text()),
        "/v1/loads": json.loads((FIXTURES / f"sglang_{arm}.v1_loads.json").read_text()),
        "log": (FIXTURES / f"sglang_{arm}.server.log").read_text(),
    }


def order(arm: Arm, runtime: Runtime | None = None) -> BootOrder:
    return BootOrder("s/g/r0/a@0", "a", "0" * 16, arm, MODELS, "p0", (3,), (), "x.log", 60.0, runtime)


def outcome(completion: int | None, timings: dict[str, Any] | None = None) -> Outcome:
    usage = None if completion is None else Usage(64, completion, None)
    return Outcome(
        "r", "ok", 0, 0, 1, 2, 3, "user", 1, 1, 1, usage, None, "length", 200, None, None, None, timings
    )


def test_every_field_becomes_its_flag_and_0_5_14_knows_them_all() -> None:
    argv = [*arguments(ARM, MODELS, 30010), *ARM.extra_args]
    text = " ".join(argv)
    for words in (
        "--model-path /models/tiny", "--served-model-name m", "--host 127.0.0.1", "--port 30010", "--enable-metrics",
        "--tokenizer-path /models/tiny", "--context-length 8192", "--attention-backend triton",
        "--mem-fraction-static 0.6", "--load-format dummy", "--max-running-requests 8",
        "--cuda-graph-bs-decode 1 2 4 8", "--disable-prefill-cuda-graph", "--speculative-algorithm NGRAM",
        "--speculative-num-draft-tokens 4", "--speculative-ngram-min-bfs-breadth 1",
        "--speculative-ngram-max-bfs-breadth 1",
    ):  # fmt: skip
        assert words in text, words
    table = shipped("sglang", "0.5.14")
    assert table is not None
    assert check(table, argv, own_env(ARM)) == []


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_a_wide_arm_is_known_to_both_versions(version: str) -> None:
    arm = Arm(
        engine="sglang", model="hub", tp=4, dp=1, ep=4, pp=1, kv_dtype="fp8_e4m3", quantization="modelopt_fp4",
        moe_backend="flashinfer_trtllm", dtype="bfloat16", trust_remote_code=True, graphs=False,
        max_running_requests=32, chat_template="/t.jinja",
        speculation=Speculation(method="eagle3", depth=5, draft_model="head", draft_quantization="none",
                                simulated_acceptance=2.5, adaptive=True),
    )  # fmt: skip
    argv = arguments(arm, MODELS, 1)
    table = shipped("sglang", version)
    assert table is not None
    assert check(table, argv, own_env(arm)) == []
    text = " ".join(argv)
    assert "--revision abc" in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1" in text
    assert "--speculative-num-draft-tokens 6" in text
    assert "--speculative-draft-model-path org/head --speculative-draft-model-revision def" in text
    assert "--speculative-draft-model-quantization unquant" in text
    assert "--disable-radix-cache" in argv
    assert own_env(arm) == {"SGLANG_SIMULATE_ACC_LEN": "2.5", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


def test_the_environment_of_a_launch(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/env")
    arm = ARM.model_copy(
        update={
            "env": {"PYTHONPATH": "/opt/site"},
            "speculation": NGRAM.model_copy(update={"simulated_acceptance": 2.5}),
        }
    )
    launch = SGLang().launch(order(arm, Runtime(venv=str(tmp_path / "venv"), version="0.5.14")), 30010)
    assert launch.argv[:3] == (str(python), "-m", "sglang.launch_server")
    assert launch.argv[-len(ARM.extra_args) :] == ARM.extra_args
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert launch.env["PYTHONPATH"] == "/opt/site"
    assert launch.env["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert launch.headers == {}


def test_a_removed_flag_is_refused_on_the_node_before_weights_load(tmp_path: Path) -> None:
    arm = ARM.model_copy(update={"extra_args": ("--cuda-graph-max-bs", "8")})
    with pytest.raises(PreflightError, match=r"--cuda-graph-max-bs = 8.*write --cuda-graph-max-bs-decode"):
        SGLang().launch(order(arm, Runtime(venv=str(tmp_path), version="0.5.23")), 1)


@pytest.mark.parametrize("word", ["--port", "--attention-backend", "--mem-fraction-static"])
def test_a_flag_said_twice_is_refused(word: str) -> None:
    with pytest.raises(PreflightError, match=f"{word} is set by a field"):
        SGLang().preflight(ARM.model_copy(update={"extra_args": (word, "1")}), MODELS)


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"no config\.json"):
        SGLang().preflight(ARM, MODELS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    arm = ARM.model_copy(update={"model": "here"})
    SGLang().preflight(arm, {"here": Model(path=str(tmp_path))})
    with pytest.raises(PreflightError, match="finish the download"):
        SGLang().preflight(arm, {"here": Model(path=str(tmp_path), gb=16)})


# --- what is in force


def test_the_recorded_arm_is_what_was_asked() -> None:
    in_force = SGLang().effective(info("ngram4"))
    asked = effective.requested(ARM)
    assert effective.diff(asked, in_force) == ()
    assert effective.unconfirmed(asked, in_force) == ()
    assert in_force["version"] == "0.5.14"
    assert in_force["kv_capacity_tokens"] == 572948
    assert in_force["kv_dtype.resolved"] == "bfloat16"
    assert in_force["verify_width"] == 4
    assert (in_force["weights_gb"], in_force["kv_gb"]) == (13.51, 69.94)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_dtype": "fp8_e5m2"}, "kv_dtype"),
        ({"attention_backend": "fa3"}, "attention_backend"),
        ({"tp": 4}, "tp"),
        ({"speculation": Speculation(method="ngram", depth=7, breadth=1)}, "speculation.depth"),
        ({"speculation": Speculation(method="ngram", depth=3, breadth=4)}, "speculation.breadth"),
        ({"speculation": None}, "speculation.method"),
        ({"graphs": False}, "graphs"),
        ({"graph_sizes": (1, 2)}, "graph_sizes"),
        ({"max_running_requests": 48}, "max_running_requests"),
        ({"prefix_cache": False}, "prefix_cache"),
    ],
)
def test_what_the_engine_did_not_honour_is_a_difference(changes: dict[str, Any], field: str) -> None:
    asked = effective.requested(ARM.model_copy(update=changes))
    assert [d.field for d in effective.diff(asked, SGLang().effective(info("ngram4")))] == [field]


def test_base_speculates_nothing() -> None:
    in_force = SGLang().effective(info("base"))
    assert in_force["speculation.method"] == "none"
    asked = effective.requested(ARM.model_copy(update={"speculation": None}))
    assert effective.diff(asked, in_force) == ()
    assert SGLang().effective({"/server_info": None, "log": ""}) == {}


def test_the_log_wins_over_the_page_on_kv_types() -> None:
    pages = info("base")
    pages["/server_info"]["kv_cache_dtype"] = "fp8_e5m2"
    assert SGLang().effective(pages)["kv_dtype"] == "bfloat16"
    pages["log"] = pages["log"].replace("dtype: torch.bfloat16, #tokens", "dtype: torch.float8_e5m2, #tokens")
    assert SGLang().effective(pages)["kv_dtype"] == "fp8_e5m2"
    pages["/server_info"]["kv_cache_dtype"] = "bf16"
    pages["log"] = info("base")["log"]
    assert SGLang().effective(pages)["kv_dtype"] == "bf16"


@pytest.mark.parametrize("arm", ["base", "ngram4"])
def test_a_healthy_log_denies_nothing_and_names_no_failure(arm: str) -> None:
    log = info(arm)["log"]
    assert effective.log_differences(log, {}, ARM.extra_args) == ()
    boot = log[: log.index("The server is fired up")]
    assert SGLang().failure(boot) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("launch_server.py: error: unrecognized arguments: --no-such-flag 3", "config"),
        ("launch_server.py: error: argument --kv-cache-dtype: invalid choice: 'fp8'", "config"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "oom"),
        ("OSError: /nope does not appear to have a file named config.json", "missing_model"),
        (
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30010): address already in use",
            "port_taken",
        ),
    ],
)
def test_known_failures(line: str, kind: str) -> None:
    assert SGLang().failure(f"[2026-12-01] INFO\n{line}\n") == (kind, line)


# --- steps


def scrape(name: str) -> Counters:
    return SGLang().read_counters((FIXTURES / f"sglang_{name}.txt").read_text())


def test_the_engines_own_report_of_a_request() -> None:
    answer = json.loads((FIXTURES / "sglang_ngram4.chat_meta.json").read_text())["body"]
    report = answer["choices"][0]["meta_info"]
    counts = SGLang().steps(ARM, None, None, outcome(64, {"meta_info": report}))
    # 64 tokens: one of prefill, 16 verify steps, 47 accepted; SGLang says 48, the last of which was cut.
    assert (counts.steps, counts.drafts, counts.undrafted, counts.drafted, counts.accepted) == (
        16,
        16,
        0,
        48,
        47,
    )
    assert counts.accept_pos is None
    assert counts.cached_tokens == 63
    assert counts.source == "meta_info"


def test_the_report_of_0_5_23() -> None:
    details = {
        "spec_verify_ct": 16,
        "spec_num_proposed_drafts": 48,
        "spec_correct_drafts_histogram": [1, 0, 0, 15],
    }
    timings = {"sglext": {"spec_tokens_details": details, "cached_tokens_details": {"device": 5, "host": 1}}}
    counts = SGLang().steps(ARM, None, None, outcome(62, timings))
    assert (counts.steps, counts.accepted, counts.accept_pos, counts.cached_tokens) == (
        16,
        45,
        (15, 15, 15),
        6,
    )


def test_verify_calls_of_one_request_between_two_scrapes() -> None:
    before = scrape("ngram4.metrics_before")
    after = replace(
        before, verify_steps=(before.verify_steps or 0) + 100, generated=(before.generated or 0) + 256
    )
    counts = SGLang().steps(ARM, before, after, outcome(256))
    assert (counts.steps, counts.drafts, counts.accepted, counts.drafted) == (100, 100, 155, 300)
    assert counts.steps + counts.accepted == 255


def test_the_first_speculated_request_of_a_process_is_counted() -> None:
    before = scrape("base.metrics_before")
    assert before.verify_steps is None
    after = replace(before, verify_steps=10, generated=(before.generated or 0) + 33)
    counts = SGLang().steps(ARM, before, after, outcome(33))
    assert (counts.steps, counts.accepted) == (10, 22)


@pytest.mark.parametrize(
    ("verify", "generated", "completion", "reason"),
    [(100, 300, 256, "other_traffic"), (300, 256, 256, "out_of_range"), (10, 256, 256, "out_of_range")],
)
def test_counts_that_cannot_be_of_this_request(
    verify: int, generated: int, completion: int, reason: str
) -> None:
    before = scrape("ngram4.metrics_before")
    after = replace(
        before,
        verify_steps=(before.verify_steps or 0) + verify,
        generated=(before.generated or 0) + generated,
    )
    counts = SGLang().steps(ARM, before, after, outcome(completion))
    assert counts.steps is None
    assert reason in counts.reasons


def test_without_scrapes_or_usage_steps_are_unknown() -> None:
    assert SGLang().steps(ARM, None, None, outcome(64)).reasons == ("absent",)
    plain = ARM.model_copy(update={"speculation": None})
    assert SGLang().steps(plain, None, None, outcome(64)).steps == 63
    assert SGLang().steps(plain, None, None, outcome(None)).reasons == ("no_usage",)


def test_restart_and_reset_are_told() -> None:
    before = scrape("ngram4.metrics_before")
    fell = replace(before, generated=0, verify_steps=0)
    assert "counter_reset" in SGLang().steps(ARM, before, fell, outcome(9)).reasons
    other = replace(before, started=(before.started or 1.0) + 60)
    before = replace(before, started=before.started or 1.0)
    assert "engine_restarted" in SGLang().steps(ARM, before, other, outcome(9)).reasons


def test_shard_progress_of_a_loading_log() -> None:
    line = "Loading safetensors checkpoint shards:  43% Completed | 3/7 [00:12<00:16,  4.0s/it]"
    assert gpu.shards(f"x\n{line}\n") == (3, 7, "00:16")
    assert gpu.shards("nothing") is None
