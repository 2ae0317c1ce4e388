"""SGLang (`sglang.launch_server`): run as 0.5.14, read as 0.5.23. See docs/ENGINES.md for the words.

SGLang takes its API key on the command line alone and prints it in its log, so none is given: the server
listens on 127.0.0.1, and that is its guard.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import failures, gpu, prometheus, runtimes
from campaign.engines.adapter import Adapter, plain
from campaign.engines.base import BootOrder, Counters, Launch, StepCounts
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Speculation

METHODS = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "draft-model": "STANDALONE",
    "dflash": "DFLASH",
}
"""Our word -> SGLang's. `mtp` drafts with the model's own layers and is in force as EAGLE."""
_METHOD_OF = {word: method for method, word in METHODS.items()}
_KV_OF_TORCH = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.float8_e4m3fn": "fp8_e4m3",
}
_SAME_KV = {"bf16": "bfloat16"}
_KV_LINE = re.compile(r"KV Cache is allocated\. dtype: (\S+), #tokens: (\d+)")
_VERIFY_GRAPH = re.compile(r"Capture target verify CUDA graph begin\..*num_tokens_per_bs=(\d+)")
_FAILURES = (
    failures.pattern(
        "config",
        r"unrecogni[sz]ed arguments?|invalid choice|expected (?:one|at least one) argument|error: argument "
        r"|ambiguous option|error: the following arguments are required"
        r"|AssertionError.*(?:speculative|tp_size|dp_size)|Unknown speculative algorithm",
    ),
    failures.pattern(
        "oom", r"Not enough memory\. Please try to increase --mem-fraction-static|CUDA out of memory"
    ),
    failures.pattern(
        "missing_model",
        r"(?:OSError|RepositoryNotFoundError|RevisionNotFoundError).*(?:not a local folder|does not appear to have|404)"
        r"|Cannot find any model weights|Incorrect path_or_model_id",
    ),
    *failures.COMMON,
)
_SIMULATE = ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD")


class SGLang(Adapter):
    """The `Engine` contract for SGLang."""

    name = "sglang"

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
        argv = arguments(arm, models, 1)
        gpu.doubled(arm, argv)
        for name in (arm.model, arm.speculation.draft_model if arm.speculation else None):
            if name is not None:
                gpu.require_folder(models, name)

    def launch(self, order: BootOrder, port: int) -> Launch:
        argv = [*arguments(order.config, order.models, port), *order.config.extra_args]
        env = gpu.environment(order, own_env(order.config))
        gpu.check_flags(
            self.name, order.config, order.runtime, argv, {**own_env(order.config), **order.config.env}
        )
        gpu.apply_patches(order)
        exe = runtimes.python(order.runtime, patches=order.config.patches)
        return Launch(argv=(exe, "-m", "sglang.launch_server", *argv), env=env)

    def info_paths(self) -> tuple[str, ...]:
        return ("/server_info", "/model_info", "/v1/loads")

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """From `/server_info` and the boot log; `kv_dtype` of `auto` is what the log says was allocated.

        Besides arm fields: `kv_dtype.resolved`, `kv_capacity_tokens`, `weights_gb`, `kv_gb`, `graph_gb`,
        `verify_width` and `version`.
        """
        page, log = info.get("/server_info") or {}, str(info.get("log", ""))
        if not isinstance(page, dict) or not page:
            return {}
        graphs = _graphs(page)
        out: dict[str, Any] = {
            "context": page.get("context_length"),
            "tp": page.get("tp_size"),
            "dp": page.get("dp_size"),
            "ep": page.get("ep_size"),
            "pp": page.get("pp_size"),
            "attention_backend": page.get("attention_backend"),
            "moe_backend": page.get("moe_runner_backend"),
            "memory_fraction": page.get("mem_fraction_static"),
            "quantization": page.get("quantization"),
            "dtype": page.get("dtype"),
            "load_format": page.get("load_format"),
            "max_running_requests": page.get("max_running_requests"),
            "prefix_cache": None if "disable_radix_cache" not in page else not page["disable_radix_cache"],
            "version": page.get("version"),
            **graphs,
            **_kv(page, log),
            **_memory(page),
            **_speculation(page, log),
        }
        return {k: v for k, v in out.items() if v is not None}

    def failure(self, log_tail: str) -> tuple[str, str] | None:
        return failures.find(log_tail, _FAILURES)

    def steps(
        self, arm: Arm, before: Counters | None, after: Counters | None, outcome: Outcome
    ) -> StepCounts:
        """Steps of one request: its own report where there is one (`meta_info`, `sglext`), else `/metrics`.

        SGLang counts a verify call for every decode step of a finished request, so steps are verify calls,
        all of them drafted, and `accepted = completion - 1 - steps`. Its own `spec_num_correct_drafts` also
        counts tokens of the last step that `max_tokens` cut off.
        """
        usage = outcome.usage
        completion = usage.completion_tokens if usage else None
        cached = _cached(outcome)
        undrafted = plain(arm, outcome)
        if undrafted is not None:
            return replace(undrafted, cached_tokens=cached)
        assert arm.speculation is not None
        report = _report(outcome)
        if report is not None:
            return replace(
                _counted(arm.speculation, completion, report, source="meta_info"), cached_tokens=cached
            )
        d = prometheus.delta(_from_zero(before, after), after)
        problems = [r for r in d.reasons if r != "no_drafts"]
        if d.verify_steps is None or problems:
            return StepCounts(
                None, None, None, None, None, None, cached, "metrics", tuple(problems) or ("absent",)
            )
        if d.generated is not None and completion is not None and d.generated != completion:
            return StepCounts(None, None, None, None, None, None, cached, "metrics", ("other_traffic",))
        counts = _counted(arm.speculation, completion, {"spec_verify_ct": d.verify_steps}, source="metrics")
        return replace(counts, cached_tokens=cached)

    def request_extras(self, arm: Arm) -> Mapping[str, Any]:
        # 0.5.14 does not know the second and ignores it.
        extras: dict[str, Any] = {"return_cached_tokens_details": True}
        if arm.speculation is not None and arm.speculation.depth > 0:
            extras["return_spec_tokens_details"] = True
        return extras

    def running_path(self) -> str | None:
        return "/v1/loads"

    def running(self, page: bytes) -> int | None:
        """Requests that run or wait on all ranks."""
        try:
            loads = json.loads(page)["loads"]
            return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in loads)
        except (ValueError, KeyError, TypeError):
            return None

    def reset_path(self, arm: Arm) -> str | None:
        # It also empties the corpus of the n-gram drafter.
        drafts = arm.speculation is not None and arm.speculation.depth > 0
        return "/flush_cache" if arm.prefix_cache or (drafts and _ngram(arm)) else None


def _ngram(arm: Arm) -> bool:
    return arm.speculation is not None and arm.speculation.method == "ngram"


def own_env(arm: Arm) -> dict[str, str]:
    """Variables that fields of the arm become."""
    spec = arm.speculation
    if spec is None or spec.simulated_acceptance is None:
        return {}
    return dict(zip(_SIMULATE, (f"{spec.simulated_acceptance:g}", "match-expected"), strict=True))


def arguments(arm: Arm, models: Mapping[str, Model], port: int) -> list[str]:
    """The command line of an arm, `extra_args` left out; nothing needs to be installed. Raises PreflightError."""
    weights = gpu.ref(models, arm.model)
    argv = ["--model-path", weights.name, "--served-model-name", str(arm.model)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
    # Else the weights' generation_config adds a top_k or top_p that no workload wrote.
    argv += ["--sampling-defaults", "openai"]
    model = models[str(arm.model)]
    for flag, value in (
        ("--revision", weights.revision),
        ("--tokenizer-path", model.tokenizer),
        ("--context-length", arm.context),
        ("--kv-cache-dtype", arm.kv_dtype),
        ("--tp-size", arm.tp),
        ("--dp-size", arm.dp),
        ("--ep-size", arm.ep),
        ("--pp-size", arm.pp),
        ("--attention-backend", arm.attention_backend),
        ("--moe-runner-backend", arm.moe_backend),
        ("--mem-fraction-static", arm.memory_fraction),
        ("--quantization", arm.quantization),
        ("--dtype", arm.dtype),
        ("--load-format", arm.load_format),
        ("--max-running-requests", arm.max_running_requests),
        ("--chat-template", arm.chat_template),
    ):
        if value is not None:
            argv += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    for flag, wanted in (
        ("--disable-radix-cache", not arm.prefix_cache),
        ("--trust-remote-code", arm.trust_remote_code),
        ("--disable-decode-cuda-graph", arm.graphs is False),
        ("--disable-prefill-cuda-graph", arm.prefill_graphs is False),
    ):
        argv += [flag] * bool(wanted)
    if arm.graph_sizes:
        argv += ["--cuda-graph-bs-decode", *map(str, arm.graph_sizes)]
    if arm.speculation is not None and arm.speculation.depth > 0:
        argv += _speculate(arm.speculation, models)
    return argv


def _speculate(spec: Speculation, models: Mapping[str, Model]) -> list[str]:
    if spec.method not in METHODS:
        raise PreflightError(
            f"speculation.method = {spec.method}: not one of sglang here. Fix: one of {', '.join(METHODS)}"
        )
    # W = depth + 1: SGLang's draft tokens count the bonus token.
    argv = [
        "--speculative-algorithm",
        METHODS[spec.method],
        "--speculative-num-draft-tokens",
        str(spec.depth + 1),
    ]
    if spec.method == "ngram":
        breadth = str(spec.breadth or 1)
        argv += [
            "--speculative-ngram-min-bfs-breadth",
            breadth,
            "--speculative-ngram-max-bfs-breadth",
            breadth,
        ]
    elif spec.method != "dflash":
        argv += ["--speculative-num-steps", str(spec.steps or spec.depth)]
        argv += ["--speculative-eagle-topk", str(spec.topk or 1)]
    if spec.draft_model is not None:
        draft = gpu.ref(models, spec.draft_model)
        argv += ["--speculative-draft-model-path", draft.name]
        if draft.revision is not None:
            argv += ["--speculative-draft-model-revision", draft.revision]
    if spec.draft_quantization is not None:
        # Left out, SGLang gives the draft its target's; its word for none is `unquant`.
        word = "unquant" if spec.draft_quantization == "none" else spec.draft_quantization
        argv += ["--speculative-draft-model-quantization", word]
    return [*argv, *["--speculative-adaptive"] * spec.adaptive]


def _graphs(page: Mapping[str, Any]) -> dict[str, Any]:
    config = page.get("cuda_graph_config")
    if not isinstance(config, dict):
        return {}
    decode, prefill = config.get("decode") or {}, config.get("prefill") or {}
    on = decode.get("backend") not in {None, "disabled"}
    return {
        "graphs": on,
        "graph_sizes": gpu.numbers(decode.get("bs")) if on else None,
        "prefill_graphs": prefill.get("backend") not in {None, "disabled"},
    }


def _kv(page: Mapping[str, Any], log: str) -> dict[str, Any]:
    said, line = page.get("kv_cache_dtype"), _KV_LINE.search(log)
    if line is None:
        return {"kv_dtype": None if said == "auto" else said}
    allocated = _KV_OF_TORCH.get(line[1].rstrip(","), line[1])
    # The page repeats what was asked; the log says what was allocated, and is right where they differ.
    same = said == "auto" or _SAME_KV.get(str(said), said) == allocated
    return {"kv_dtype": said if same else allocated, "kv_dtype.resolved": allocated}


def _memory(page: Mapping[str, Any]) -> dict[str, Any]:
    states = page.get("internal_states")
    usage = (states[0].get("memory_usage") or {}) if isinstance(states, list) and states else {}
    return {
        "kv_capacity_tokens": page.get("max_total_num_tokens") or usage.get("token_capacity"),
        "weights_gb": usage.get("weight"),
        "kv_gb": usage.get("kvcache"),
        "graph_gb": usage.get("graph"),
    }


def _speculation(page: Mapping[str, Any], log: str) -> dict[str, Any]:
    word = page.get("speculative_algorithm")
    if word is None:
        return {"speculation.method": "none"}
    width = page.get("speculative_num_draft_tokens")
    captured = _VERIFY_GRAPH.search(log)
    method = _METHOD_OF.get(str(word), str(word).lower())
    if method == "eagle" and page.get("speculative_draft_model_path") in {None, page.get("model_path")}:
        method = "mtp"  # NEXTN is in force as EAGLE that drafts with the target's own layers
    out: dict[str, Any] = {
        "speculation.method": method,
        "speculation.depth": None if width is None else int(width) - 1,
        "speculation.draft_tokens": width,
        "speculation.steps": page.get("speculative_num_steps"),
        "speculation.topk": page.get("speculative_eagle_topk"),
        "speculation.adaptive": bool(page.get("speculative_adaptive")),
        "verify_width": int(captured[1]) if captured else None,
    }
    if word == "NGRAM":
        low, high = (
            page.get("speculative_ngram_min_bfs_breadth"),
            page.get("speculative_ngram_max_bfs_breadth"),
        )
        out["speculation.breadth"] = low if low == high else f"{low} to {high}"
    return out


def _from_zero(before: Counters | None, after: Counters | None) -> Counters | None:
    """SGLang makes the counter of verify calls at its first one: absent before, it stood at zero."""
    if before is None or after is None or before.verify_steps is not None or after.verify_steps is None:
        return before
    return replace(before, verify_steps=0)


def _report(outcome: Outcome) -> Mapping[str, Any] | None:
    timings = outcome.timings or {}
    details = (timings.get("sglext") or {}).get("spec_tokens_details")
    if isinstance(details, list):
        details = details[0] if details else None
    found = details or timings.get("meta_info")
    return found if isinstance(found, dict) and isinstance(found.get("spec_verify_ct"), int) else None


def _cached(outcome: Outcome) -> int | None:
    timings = outcome.timings or {}
    details = (timings.get("sglext") or {}).get("cached_tokens_details")
    if isinstance(details, dict):
        parts = [v for v in details.values() if isinstance(v, int)]
        return sum(parts) if parts else None
    meta = timings.get("meta_info") or {}
    if isinstance(meta.get("cached_tokens"), int):
        return int(meta["cached_tokens"])
    return outcome.usage.cached_tokens if outcome.usage else None


def _counted(
    spec: Speculation, completion: int | None, report: Mapping[str, Any], *, source: str
) -> StepCounts:
    steps = int(report["spec_verify_ct"])
    histogram = gpu.numbers(
        report.get("spec_correct_drafts_histogram") or report.get("spec_accept_histogram")
    )
    proposed = report.get("spec_num_proposed_drafts", report.get("spec_proposed_drafts"))
    drafted = int(proposed) if isinstance(proposed, int) else steps * spec.depth
    if completion is None:
        return StepCounts(None, steps, None, drafted, None, None, None, source, ("no_usage",))
    accepted = completion - 1 - steps
    if accepted < 0 or accepted > drafted:
        return StepCounts(None, steps, None, drafted, None, None, None, source, ("out_of_range",))
    if steps == 0:
        return StepCounts(0, 0, 0, 0, 0, (), None, source, ("no_drafts",))
    return StepCounts(steps, steps, 0, drafted, accepted, _positions(histogram, accepted), None, source)


def _positions(histogram: list[int] | None, accepted: int) -> tuple[int, ...] | None:
    """Accepted at position 0, 1, ... from counts of steps that accepted j; None where the last step was cut."""
    if histogram is None or sum(j * n for j, n in enumerate(histogram)) != accepted:
        return None
    return tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
