"""llama.cpp through xllamacpp: a CPU (or GPU) server in this Python environment. See docs/ENGINES.md.

Written against xllamacpp 2026.10.11549, whose counters were checked on real requests: at concurrency 1
`n_decode_total` grows by prefill batches + drafts + undrafted steps, so
`completion - 1 = accepted + drafts + undrafted` is measured there and not only assumed.
"""

import importlib.metadata
import importlib.util
import io
import math
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any

from campaign.client.base import Outcome
from campaign.engines import failures, prometheus, weights
from campaign.engines.adapter import Adapter
from campaign.engines.base import BootOrder, Counters, Launch, StepCounts
from campaign.engines.llamacpp_server import API_KEY_ENV, KV_DTYPES, parser
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Speculation

_METHODS = {
    "ngram": "ngram-simple",
    "ngram-map-k": "ngram-map-k",
    "ngram-map-k4v": "ngram-map-k4v",
    "ngram-mod": "ngram-mod",
    "draft-model": "draft-simple",
}
_METHOD_OF = {drafter: method for method, drafter in _METHODS.items()}
_NGRAM_SIZE = 3
_MIN_NGRAM_DEPTH = 2
_LOG_LEVEL = 4
"""The level that prints KV types and drafters at boot: some 20 lines a request, none per token."""
_FAILURES = (
    *failures.COMMON,
    failures.pattern("port_taken", r"couldn't bind HTTP server socket"),
    failures.pattern(
        "oom", r"failed to (?:allocate|create) (?:context|buffer|the KV cache|compute)|unable to allocate"
    ),
    failures.pattern("missing_model", r"failed to load model|invalid magic characters|failed to open GGUF"),
    failures.pattern("config", r"V cache quantization requires flash|unsupported (?:cache|KV) type"),
)
_KV = re.compile(r"llama_kv_cache: size = .*?\bK \((\w+)\).*?\bV \((\w+)\)")
_THREADS = re.compile(r"llama threadpool init, n_threads = (\d+)")
_DRAFTER = re.compile(r"adding speculative implementation '([\w-]+)'")
_DRAFTER_SIZES = re.compile(
    r"common_specu: - (?:(?:size_n|size_key|n_match)=(\d+), )?(?:size_m|size_value|n_max)=(\d+)"
)
_HOST_CACHE = re.compile(r"prompt cache is (enabled|disabled)")


