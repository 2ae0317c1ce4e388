"""Engine counters from the Prometheus text page, and what two scrapes say about the time between them.

The page is parsed by `prometheus_client`; which names mean what is ours. Rules:

- A counter is found by its exact name, with or without `_total`, under `vllm:`, `sglang:`, `llamacpp:` or
  the same with `_`. `*_created` samples (clock times) and gauges of similar names can not match.
- Samples of one name are summed over their labels. That is right for data-parallel ranks, and no engine
  we read repeats a counter per tensor-parallel rank (SGLang 0.5.14 to 0.5.23: rank 0 reports; vLLM 0.24 to
  0.33: one set per engine).
- Absent, NaN, negative and fractional are None with a code, never 0. A counter that an engine creates at
  its first event (SGLang) is absent until then.
- Formulas as in vLLM's own metrics: rate = accepted / drafted, length = 1 + accepted / drafts.
"""

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from campaign.engines.base import Counters, StepCounts

_PREFIX = ("vllm", "sglang", "llamacpp")
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "drafts": ("spec_decode_num_drafts",),
    "drafted": ("spec_decode_num_draft_tokens",),
    "accepted": ("spec_decode_num_accepted_tokens",),
    "accept_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "verify_steps": ("spec_verify_calls",),
    "generated": ("generation_tokens", "tokens_predicted"),
    "cached_tokens": ("prefix_cache_hits", "prompt_tokens_cached", "cached_tokens"),
    "cache_queries": ("prefix_cache_queries",),
    "prompt_tokens": ("prompt_tokens",),
    "forward_calls": ("n_decode",),
}
_STARTED = "process_start_time_seconds"
_SUMMED = tuple(field for field in _ALIASES if field != "accept_pos")
_NAME = re.compile(r"^(?:#\s*(?:TYPE|HELP)\s+)?([A-Za-z_:][A-Za-z0-9_:]*)")
_SAMPLE = re.compile(
    r"^[A-Za-z_:][A-Za-z0-9_:]*\s*(?:\{.*\})?\s+[-+]?(?:[0-9.]|[Nn]a[Nn]|[Ii]nf)", re.MULTILINE
)


class NotPrometheus(ValueError):
    """The body is not a Prometheus page: JSON, HTML, or nothing a sample could be read from."""


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(f"{p}{sep}{name}{end}" for p in _PREFIX for sep in ":_" for end in ("_total", ""))


_WANTED: Mapping[str, tuple[str, ...]] = {
    field: tuple(s for name in names for s in _spellings(name)) for field, names in _ALIASES.items()
}
_ALL = frozenset(s for names in _WANTED.values() for s in names) | {_STARTED}


def check_page(text: str) -> None:
    """Raise NotPrometheus unless the text is a metrics page (one without samples is one, if commented)."""
    head = text.lstrip()[:1]
    if head == "<":
        raise NotPrometheus("an HTML page")
    if head in {"{", "[", '"'}:
        try:
            json.loads(text)
        except ValueError:
            pass
        else:
            raise NotPrometheus("a JSON document")
    if not _SAMPLE.search(text) and not re.search(r"^# (?:TYPE|HELP|EOF)", text, re.MULTILINE):
        raise NotPrometheus("no sample in it")


