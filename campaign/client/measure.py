"""From an outcome and the engine's counters to the figures of a row. Pure.

`decode_tok_s` is computed as `1000 * accept_len / step_ms`, so that the identity holds to the last bit
wherever both factors are known. A figure that is not known is None and its reason code is in `reasons`;
a request that did not end well has no figures at all, only its raw stamps.
"""

from dataclasses import dataclass, field
from typing import Any

from campaign.client.base import Outcome
from campaign.client.lag import judge, percentile
from campaign.engines.base import StepCounts
from campaign.store.row import RateDefinition

_COUNTED = ("ok", "short")
"""States whose times and rates mean something."""
_UNTRUSTED = frozenset({"counter_reset", "engine_restarted", "absent", "out_of_range"})
"""With one of these, whatever numbers came along are not used."""


@dataclass(slots=True)
class _Figures:
    """The derived fields of a row."""

    ttft_ms: float | None = None
    window_ms: float | None = None
    e2e_ms: float | None = None
    rate_definition: RateDefinition | None = None
    first_chunk_tokens: int | None = None
    tokens_in_window: int | None = None
    steps: int | None = None
    undrafted: int | None = None
    decode_tok_s: float | None = None
    accept_len: float | None = None
    step_ms: float | None = None
    tpot_ms: float | None = None
    reasons: list[str] = field(default_factory=list)

    def because(self, *codes: str) -> None:
        self.reasons += [code for code in codes if code not in self.reasons]


def row_fields(outcome: Outcome, counts: StepCounts | None, *, speculative: bool) -> dict[str, Any]:
    """Stamp, usage, step, derived, state and reasons fields of a `RequestRow`.

    `counts` are the engine's steps of this very request; None where it has no counters. Without
    speculation a step is a token, and counters are not needed. Undrafted steps are
    completion - 1 - accepted - drafts; below 0 the counters do not belong to this request
    (`out_of_range`).
    """
    figures = _Figures(reasons=list(outcome.reasons))
    usage = outcome.usage
    counted = outcome.state in _COUNTED
    # A count of 0 tokens is a fact; a count in a failed answer is not comparable with anything.
    told = usage if counted or outcome.state == "empty" else None
    if counted:
        _times(figures, outcome)
        completion = usage.completion_tokens if usage is not None else None
        _window(figures, completion, outcome.first_chunk_tokens)
        _steps(figures, completion, counts, speculative=speculative)
        _rates(figures)
    cached = told.cached_tokens if told is not None else None
    if cached is None and counts is not None and told is not None:
        cached = counts.cached_tokens
    kept = counts if counted and speculative else None
    lag_p99 = percentile(outcome.lag, 0.99)
    if judge(lag_p99, figures.step_ms or _gap_ms(figures, outcome)) is not None:
        figures.because("client_lag")
    return {
        "sent_ns": outcome.sent_ns,
        "sent_utc_ns": outcome.sent_utc_ns,
        "first_ns": outcome.first_ns,
        "last_ns": outcome.last_ns,
        "done_ns": outcome.done_ns,
        "ttft_ms": figures.ttft_ms,
        "window_ms": figures.window_ms,
        "e2e_ms": figures.e2e_ms,
        "stamp_source": outcome.stamp_source,
        "reads": outcome.reads,
        "events": outcome.events,
        "content_chunks": outcome.content_chunks,
        "segments": outcome.segments,
        "merged_reads": outcome.merged_reads,
        "start_error_us": outcome.start_error_us,
        "lag_p50_us": percentile(outcome.lag, 0.5),
        "lag_p99_us": lag_p99,
        "user_lag_p50_us": percentile(outcome.user_lag, 0.5),
        "user_lag_p99_us": percentile(outcome.user_lag, 0.99),
        "prompt_tokens": told.prompt_tokens if told is not None else None,
        "completion_tokens": told.completion_tokens if told is not None else None,
        "first_chunk_tokens": figures.first_chunk_tokens,
        "cached_tokens": cached,
        "steps": figures.steps,
        "drafts": kept.drafts if kept is not None else None,
        "undrafted": figures.undrafted,
        "drafted": kept.drafted if kept is not None else None,
        "accepted": kept.accepted if kept is not None else None,
        "accept_pos": kept.accept_pos if kept is not None else None,
        "counter_source": (counts.source if counts is not None and speculative else "none")
        if counted
        else None,
        "rate_definition": figures.rate_definition,
        "tokens_in_window": figures.tokens_in_window,
        "decode_tok_s": figures.decode_tok_s,
        "accept_len": figures.accept_len,
        "step_ms": figures.step_ms,
        "tpot_ms": figures.tpot_ms,
        "state": outcome.state,
        "finish": outcome.finish,
        "http_status": outcome.http_status,
        "error_code": outcome.error_code,
        "error": outcome.error,
        "text_sha256": outcome.text_sha256,
        "reasons": tuple(figures.reasons),
    }


