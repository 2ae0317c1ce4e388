"""The shape of results beside the verdicts; `campaign.report.further` fills it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Further:
    """JSON-ready; every list may be empty."""

    across: list[dict[str, Any]] = field(default_factory=list)
    champions: list[dict[str, Any]] = field(default_factory=list)
    replicates: list[dict[str, Any]] = field(default_factory=list)
    composites: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    aa_offsets: list[dict[str, Any]] = field(default_factory=list)
    decomposition: list[dict[str, Any]] = field(default_factory=list)
    economics: list[dict[str, Any]] = field(default_factory=list)
    frontiers: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    forecasts: list[dict[str, Any]] = field(default_factory=list)
    energy: list[dict[str, Any]] = field(default_factory=list)
    gpu_idle: list[dict[str, Any]] = field(default_factory=list)
    sentences: tuple[tuple[str, str], ...] = ()
    """(what it is, one sentence)."""