def samples(text: str, known: frozenset[str] = _ALL) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, of the names in `known`. Raises NotPrometheus.

    Only lines of known names reach the parser: one malformed line of a stranger must not cost the counters.
    """
    from prometheus_client.parser import text_string_to_metric_families

    check_page(text)
    lines = [
        line
        for line in text.splitlines()
        if (m := _NAME.match(line)) and (m[1] in known or m[1] + "_total" in known)
    ]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, IndexError) as error:
        raise NotPrometheus(f"a sample that cannot be read: {error}") from error
    return found


def _whole(value: float) -> tuple[int | None, str]:
    if not math.isfinite(value):
        return None, "not_finite"
    if value < 0 or value != int(value):
        return None, "out_of_range"
    return int(value), ""


def read(text: str) -> Counters:
    """The counters of one page. Raises NotPrometheus."""
    return _counters(samples(text), _WANTED, normalise=True)


def read_named(text: str, names: Mapping[str, str]) -> Counters:
    """The counters of a page whose names are declared, field of `Counters` to name. Raises NotPrometheus.

    A name stands for itself and for itself with `_total`; a field that is not declared is absent.
    """
    wanted = {field: (f"{name}_total", name) for field, name in names.items()}
    known = frozenset(n for spelt in wanted.values() for n in spelt) | {_STARTED}
    return _counters(samples(text, known), {**dict.fromkeys(_ALIASES, ()), **wanted}, normalise=False)


def _counters(
    found: Mapping[str, list[tuple[dict[str, str], float]]],
    wanted: Mapping[str, tuple[str, ...]],
    *,
    normalise: bool,
) -> Counters:
    values: dict[str, int | None] = {}
    reasons: list[str] = []
    for field in _SUMMED:
        name = next((n for n in wanted[field] if n in found), None)
        values[field], code = (None, "absent") if name is None else _whole(sum(v for _, v in found[name]))
        if code:
            reasons.append(f"{field}:{code}")
    positions, code = _positions(found, wanted["accept_pos"])
    if code:
        reasons.append(f"accept_pos:{code}")
    if normalise:
        _normalise(values, found, reasons)
    started = [v for _, v in found.get(_STARTED, []) if math.isfinite(v) and v > 0]
    if not started:
        reasons.append("started:absent")
    return Counters(
        drafts=values["drafts"],
        drafted=values["drafted"],
        accepted=values["accepted"],
        accept_pos=positions,
        verify_steps=values["verify_steps"],
        generated=values["generated"],
        cached_tokens=values["cached_tokens"],
        started=max(started) if started else None,
        prompt_tokens=values["prompt_tokens"],
        cache_queries=values["cache_queries"],
        forward_calls=values["forward_calls"],
        reasons=tuple(reasons),
    )


_HELD = ("num_requests_running", "num_requests_waiting", "requests_processing", "requests_deferred")
_HELD_NAMES = frozenset(f"{p}{sep}{name}" for p in ("vllm", "llamacpp") for sep in ":_" for name in _HELD)


def running(text: str) -> int | None:
    """Requests that a server runs or holds back, from gauges that it sets at every step (vLLM, llama.cpp).

    SGLang's gauge of this kind is of its last log interval, so it is not read. None where no gauge says.
    """
    try:
        found = samples(text, _HELD_NAMES)
    except NotPrometheus:
        return None
    values = [value for rows in found.values() for _, value in rows]
    return int(sum(values)) if values and all(math.isfinite(v) and v >= 0 for v in values) else None


def _positions(
    found: Mapping[str, list[tuple[dict[str, str], float]]], wanted: tuple[str, ...]
) -> tuple[tuple[int, ...] | None, str]:
    name = next((n for n in wanted if n in found), None)
    if name is None:
        return None, "absent"
    by_position: dict[int, float] = {}
    for labels, value in found[name]:
        label = labels.get("position", "")
        if not label.isdecimal():
            return None, "out_of_range"
        by_position[int(label)] = by_position.get(int(label), 0.0) + value
    counts: list[int] = []
    # A position that the family does not list has accepted nothing yet.
    for position in range(max(by_position) + 1):
        count, code = _whole(by_position.get(position, 0.0))
        if count is None:
            return None, code
        counts.append(count)
    return tuple(counts), ""


def _normalise(values: dict[str, int | None], found: Mapping[str, object], reasons: list[str]) -> None:
    """llama.cpp counts prompt tokens without cached ones and has no counter of look-ups; SGLang has neither."""
    prompt, cached = values["prompt_tokens"], values["cached_tokens"]
    if any(name.startswith("llamacpp") for name in found) and prompt is not None:
        values["prompt_tokens"] = None if cached is None else prompt + cached
        if cached is None:
            reasons.append("prompt_tokens:absent")
    ours = not any(name.startswith("vllm") for name in found)
    if values["cache_queries"] is None and ours and values["prompt_tokens"] is not None:
        values["cache_queries"] = values["prompt_tokens"]
        reasons.remove("cache_queries:absent")


@dataclass(frozen=True, slots=True)
class Delta:
    """What happened between two scrapes. None with a code in `reasons`."""

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accept_pos: tuple[int, ...] | None = None
    verify_steps: int | None = None
    generated: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    cache_queries: int | None = None
    forward_calls: int | None = None
    reasons: tuple[str, ...] = ()


def delta(before: Counters | None, after: Counters | None) -> Delta:
    """The difference of two scrapes of one server. Never negative, never clamped.

    `engine_restarted`: another process answered the second scrape, so nothing is known, even where its
    counters are higher. `counter_reset`: a counter fell, so none of them can be trusted over this window.
    `no_drafts`: speculation counters stand at zero, or did not move. `absent`: not on one of the pages.
    """
    if before is None or after is None:
        return Delta(reasons=("absent",))
    if before.started is not None and after.started is not None and before.started != after.started:
        return Delta(reasons=("engine_restarted",))
    values: dict[str, int] = {}
    fell = False
    for name in _SUMMED:
        a, b = getattr(before, name), getattr(after, name)
        if a is not None and b is not None:
            values[name] = b - a
            fell = fell or b < a
    positions = _position_delta(before, after)
    fell = fell or (positions is not None and any(n < 0 for n in positions))
    reasons: list[str] = []
    if (after.drafts == 0 and after.drafted == 0) or (
        not fell and values.get("drafts") == 0 and values.get("drafted") == 0
    ):
        reasons.append("no_drafts")
    if fell:
        return Delta(reasons=(*reasons, "counter_reset"))
    if "drafts" not in values and "verify_steps" not in values:
        reasons.append("absent")
    if (values.get("accepted", 0)) > values.get("drafted", math.inf) or (
        positions is not None and not _possible(positions, values.get("drafts"), values.get("accepted"))
    ):
        return Delta(reasons=(*reasons, "out_of_range"))
    return Delta(**values, accept_pos=positions, reasons=tuple(reasons))


def _position_delta(before: Counters, after: Counters) -> tuple[int, ...] | None:
    old, new = before.accept_pos, after.accept_pos
    if new is None:
        return None
    if old is None:
        # The family appears with the first accepted draft of a process; until then every position is zero.
        if before.accepted != 0:
            return None
        old = ()
    width = max(len(old), len(new))
    pad_old, pad_new = old + (0,) * (width - len(old)), new + (0,) * (width - len(new))
    return tuple(b - a for a, b in zip(pad_old, pad_new, strict=True))


def _possible(positions: tuple[int, ...], drafts: int | None, accepted: int | None) -> bool:
    """Position i is accepted only where i-1 was, no more often than there were drafts, and they add up."""
    falling = all(a >= b for a, b in pairwise(positions))
    bounded = drafts is None or not positions or positions[0] <= drafts
    return falling and bounded and (accepted is None or sum(positions) == accepted)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over a window, with the formula's name; None with a code."""

    rate: float | None
    length: float | None
    per_position: tuple[float, ...] | None
    formula: str = "rate=accepted/drafted length=1+accepted/drafts pos=accepted_pos/drafts"
    reasons: tuple[str, ...] = ()


