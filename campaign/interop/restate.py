"""Published statistics derived again from the rows, by the published formulas, and where they differ.

The published formulas, found by reproducing the printed digits: `tok_s_median` the median of the rates;
`tok_s_first8_median` that of slots 0 to 7; `tok_s_agg` = sum(ctok - 1) / sum(window); `tau` = 1 + accepted/drafts
(vLLM) or completion/verify calls (SGLang), sums over the cell; `step_ms` = 1000 * tau / tok_s_agg;
`ttft_ms_median` the upper of the two middle values where n is even. They are kept under names of their own and
never mixed with docs/CONTRACTS.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from campaign.analysis.describe import median
from campaign.store.row import RequestRow

FIRST = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One printed value that does not follow from the rows, or that could not be printed and can be derived."""

    file: str
    arm: str | None
    cell: str | None
    field: str
    published: Any
    derived: Any
    cause: str

    def json(self) -> dict[str, Any]:
        """The contract of `campaign verify --json`."""
        return {
            "file": self.file,
            "arm": self.arm,
            "cell": self.cell,
            "field": self.field,
            "published": self.published,
            "derived": self.derived,
            "cause": self.cause,
        }


@dataclass(slots=True)
class Tally:
    """Counts of what was checked."""

    checked: int = 0
    matched: int = 0

    def compare(
        self, published: float | None, derived: float | None, digits: int, *, loose: bool = False
    ) -> bool:
        """Whether a derived value prints as published, to this many decimals. Counts it."""
        self.checked += 1
        same = printed(published, derived, digits, loose=loose)
        self.matched += same
        return same


def printed(published: float | None, derived: float | None, digits: int, *, loose: bool = False) -> bool:
    """Equal to the printed digit; `loose` allows one more unit: both inputs of a sum were printed rounded."""
    if published is None or derived is None:
        return published is None and derived is None
    unit = 10.0**-digits
    return abs(published - derived) <= (1.5 if loose else 0.5) * unit + 1e-9


