"""vLLM (`vllm serve`): read as 0.24.0 and 0.33.0, counters checked on recorded bytes of 0.32.0 on a CPU.

What is in force is read from the boot log: the line of the engine's whole configuration and the line of
non-default arguments. Its own pages would need VLLM_SERVER_DEV_MODE, which opens endpoints that change it.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import failures, gpu, prometheus, runtimes
from campaign.engines.adapter import Adapter, plain
from campaign.engines.base import BootOrder, Counters, Launch, StepCounts
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Runtime, Speculation

API_KEY_ENV = "VLLM_API_KEY"
METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram_gpu",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "draft-model": "draft_model",
    "suffix": "suffix",
    "dflash": "dflash",
    "medusa": "medusa",
    "dspark": "dspark",
}
"""Our word -> vLLM's. 0.33 has no medusa, 0.24 no dspark: preflight says so by version."""
_METHOD_OF = {word: method for method, word in METHODS.items()}
_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v([^)]+)\) with config: (.*)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*\})")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_BACKEND = re.compile(r"Using (\w+) (?:attention )?backend", re.IGNORECASE)
_SPECULATIVE = re.compile(r"speculative_config=SpeculativeConfig\(method='(\w+)'.*?num_spec_tokens=(\d+)")
_FAILURES = (
    failures.pattern(
        "config",
        r"unrecogni[sz]ed arguments?|invalid choice|expected (?:one|at least one) argument|error: argument "
        r"|error: the following arguments are required|pydantic_core\._pydantic_core\.ValidationError"
        r"|ValidationError: \d+ validation error",
    ),
    failures.pattern(
        "oom",
        r"No available memory for the cache blocks|CUDA out of memory|larger than the available KV cache memory"
        r"|is less than desired GPU memory utilization",
    ),
    failures.pattern(
        "missing_model",
        r"(?:OSError|RepositoryNotFoundError|RevisionNotFoundError|LocalEntryNotFoundError).*(?:not a local folder"
        r"|does not appear to have|404)|Cannot find any model weights|Invalid repository ID or local directory",
    ),
    *failures.COMMON,
)


class VLLM(Adapter):
    """The `Engine` contract for vLLM."""

    name = "vllm"

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
        gpu.doubled(arm, arguments(arm, models, 1))
        for name in (arm.model, arm.speculation.draft_model if arm.speculation else None):
            if name is not None:
                gpu.require_folder(models, name)

    def launch(self, order: BootOrder, port: int) -> Launch:
        key = secrets.token_urlsafe(32)
        argv = [*arguments(order.config, order.models, port, order.runtime), *order.config.extra_args]
        gpu.check_flags(self.name, order.config, order.runtime, argv[1:], order.config.env)
        gpu.apply_patches(order)
        exe = runtimes.python(order.runtime, patches=order.config.patches)
        return Launch(
            argv=(exe, "-m", "vllm.entrypoints.cli.main", "serve", *argv),
            env=gpu.environment(order, {API_KEY_ENV: key}),
            headers={"Authorization": f"Bearer {key}"},
        )

    def info_paths(self) -> tuple[str, ...]:
        return ("/version", "/v1/models")

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """From the boot log, and the context from `/v1/models`. What neither says is left out."""
        log = str(info.get("log", ""))
        out: dict[str, Any] = {**_configuration(log), **_given(log)}
        if tokens := _KV_TOKENS.search(log):
            out["kv_capacity_tokens"] = int(tokens[1].replace(",", ""))
        if backend := _BACKEND.search(log):
            out["attention_backend.resolved"] = backend[1]
        listed = (info.get("/v1/models") or {}).get("data") or [{}]
        if isinstance(listed[0].get("max_model_len"), int):
            out["context"] = listed[0]["max_model_len"]
        return {k: v for k, v in out.items() if v is not None}

    def failure(self, log_tail: str) -> tuple[str, str] | None:
        return failures.find(log_tail, _FAILURES)

    def steps(
        self, arm: Arm, before: Counters | None, after: Counters | None, outcome: Outcome
    ) -> StepCounts:
        """Steps of one request: `metrics.speculative_decoding` of its own answer (0.33), else `/metrics`.

        vLLM's accepted tokens leave the bonus token out, and one draft is one step of one request.
        """
        usage = outcome.usage
        completion = usage.completion_tokens if usage else None
        cached = usage.cached_tokens if usage else None
        if (undrafted := plain(arm, outcome)) is not None:
            return undrafted
        own = ((outcome.timings or {}).get("metrics") or {}).get("speculative_decoding")
        if isinstance(own, dict) and isinstance(own.get("num_spec_steps"), int):
            return replace(_counted(own, completion), cached_tokens=cached)
        d = prometheus.delta(before, after)
        if d.generated is not None and completion is not None and d.generated != completion:
            return StepCounts(None, None, None, None, None, None, cached, "metrics", ("other_traffic",))
        return replace(_within(prometheus.step_counts(d, completion), completion), cached_tokens=cached)

    def reset_path(self, arm: Arm) -> str | None:
        # Served only where the arm itself asked for vLLM's development endpoints.
        dev = arm.env.get("VLLM_SERVER_DEV_MODE") == "1"
        return "/reset_prefix_cache" if arm.prefix_cache and dev else None