def acceptance(d: Delta, depth: int | None = None) -> Acceptance:
    """Acceptance figures of a window. `depth` (drafted tokens per step) bounds the length by depth + 1."""
    reasons = tuple(r for r in d.reasons if r != "no_drafts")
    if reasons or d.drafts is None or d.drafted is None or d.accepted is None:
        # What the counters say of speculation comes first: a page of zeros has no drafts, whatever it was.
        first = ("no_drafts",) if "no_drafts" in d.reasons else ()
        return Acceptance(None, None, None, reasons=(*first, *reasons) or ("absent",))
    if d.drafts == 0 or d.drafted == 0:
        return Acceptance(None, None, None, reasons=("no_drafts",))
    rate, length = d.accepted / d.drafted, 1 + d.accepted / d.drafts
    if rate > 1 or d.drafted < d.drafts or (depth is not None and length > depth + 1):
        return Acceptance(None, None, None, reasons=("out_of_range",))
    positions = None if d.accept_pos is None else tuple(n / d.drafts for n in d.accept_pos)
    return Acceptance(rate, length, positions)


def hit_rate(d: Delta) -> float | None:
    """Share of looked-up prompt tokens that the prefix cache held; None where nothing was looked up."""
    if not d.cache_queries or d.cached_tokens is None or d.cached_tokens > d.cache_queries:
        return None
    return d.cached_tokens / d.cache_queries


def step_counts(d: Delta, completion: int | None, source: str = "metrics") -> StepCounts:
    """Steps of one request that had the server to itself, from counters alone.

    completion - 1 = accepted + drafts + undrafted: the first token comes from prefill, every verify step
    gives its accepted tokens and one more, and every other step gives one.
    """
    reasons = d.reasons
    steps = undrafted = None
    if completion is None:
        reasons = (*reasons, "no_usage")
    elif d.accepted is not None and d.drafts is not None:
        steps = completion - 1 - d.accepted
        undrafted = steps - d.drafts
        if undrafted < 0:
            steps = undrafted = None
            reasons = (*reasons, "out_of_range")
    elif not set(reasons) - {"no_drafts"}:
        reasons = (*reasons, "absent")
    return StepCounts(
        steps=steps,
        drafts=d.drafts,
        undrafted=undrafted,
        drafted=d.drafted,
        accepted=d.accepted,
        accept_pos=d.accept_pos,
        cached_tokens=d.cached_tokens,
        source=source,
        reasons=reasons,
    )


Status = Literal["unknown", "ok", "incompatible_endpoint"]


class Poller:
    """Scrapes one server's page, and stops for good when it is not a Prometheus page.

    A page that is missing (404, 405, 410, 501) or not Prometheus is found once and never asked for again:
    polling must not slow a run. A server that is busy or does not answer is asked again next time.
    """

    def __init__(self, read_counters: Callable[[str], Counters]) -> None:
        self._read = read_counters
        self.status: Status = "unknown"
        self.why = ""

    async def scrape(self, fetch: Callable[[], Awaitable[tuple[int, bytes]]]) -> Counters | None:
        """One scrape through `fetch` (status, body), or None: not there, or did not answer."""
        if self.status == "incompatible_endpoint":
            return None
        try:
            code, body = await fetch()
        except (OSError, TimeoutError):
            return None
        if code in {404, 405, 410, 501}:
            self.status, self.why = "incompatible_endpoint", f"HTTP {code}"
            return None
        if code != 200:
            return None
        try:
            counters = self._read(body.decode("utf-8", "replace"))
        except NotPrometheus as error:
            self.status, self.why = "incompatible_endpoint", str(error)
            return None
        self.status = "ok"
        return counters
