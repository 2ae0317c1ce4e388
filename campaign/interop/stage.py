"""What a published stage says of itself beyond its cells: gates, decompositions, commands.

Each number is derived again from the session's own rows; a number of another session, and one that breaks an
invariant, is said so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from campaign.analysis.describe import median
from campaign.interop import restate
from campaign.interop.imported import flags
from campaign.interop.restate import ROWS, Difference, Tally
from campaign.store.row import RequestRow

Cells = Mapping[tuple[str, str], Sequence[RequestRow]]
"""(arm, cell) -> rows."""
MAIN = "tool_nothink_10k"
_COPIED = ("stage_a_refs", "vllm_refs", "ref_4x")


def stage(doc: Mapping[str, Any], cells: Cells, tally: Tally) -> list[Difference]:
    """Differences of one file beyond its cells."""
    found: list[Difference] = []
    for tag, arm in doc["arms"].items():
        found += _commands(doc["file"], tag, arm, tally)
    extra = doc["extra"]
    found += _decomposition(doc, cells, extra, tally)
    found += _gates(doc, cells, extra, tally)
    for key in _COPIED:
        if isinstance(extra.get(key), dict):
            numbers = sorted(k for k, v in extra[key].items() if isinstance(v, (int, float)))
            tally.checked += 1
            why = "numbers of another session: a comparison made with them is across sessions, not a pair"
            found.append(Difference(doc["file"], None, None, key, numbers, None, why))
    if isinstance(extra.get("total_spent_usd_est"), (int, float)):
        tally.checked += 1
        found.append(
            Difference(
                doc["file"], None, None, "total_spent_usd_est", extra["total_spent_usd_est"], None,
                "minutes since the container started times a constant rate: queue, image pull and aborted nodes are not in it",
            )
        )  # fmt: skip
    return found


def _commands(file: str, tag: str, arm: Mapping[str, Any], tally: Tally) -> list[Difference]:
    """Settings against the recorded command: which one ran cannot be told from the file."""
    given, settings = flags(arm["command"]), arm["settings"]
    if not arm["command"] or not settings:
        return []
    pairs: dict[str, tuple[Any, str | None]] = {
        "tp": (settings.get("tp"), given.get("tensor-parallel-size")),
        "kv": (settings.get("kv"), given.get("kv-cache-dtype")),
        "ml": (settings.get("ml"), given.get("max-model-len")),
        "k": (settings.get("k"), _between(arm["command"], "num_speculative_tokens")),
    }
    found = []
    for name, (wanted, said) in pairs.items():
        if wanted is None or said is None:
            continue
        tally.checked += 1
        if str(wanted) == str(said):
            tally.matched += 1
            continue
        shown = int(said) if said.isdigit() else said
        cause = f"the recorded argv says {name} {said}, the arm's configuration says {wanted}: the argv was rebuilt, not read from the process"
        found.append(Difference(file, tag, None, f"argv.{name}", shown, wanted, cause))
    return found


def _between(command: str, key: str) -> str | None:
    _, _, rest = command.partition(f'"{key}"')
    digits = rest.lstrip(": ")
    end = next((i for i, c in enumerate(digits) if not c.isdigit()), len(digits))
    return digits[:end] or None


def _by(doc: Mapping[str, Any], cells: Cells, method: str, depth: int | None) -> Sequence[RequestRow] | None:
    for tag, arm in doc["arms"].items():
        s = arm["settings"]
        if s.get("method") == method and s.get("k") == depth and (tag, MAIN) in cells:
            return cells[tag, MAIN]
    return None


def _bare(rows: Sequence[RequestRow] | None) -> float | None:
    """t1 as published: 1000 over the printed aggregate rate, bare decoding."""
    rate = restate.aggregate(rows) if rows else None
    return 1000 / round(rate, 1) if rate else None


def _decomposition(
    doc: Mapping[str, Any], cells: Cells, extra: Mapping[str, Any], tally: Tally
) -> list[Difference]:
    e1 = extra.get("e1")
    if not isinstance(e1, dict):
        return []
    found: list[Difference] = []

    def check(
        field: str, derived: float | None, digits: int, cause: str = "does not follow from the rows"
    ) -> None:
        published = e1.get(field)
        if isinstance(published, (int, float)) and not tally.compare(float(published), derived, digits):
            shown = None if derived is None else round(derived, digits)
            found.append(Difference(doc["file"], None, None, f"e1.{field}", published, shown, cause))

    rows6, rows9 = _by(doc, cells, "ngram_gpu", 5), _by(doc, cells, "ngram_gpu", 8)
    eagle = _by(doc, cells, "eagle3", 5)
    v6 = restate.verify(rows6) if rows6 else None
    v9 = restate.verify(rows9) if rows9 else None
    whole = restate.step(eagle) if eagle else None
    check("t1_ms", _bare(_by(doc, cells, "none", None)), 2)
    check("eagle_step_k5_ms", whole, 2)
    check("v6_ms", v6, 2)
    check("v9_ms", v9, 2)
    if v6 is not None and v9 is not None:
        check("verify_slope_ms_per_tok", (v9 - v6) / 3, 3)
    if isinstance(e1.get("draft_pass_ms"), (int, float)):
        tally.checked += 1
        negative = v6 is not None and whole is not None and v6 > whole
        if negative:
            cause = (
                f"not identified: the verify time at width 6 ({v6:.2f} ms, drafter included) is longer than the whole "
                f"step it is to be part of ({whole:.2f} ms), so (step - verify) / 5 = {(whole - v6) / 5:.2f} ms is not a time"  # type: ignore[operator]  # both known where negative
            )
            found.append(
                Difference(doc["file"], None, None, "e1.draft_pass_ms", e1["draft_pass_ms"], None, cause)
            )
        else:
            tally.matched += 1
    return found


@dataclass(frozen=True, slots=True)
class _Check:
    """Numbers beside the cells of one file."""

    file: str
    tally: Tally
    found: list[Difference]

    def number(
        self, field: str, published: object, derived: float | None, digits: int, cause: str = ROWS
    ) -> None:
        if published is None and derived is not None:
            self.tally.checked += 1
            why = "published as null; the rows hold what it takes"
            self.found.append(Difference(self.file, None, None, field, None, round(derived, digits), why))
        if not isinstance(published, (int, float)) or isinstance(published, bool):
            return
        if not self.tally.compare(float(published), derived, digits):
            shown = None if derived is None else round(derived, digits)
            self.found.append(Difference(self.file, None, None, field, published, shown, cause))


def _gates(doc: Mapping[str, Any], cells: Cells, extra: Mapping[str, Any], tally: Tally) -> list[Difference]:
    c = _Check(doc["file"], tally, [])
    gates = extra.get("gates")
    if isinstance(gates, dict):
        _medians(c, gates, cells)
        _tp8(c, doc, gates, cells)
    ship = extra.get("ship")
    best = ship.get("best_cell") if isinstance(ship, dict) else None
    if isinstance(best, dict):
        rows = cells.get((str(best.get("arm")), str(best.get("cell") or MAIN)))
        if rows:
            c.number("ship.best_cell.tok_s", best.get("tok_s"), median(restate.rates(rows)), 1)
            c.number("ship.best_cell.tau", best.get("tau"), restate.tau(rows), 4)
            c.number("ship.best_cell.step_ms", best.get("step_ms"), restate.step(rows), 2)
    fit = extra.get("step_fit")
    return c.found + (_fit(doc, cells, fit, tally) if isinstance(fit, dict) else [])


def _medians(c: _Check, gates: Mapping[str, Any], cells: Cells) -> None:
    """Gates on first-8 medians: each must be one of this session's."""
    known = []
    for (_, name), rows in cells.items():
        speeds = restate.rates([r for r in rows if r.slot < restate.FIRST])
        middle = median(speeds)
        if name == MAIN and len(speeds) == restate.FIRST and middle is not None:
            known.append(middle)
    for name, gate in gates.items():
        if not isinstance(gate, dict):
            continue
        for key in ("f8", "anchor_f8", "champ_f8"):
            told = gate.get(key)
            if isinstance(told, (int, float)):
                near = min(known, key=lambda v, t=float(told): abs(v - t), default=None)  # type: ignore[misc]  # mypy does not follow a default in a lambda
                c.number(f"gates.{name}.{key}", told, near, 1, "is no first-8 median of this session")
        if "step_sg1_ms" in gate:
            rows5 = next((r for (t, n), r in cells.items() if t.startswith("SG1") and n == MAIN), ())
            c.number(f"gates.{name}.step_sg1_ms", gate["step_sg1_ms"], restate.step(rows5), 2)