class LlamaCpp(Adapter):
    """The `Engine` contract for llama.cpp."""

    name = "llamacpp"

    def preflight(self, arm: Arm, models: Mapping[str, Model]) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise PreflightError(
                "engine llamacpp: xllamacpp is not installed. Fix: pip install 'campaign[local]'"
            )
        _refuse(arm)
        names = [arm.model]
        if arm.speculation is not None and arm.speculation.draft_model is not None:
            names.append(arm.speculation.draft_model)
        for name in names:
            model = weights.entry(models, name)
            weights.check_pin(weights.find(model, str(name)), model.sha256, str(name))
        _parse(self._argv(arm, models, port=1))

    def launch(self, order: BootOrder, port: int) -> Launch:
        key = secrets.token_urlsafe(32)
        argv = self._argv(order.config, order.models, port)
        gpus = ",".join(str(i) for i in order.gpus)
        return Launch(
            # -I: no PYTHON* variable, user site or working folder changes what is imported.
            argv=(sys.executable, "-I", "-m", "campaign.engines.llamacpp_server", *argv),
            env={API_KEY_ENV: key, "CUDA_VISIBLE_DEVICES": gpus, **order.config.env},
            headers={"Authorization": f"Bearer {key}"},
        )

    def info_paths(self) -> tuple[str, ...]:
        return ("/props", "/slots")

    def effective(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """From `/props` and the boot log (`log`). A field that neither tells is left out."""
        props, log = info.get("/props") or {}, str(info.get("log", ""))
        out: dict[str, Any] = {
            "context": (props.get("default_generation_settings") or {}).get("n_ctx"),
            "max_running_requests": props.get("total_slots"),
        }
        if kv := _KV.search(log):
            out["kv_dtype"] = kv[1] if kv[1] == kv[2] else f"{kv[1]}/{kv[2]}"
        if threads := _THREADS.search(log):
            out["threads"] = int(threads[1])
        if cache := _HOST_CACHE.search(log):
            out["prefix_cache"] = cache[1] == "enabled"
        drafter = _DRAFTER.search(log)
        if drafter:
            out["speculation.method"] = _METHOD_OF.get(drafter[1], drafter[1])
            if sizes := _DRAFTER_SIZES.search(log):
                out["speculation.depth"] = int(sizes[2])
                out["speculation.ngram_size"] = None if sizes[1] is None else int(sizes[1])
        elif kv:  # the log is at the level that would have named one
            out["speculation.method"] = "none"
        return {k: v for k, v in out.items() if v is not None}

    def failure(self, log_tail: str) -> tuple[str, str] | None:
        return failures.find(log_tail, _FAILURES)

    def steps(
        self, arm: Arm, before: Counters | None, after: Counters | None, outcome: Outcome
    ) -> StepCounts:
        """Steps of one request: drafted and accepted from its own `timings`, drafts from `/metrics`.

        `steps` needs no scrape. A request cut by a stop word or end of text inside an accepted draft has
        `accepted` count tokens that were thrown away; its steps are given only where the scrapes prove them.
        """
        timings, usage = outcome.timings or {}, outcome.usage
        completion = usage.completion_tokens if usage else None
        cached = timings.get("cache_n")
        if cached is None and usage is not None:
            cached = usage.cached_tokens
        if not _drafts(arm):
            steps = None if completion is None else max(completion - 1, 0)
            reasons = ("no_usage",) if completion is None else ()
            if timings.get("draft_n"):  # it drafts, and was told not to
                steps, reasons = None, ("out_of_range",)
            return StepCounts(steps, None, None, None, None, None, cached, "none", reasons)
        d = prometheus.delta(before, after)
        if not timings:
            return replace(prometheus.step_counts(d, completion), cached_tokens=cached)
        return _from_timings(arm, outcome, d, completion=completion, cached=cached)

    def request_extras(self, arm: Arm) -> Mapping[str, Any]:
        return {"cache_prompt": bool(arm.prefix_cache)}

    def versions(self) -> Mapping[str, str]:
        out = {"python": sys.version.split()[0]}
        for package in ("xllamacpp", "campaign"):
            try:
                out[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return out

    def _argv(self, arm: Arm, models: Mapping[str, Model], port: int) -> tuple[str, ...]:
        path = weights.find(weights.entry(models, arm.model), str(arm.model))
        argv = ["--model", str(path), "--alias", str(arm.model), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--verbosity", str(_LOG_LEVEL), "--prefix-cache", "on" if arm.prefix_cache else "off"]
        for flag, value in (
            ("--threads", arm.threads),
            ("--context", arm.context),
            ("--kv-dtype", arm.kv_dtype),
            ("--parallel", arm.max_running_requests),
        ):
            if value is not None:
                argv += [flag, str(value)]
        if _drafts(arm) and arm.speculation is not None:
            argv += _speculation(arm.speculation, models)
        return (*argv, *arm.extra_args)


def _from_timings(
    arm: Arm, outcome: Outcome, d: prometheus.Delta, *, completion: int | None, cached: int | None
) -> StepCounts:
    # llama.cpp leaves draft_* out of a request that drafted nothing.
    timings = outcome.timings or {}
    drafted, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
    reasons = [r for r in d.reasons if r in {"counter_reset", "engine_restarted"}]
    drafts: int | None = None
    positions: tuple[int, ...] | None = None
    source = "timings"
    if drafted == 0:
        drafts, positions = 0, ()
        reasons.append("no_drafts")
    elif d.drafts is None:
        # Steps need no scrape: only how many of them had a draft is not known.
        reasons.append("drafts_unknown")
    elif (d.drafted, d.accepted) == (drafted, accepted):
        drafts, positions, source = d.drafts, d.accept_pos, "timings+metrics"
    else:
        reasons.append("other_traffic")
    steps = undrafted = None
    if completion is None:
        reasons.append("no_usage")
    else:
        steps = max(completion - 1, 0) - accepted
        undrafted = None if drafts is None else steps - drafts
        cut = outcome.finish != "length" and accepted > 0
        impossible = accepted > drafted or steps < 0 or (undrafted is not None and undrafted < 0)
        if impossible or (cut and not _proven(arm, outcome, d, steps)):
            steps = undrafted = None
            reasons.append("out_of_range")
    return StepCounts(
        steps=steps,
        drafts=drafts,
        undrafted=undrafted,
        drafted=drafted,
        accepted=accepted,
        accept_pos=positions,
        cached_tokens=cached,
        source=source,
        reasons=tuple(dict.fromkeys(reasons)),
    )


def _proven(arm: Arm, outcome: Outcome, d: prometheus.Delta, steps: int) -> bool:
    """Whether the engine's own count of forward passes says the same: prefill batches, then steps."""
    prompt = (outcome.timings or {}).get("prompt_n")
    if d.forward_calls is None or not isinstance(prompt, int):
        return False
    batch = (
        parser().parse_known_args(["--model", "-", "--alias", "-", "--port", "1", *arm.extra_args])[0].batch
    )
    expected: int = math.ceil(prompt / batch) + steps
    return d.forward_calls == expected


def _drafts(arm: Arm) -> bool:
    return arm.speculation is not None and arm.speculation.depth > 0


def _speculation(spec: Speculation, models: Mapping[str, Model]) -> list[str]:
    argv = ["--spec-type", _METHODS[spec.method], "--spec-depth", str(spec.depth)]
    if spec.method == "draft-model":
        draft = weights.find(weights.entry(models, spec.draft_model), str(spec.draft_model))
        return [*argv, "--spec-draft-model", str(draft)]
    return [*argv, "--spec-ngram-size", str(spec.ngram_size or _NGRAM_SIZE)]


def _refuse(arm: Arm) -> None:
    """What this engine would not do, or would do silently otherwise."""
    if arm.kv_dtype is not None and arm.kv_dtype not in KV_DTYPES:
        raise PreflightError(
            f"kv_dtype = {arm.kv_dtype}: llama.cpp does not know it. Fix: one of {', '.join(KV_DTYPES)}"
        )
    if arm.tp not in {None, 1}:
        raise PreflightError(f"tp = {arm.tp}: llamacpp has no tensor parallelism here. Fix: leave tp out")
    spec = arm.speculation
    if spec is None or spec.depth == 0:
        return
    if spec.method not in _METHODS:
        raise PreflightError(
            f"speculation.method = {spec.method}: not one of llamacpp. Fix: one of {', '.join(_METHODS)}"
        )
    if spec.method.startswith("ngram") and spec.depth < _MIN_NGRAM_DEPTH:
        # Measured: with one token to draft the n-gram drafter offers nothing, and the arm would be a plain one.
        raise PreflightError(
            f"speculation.depth = {spec.depth}: llama.cpp's n-gram drafter drafts nothing below 2. "
            "Fix: depth 2 or more, or no speculation"
        )
    if spec.method == "draft-model" and spec.draft_model is None:
        raise PreflightError(
            "speculation.draft_model is missing. Fix: name the entry of `models` that drafts"
        )


def _parse(argv: tuple[str, ...]) -> None:
    """Read a command line with the launcher's own parser, and refuse a flag given twice."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parser().parse_args(argv)
    except SystemExit:
        line = said.getvalue().strip().splitlines()[-1].rpartition("error: ")[2]
        raise PreflightError(
            f"extra_args: {line}. Fix: `python -m campaign.engines.llamacpp_server --help` lists the flags"
        ) from None
    flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
    twice = sorted({f for f in flags if flags.count(f) > 1})
    if twice:
        raise PreflightError(
            f"extra_args: {', '.join(twice)} is already set by a field of the arm. Fix: say it in one place"
        )