def arguments(arm: Arm, models: Mapping[str, Model], port: int, runtime: Runtime | None = None) -> list[str]:
    """The command line of an arm after `vllm serve`, `extra_args` left out. Raises PreflightError.

    `--per-request-spec-decode-metrics` is added where the version of the runtime is known to have it.
    """
    weights = gpu.ref(models, arm.model)
    model = models[str(arm.model)]
    argv = [weights.name, "--served-model-name", str(arm.model), "--host", "127.0.0.1", "--port", str(port)]
    # Else the weights' generation_config adds a top_k or top_p that no workload wrote.
    argv += ["--generation-config", "vllm", "--enable-prompt-tokens-details"]
    argv.append("--enable-prefix-caching" if arm.prefix_cache else "--no-enable-prefix-caching")
    for flag, value in (
        ("--revision", weights.revision),
        ("--tokenizer", model.tokenizer),
        ("--max-model-len", arm.context),
        ("--kv-cache-dtype", arm.kv_dtype),
        ("--tensor-parallel-size", arm.tp),
        ("--data-parallel-size", arm.dp),
        ("--pipeline-parallel-size", arm.pp),
        ("--attention-backend", arm.attention_backend),
        ("--moe-backend", arm.moe_backend),
        ("--gpu-memory-utilization", arm.memory_fraction),
        ("--quantization", arm.quantization),
        ("--dtype", arm.dtype),
        ("--load-format", arm.load_format),
        ("--max-num-seqs", arm.max_running_requests),
        ("--chat-template", arm.chat_template),
    ):
        if value is not None:
            argv += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    argv += ["--enable-expert-parallel"] * ((arm.ep or 1) > 1)
    argv += ["--trust-remote-code"] * arm.trust_remote_code
    argv += ["--enforce-eager"] * (arm.graphs is False)
    if arm.graph_sizes:
        argv += ["--cudagraph-capture-sizes", *map(str, arm.graph_sizes)]
    if arm.speculation is not None and arm.speculation.depth > 0:
        argv += ["--speculative-config", json.dumps(_speculate(arm.speculation, models))]
        table = gpu.flag_table("vllm", runtime)
        if table is not None and "--per-request-spec-decode-metrics" in table.flags:
            argv += ["--per-request-spec-decode-metrics", "summary"]
    return argv


def _speculate(spec: Speculation, models: Mapping[str, Model]) -> dict[str, Any]:
    if spec.method not in METHODS:
        raise PreflightError(
            f"speculation.method = {spec.method}: not one of vllm here. Fix: one of {', '.join(METHODS)}"
        )
    config: dict[str, Any] = {"method": METHODS[spec.method], "num_speculative_tokens": spec.depth}
    if spec.draft_model is not None:
        draft = gpu.ref(models, spec.draft_model)
        config["model"] = draft.name
        if draft.revision is not None:
            config["revision"] = draft.revision
    if spec.ngram_size is not None:
        config |= {"prompt_lookup_min": spec.ngram_size, "prompt_lookup_max": spec.ngram_size}
    if spec.draft_quantization not in {None, "none"}:  # left out, vLLM takes the draft as unquantized
        config["quantization"] = spec.draft_quantization
    if spec.draft_tp is not None:
        config["draft_tensor_parallel_size"] = spec.draft_tp
    if spec.adaptive:
        config["enable_adaptive_verification"] = True
    if spec.simulated_acceptance is not None:
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": spec.simulated_acceptance,
        }
    return config