def _gap_ms(figures: _Figures, outcome: Outcome) -> float | None:
    """Mean time between chunks, in place of a step that nobody counted (overlapping requests that draft).

    It flags a row; only a step voids it.
    """
    gaps = outcome.content_chunks - 1
    return figures.window_ms / gaps if figures.window_ms and gaps > 0 else None


def _ms(later: int | None, earlier: int | None) -> float | None:
    return None if later is None or earlier is None else (later - earlier) / 1e6


def _times(figures: _Figures, outcome: Outcome) -> None:
    figures.ttft_ms = _ms(outcome.first_ns, outcome.sent_ns)
    figures.window_ms = _ms(outcome.last_ns, outcome.first_ns)
    figures.e2e_ms = _ms(outcome.done_ns, outcome.sent_ns)


def _window(figures: _Figures, completion: int | None, first: int | None) -> None:
    """Tokens in the decode window, and which definition gave them."""
    if completion is None:
        figures.because("no_usage")
        return
    if completion == 0:
        # Text arrived, so a count of none contradicts the stream.
        figures.because("out_of_range")
        return
    if first is not None and 1 <= first <= completion:
        figures.rate_definition = "after-first-chunk"
        figures.first_chunk_tokens = first
    else:
        figures.rate_definition = "all-but-one"
        figures.first_chunk_tokens = 1
        figures.because("first_chunk_assumed_one")
    figures.tokens_in_window = completion - figures.first_chunk_tokens
    if figures.tokens_in_window == 0:
        figures.because("one_token" if completion == 1 else "zero_window")
    elif not figures.window_ms:
        figures.because("zero_window")


def _steps(
    figures: _Figures, completion: int | None, counts: StepCounts | None, *, speculative: bool
) -> None:
    """Steps in the window."""
    if not speculative:
        figures.steps = figures.tokens_in_window
        if counts is not None:
            figures.because(*(r for r in counts.reasons if r in {"engine_restarted", "counter_reset"}))
        return
    if counts is None:
        figures.because("absent")
        return
    figures.because(*counts.reasons)
    if completion is None:
        return
    steps, undrafted = _count_steps(completion, counts)
    if steps is None or not _UNTRUSTED.isdisjoint(counts.reasons):
        if not counts.reasons:
            figures.because("absent")
        return
    tokens = figures.tokens_in_window or 0
    too_many = undrafted is not None and undrafted < 0
    too_lucky = (
        counts.accepted is not None and counts.drafted is not None and counts.accepted > counts.drafted
    )
    if too_many or too_lucky or steps < 0 or (tokens > 0 and steps == 0):
        figures.because("out_of_range")
        return
    if figures.first_chunk_tokens is not None and figures.first_chunk_tokens > 1:
        figures.because("steps_outside_window")
        return
    figures.steps, figures.undrafted = steps, undrafted


def _count_steps(completion: int, counts: StepCounts) -> tuple[int | None, int | None]:
    """(steps, undrafted): by drafts where they are known, else as the engine counts its own steps."""
    if counts.drafts is not None and counts.accepted is not None:
        undrafted = completion - 1 - counts.accepted - counts.drafts
        return counts.drafts + undrafted, undrafted
    return counts.steps, counts.undrafted


def _rates(figures: _Figures) -> None:
    tokens, window, steps = figures.tokens_in_window, figures.window_ms, figures.steps
    if not tokens or not window:
        return
    figures.tpot_ms = window / tokens
    if steps:
        figures.accept_len = tokens / steps
        figures.step_ms = window / steps
        figures.decode_tok_s = 1000 * figures.accept_len / figures.step_ms
    else:
        figures.decode_tok_s = 1000 * tokens / window