def usable(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Valid rows with a rate, by slot."""
    return sorted((r for r in rows if r.validity == "valid" and r.window_ms), key=lambda r: r.slot)


def rates(rows: Sequence[RequestRow], as_printed: Mapping[str, Any] | None = None) -> list[float]:
    """tok/s by slot: as printed where the file kept it, else derived."""
    found = []
    for r in usable(rows):
        told = (as_printed or {}).get(str(r.slot))
        found.append(float(told) if told is not None else float(r.decode_tok_s or 0))
    return found


def aggregate(rows: Sequence[RequestRow]) -> float | None:
    """Tokens in all windows over all windows, tok/s."""
    good = usable(rows)
    window = math.fsum(r.window_ms or 0 for r in good)
    return 1000 * sum(r.tokens_in_window or 0 for r in good) / window if window > 0 else None


def tau(rows: Sequence[RequestRow]) -> float | None:
    """By the published formula of the engine; None without counters."""
    good = usable(rows)
    if not good or any(not r.drafts for r in good):
        return None
    drafts = sum(r.drafts or 0 for r in good)
    if all(r.accepted is not None for r in good):
        return 1 + sum(r.accepted or 0 for r in good) / drafts
    return sum(r.completion_tokens or 0 for r in good) / drafts


def step(rows: Sequence[RequestRow]) -> float | None:
    """1000 * tau / aggregate rate; without speculation 1000 / aggregate rate."""
    agg, t = aggregate(rows), tau(rows)
    if agg is None:
        return None
    if t is None:
        return (
            None
            if any(r.steps is None or r.steps != r.tokens_in_window for r in usable(rows))
            else 1000 / agg
        )
    return 1000 * t / agg


def verify(rows: Sequence[RequestRow]) -> float | None:
    """Median over requests of window over drafts: the published V6 and V9."""
    values = [r.window_ms / r.drafts for r in usable(rows) if r.window_ms and r.drafts]
    return median(values)


def upper_median(values: Sequence[float]) -> float | None:
    """The middle value, the upper of two: what some published medians are."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


@dataclass(frozen=True, slots=True)
class _Cell:
    """One cell under check: what was printed, what the rows give, and where differences go."""

    where: tuple[str, str, str]
    stats: Mapping[str, Any]
    good: Sequence[RequestRow]
    tally: Tally
    found: list[Difference]

    def differ(self, field: str, published: Any, derived: Any, cause: str) -> None:
        self.found.append(Difference(*self.where, field, published, derived, cause))

    def check(self, field: str, derived: float | None, digits: int, cause: str) -> None:
        """A printed number, where the file prints it."""
        if field not in self.stats or self.tally.compare(_number(self.stats[field]), derived, digits):
            return
        shown = None if derived is None else round(derived, digits)
        if self.stats[field] is None:
            cause = "published as null; the rows hold what it takes"
        self.differ(field, self.stats[field], shown, cause)

    def same(self, field: str, published: Any, derived: Any, cause: str) -> None:
        """Anything else that is printed."""
        self.tally.checked += 1
        self.tally.matched += published == derived
        if published != derived:
            self.differ(field, published, derived, cause)


ROWS = "does not follow from the rows"


def cell(
    where: tuple[str, str, str],
    stats: Mapping[str, Any],
    rows: Sequence[RequestRow],
    as_printed: Mapping[str, Any],
    row_tau: Mapping[str, Any],
    tally: Tally,
) -> list[Difference]:
    """Every statistic of one cell that does not follow from its rows."""
    c = _Cell(where, stats, usable(rows), tally, [])
    speeds = rates(rows, as_printed)
    c.check("n", float(len(rows)), 0, "counts other rows than the file holds")
    c.check("n_ok", float(len(c.good)), 0, "counts other rows than the file holds")
    c.check("tok_s_median", median(speeds), 1, ROWS)
    c.check("decode_median_interp", median(speeds), 1, ROWS)
    first = [v for r, v in zip(c.good, speeds, strict=True) if r.slot < FIRST]
    early = median(first) if len(first) == FIRST else None
    c.check("tok_s_first8_median", early, 1, "does not follow from slots 0 to 7")
    c.check("tok_s_agg", aggregate(rows), 1, "is not tokens over windows, summed")
    c.check("tau", tau(rows), 4, "not by the formula of its engine")
    if any(r.drafts for r in c.good):
        c.check("step_ms", step(rows), 2, "is not 1000 * tau over the aggregate rate")
    c.check("mean_proposed", _proposed(c.good), 3, "does not follow from drafted over drafts")
    if isinstance(stats.get("tok_s_all_sorted"), list):
        printed_rates = [_number(v) for v in stats["tok_s_all_sorted"]]
        c.same("tok_s_all_sorted", printed_rates, sorted(speeds), "the rows hold other rates")
    _middles(c)
    _positions(c)
    _row_taus(c, row_tau)
    return c.found


def _middles(c: _Cell) -> None:
    """Medians that were taken as the upper of two, and lengths."""
    ttft = [r.ttft_ms for r in c.good if r.ttft_ms is not None]
    tokens = [float(r.completion_tokens) for r in c.good if r.completion_tokens is not None]
    for name, values in (("ttft_ms_median", ttft), ("ttft_median_ms", ttft), ("ctok_median", tokens)):
        told = _number(c.stats.get(name))
        high = not printed(told, median(values), 1) and printed(told, upper_median(values), 1)
        cause = "the upper of the two middle values was published: n is even" if high else ROWS
        c.check(name, median(values), 1, cause)
    c.check("ctok_mean", math.fsum(tokens) / len(tokens) if tokens else None, 1, ROWS)
    if isinstance(c.stats.get("aa_len_ok"), bool):
        equal = len(set(tokens)) == 1
        c.same("aa_len_ok", c.stats["aa_len_ok"], equal, "lengths of the rows say otherwise")


def _positions(c: _Cell) -> None:
    shares = c.stats.get("per_pos")
    drafts = sum(r.drafts or 0 for r in c.good)
    for position, value in sorted(shares.items()) if isinstance(shares, dict) else ():
        i = int(position) if position.isdigit() else -1
        hits = [r.accept_pos[i] for r in c.good if r.accept_pos is not None and 0 <= i < len(r.accept_pos)]
        derived = sum(hits) / drafts if drafts and len(hits) == len(c.good) else None
        if not c.tally.compare(_number(value), derived, 4):
            c.differ(f"per_pos.{position}", value, derived, "is not accepted at the position over drafts")


def _row_taus(c: _Cell, row_tau: Mapping[str, Any]) -> None:
    for r in c.good:
        told = _number(row_tau.get(str(r.slot)))
        if told is None:
            continue
        derived = 1 + r.accepted / r.drafts if r.accepted is not None and r.drafts else None
        if not c.tally.compare(told, derived, 4):
            c.differ(f"rows[slot {r.slot}].tau", told, derived, "is not 1 + accepted over drafts")


def _proposed(rows: Sequence[RequestRow]) -> float | None:
    drafts = sum(r.drafts or 0 for r in rows)
    if not drafts or any(r.drafted is None for r in rows):
        return None
    return sum(r.drafted or 0 for r in rows) / drafts


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