def _configuration(log: str) -> dict[str, Any]:
    """The line in which the engine says its whole configuration."""
    found = _CONFIG.search(log)
    if found is None:
        return {}
    text = found[2]

    def word(name: str) -> str | None:
        match = re.search(rf"(?<![A-Za-z_]){name}=('?)([^,'()\s]+)\1", text)
        return None if match is None or match[2] == "None" else match[2]

    def number(name: str) -> int | None:
        value = word(name)
        return int(value) if value is not None and value.isdecimal() else None

    cached, eager = word("enable_prefix_caching"), word("enforce_eager")
    spec = _SPECULATIVE.search(text)
    out: dict[str, Any] = {
        "version": found[1],
        "context": number("max_seq_len"),
        "tp": number("tensor_parallel_size"),
        "dp": number("data_parallel_size"),
        "pp": number("pipeline_parallel_size"),
        "kv_dtype": word("kv_cache_dtype"),
        "dtype": (word("dtype") or "").removeprefix("torch.") or None,
        "quantization": word("quantization"),
        "load_format": word("load_format"),
        "prefix_cache": None if cached is None else cached == "True",
        "graphs": None if eager is None else eager == "False",
        "speculation.method": "none",
    }
    if spec is not None:
        out["speculation.method"] = _METHOD_OF.get(spec[1], spec[1])
        out["speculation.depth"] = int(spec[2])
    elif "speculative_config=None" not in text:
        del out["speculation.method"]
    return out


def _given(log: str) -> dict[str, Any]:
    """Arguments as vLLM's own parser read them, where the configuration line has none."""
    import ast

    found = _NON_DEFAULT.search(log)
    if found is None:
        return {}
    try:
        args = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return {}
    names = {
        "max_num_seqs": "max_running_requests",
        "gpu_memory_utilization": "memory_fraction",
        "moe_backend": "moe_backend",
        "attention_backend": "attention_backend",
    }
    out = {
        field: args[name] for name, field in names.items() if isinstance(args.get(name), (int, float, str))
    }
    return {**out, "graph_sizes": gpu.numbers(args.get("cudagraph_capture_sizes"))}


def _counted(own: Mapping[str, Any], completion: int | None) -> StepCounts:
    drafts, drafted, accepted = (
        own["num_spec_steps"],
        own.get("num_draft_tokens"),
        own.get("num_accepted_draft_tokens"),
    )
    histogram = gpu.numbers(own.get("acceptance_histogram"))
    positions = None
    if histogram is not None:
        positions = tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
    d = prometheus.Delta(drafts=drafts, drafted=drafted, accepted=accepted, accept_pos=positions)
    return _within(prometheus.step_counts(d, completion, source="metrics.speculative_decoding"), completion)


def _within(counts: StepCounts, completion: int | None) -> StepCounts:
    """A last step that `max_tokens` cut is counted whole by vLLM: `undrafted` of -1 to -depth is that cut.

    `prometheus.step_counts` calls it out of range; the steps are then the drafts, all of them.
    """
    if (
        "out_of_range" not in counts.reasons
        or completion is None
        or counts.drafts is None
        or counts.accepted is None
    ):
        return counts
    over = counts.drafts + counts.accepted - (completion - 1)
    most = (counts.drafted or 0) / counts.drafts if counts.drafts else 0
    if 0 < over <= most:
        reasons = tuple(r for r in counts.reasons if r != "out_of_range")
        return replace(
            counts, steps=counts.drafts, undrafted=0, accepted=counts.accepted - over, reasons=reasons
        )
    return counts