def _tp8(c: _Check, doc: Mapping[str, Any], gates: Mapping[str, Any], cells: Cells) -> None:
    if "t1_tp8_ms" not in gates:
        return
    c.number("gates.t1_tp8_ms", gates["t1_tp8_ms"], _bare(_by(doc, cells, "none", None)), 2)
    for k in (5, 6):
        name = f"step_k{k}_tp8_ms"
        c.number(f"gates.{name}", gates.get(name), restate.step(_by(doc, cells, "eagle3", k) or ()), 2)


def _fit(doc: Mapping[str, Any], cells: Cells, fit: Mapping[str, Any], tally: Tally) -> list[Difference]:
    points: list[tuple[float, float]] = []
    for k in fit.get("points") or {}:
        rows = _by(doc, cells, "eagle3", int(k)) if str(k).isdigit() else None
        value = restate.step(rows) if rows else None
        if value is not None:
            points.append((float(k), value))
    if len(points) < 2:
        return []
    x = sum(p[0] for p in points) / len(points)
    y = sum(p[1] for p in points) / len(points)
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    found = []
    for field, derived, digits in (("slope_ms_per_k", slope, 2), ("intercept_ms", y - slope * x, 1)):
        published = fit.get(field)
        if isinstance(published, (int, float)) and not tally.compare(
            float(published), derived, digits, loose=True
        ):
            cause = "does not follow from the step times of the rows"
            found.append(
                Difference(doc["file"], None, None, f"step_fit.{field}", published, round(derived, 3), cause)
            )
    return found
