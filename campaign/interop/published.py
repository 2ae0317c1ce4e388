"""A published result file after reading: rows as they stand, statistics as printed, and what was odd.

Frozen and plain; `brl11` makes it, `imported` writes it as a run folder, `restate` derives it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One request. Times in ms, rates in tok/s; None where the file does not say."""

    place: str
    """Where it stands: `arms.TAG.cells.CELL.rows[3]`."""
    slot: int
    completion_tokens: int | None
    ttft_ms: float | None
    tok_s: float | None
    window_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    drafts: int | None
    accepted: int | None
    drafted: int | None
    accept_pos: tuple[int, ...] | None
    verify_calls: int | None
    """Verify calls of an engine that counts no drafts (SGLang)."""
    tau: float | None
    """As published in the row."""


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """One arm on one workload."""

    name: str
    rows: tuple[PublishedRow, ...]
    """By slot."""
    stats: Mapping[str, Any]
    """Every statistic as printed; `rows` left out."""


@dataclass(frozen=True, slots=True)
class PublishedArm:
    """One configuration, as its tag, its settings and its recorded command say."""

    tag: str
    settings: Mapping[str, Any]
    command: str
    cells: tuple[PublishedCell, ...]
    error: str | None = None
    """Why it has no cells, in the file's words."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One file: one session."""

    name: str
    """File name."""
    session: str
    """Its stem."""
    sha256: str
    campaign: str
    engine: str
    """`vllm`, `sglang` or `api`."""
    arms: tuple[PublishedArm, ...]
    extra: Mapping[str, Any]
    """Everything at the top level but the arms: gates, derived values, dollars."""
    marks: tuple[str, ...]
    """What was kept though it is odd, each with its place."""
