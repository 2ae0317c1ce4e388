"""What a report holds: conclusions, money and identity, each with the query that made it.

Everything here was read from one run folder. The renderers (terminal, HTML, Markdown, JSON) add words and
shapes, never numbers. Unknown is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from campaign.analysis.model import AnchorResult, Speculation, Verdict
from campaign.report.beside import Further

RunStatus = Literal["running", "interrupted", "finished", "stopped", "failed"]
"""`interrupted`: no controller is alive and the run has not ended; `campaign resume` goes on."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a number comes from."""

    query: str
    """Runs in the run folder: DuckDB SQL over `rows/`, or SQLite over `ledger.db`."""
    n: int
    """Rows it yields."""
    unit: str = "rows"
    language: Literal["duckdb", "sqlite"] = "duckdb"


@dataclass(frozen=True, slots=True)
class NodeFact:
    """One lease: which machine, at which price, until when."""

    session: str
    lease: str
    node: str
    provider: str
    node_id: str | None
    """Identity of the physical machine; None before the lease is open."""
    usd_per_hour: float | None
    price_source: str | None
    places: tuple[str, ...]
    """Where engines ran on it: `p0 (cpu)`, `p1 (0,1,2,3)`."""
    state: Literal["intended", "open", "settled"]
    opened_utc_ns: int | None
    closed_utc_ns: int | None


@dataclass(frozen=True, slots=True)
class BootFact:
    """One start of one engine."""

    boot_id: str
    session: str
    arm: str
    place: str
    ready_s: float | None
    """From spawn to the first token of a probe; None where it never got there."""
    state: Literal["starting", "ready", "stopped", "failed"]
    error: str | None


@dataclass(frozen=True, slots=True)
class GateFact:
    """A gate that tripped, or that somebody overrode."""

    utc_ns: int
    session: str | None
    gate: str
    what: Literal["tripped", "overridden"]
    value: str
    limit: str
    text: str
    """Detail of a trip; reason of an override."""
    by: str


@dataclass(frozen=True, slots=True)
class PlanActual:
    """One session: what the plan said and what came of it."""

    session: str
    minutes_planned: float
    minutes: float | None
    boots_planned: int
    boots: int
    requests_planned: int
    requests: int
    """Valid rows, anchors included, warm-up not counted."""
    requests_void: int
    """Void and superseded rows."""
    possibly_spent: int
    """Requests that were begun and never finished, in rounds that were redone."""
    usd_expected: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class LadderRung:
    """One rung of a ladder on its field, for plots."""

    ladder: str
    arm: str
    value: float | None
    """Numeric value of the field; None where it is not a number."""


@dataclass(frozen=True, slots=True)
class SpendPoint:
    """Money spent up to a moment, all leases together."""

    utc_ns: int
    usd: float


@dataclass(frozen=True, slots=True)
class AnchorTime:
    """When an anchor was judged."""

    session: str
    position: str
    utc_ns: int


@dataclass(frozen=True, slots=True)
class Report:
    """One run, as it stands."""

    run: str
    campaign: str
    simulated: bool
    partial: bool
    """The run has not finished: counts and intervals may still change."""
    status: RunStatus
    why_ended: str
    started_utc_ns: int
    ended_utc_ns: int | None
    as_of_utc_ns: int
    """Time of the last event read."""
    path: str
    """The run folder, as the user would type it."""
    head_hash: str
    ledger_length: int
    canonical_sha256: str
    versions: Mapping[str, str]
    nodes: tuple[NodeFact, ...]
    boots: tuple[BootFact, ...]
    anchors: tuple[AnchorResult, ...]
    anchor_times: tuple[AnchorTime, ...]
    drift_delta: float
    verdicts: tuple[Verdict, ...]
    speculation: tuple[Speculation, ...]
    ladders: Mapping[str, tuple[LadderRung, ...]]
    """By ladder name: the base first, then the rungs in the file's order."""
    spend: Mapping[str, Any]
    """The contract of `campaign spend --json`."""
    spend_points: tuple[SpendPoint, ...]
    plan_actual: tuple[PlanActual, ...]
    gates: tuple[GateFact, ...]
    warnings: tuple[str, ...]
    """What happened: refusals, nodes not proven gone, rounds voided or done again."""
    risk_points: tuple[SpendPoint, ...] = ()
    """What was committed (settled, accrued, and what open leases may still come to), at each change."""
    plan_warnings: tuple[str, ...] = ()
    """What the plan said before: mostly rules finer than n and boots can resolve."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Arm name -> what it is, where the name alone does not say it (`kv.b`: `kv_dtype q8_0`)."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Keys: `verdict/SESSION/PAIR/METRIC`, `anchor/SESSION/POSITION`, `speculation/SESSION/LADDER`, `spend`,
    `boots`, `requests`."""

    further: Further = field(default_factory=Further)
    """Results beside the verdicts: across sessions, champions, composites, decompositions, economics."""
    instrument: Mapping[str, Any] = field(default_factory=dict)
    """`selfchecks`, `cells` and `sentences` about the client's stamps (campaign.report.instrument)."""
    prior_runs: tuple[str, ...] = ()
    """Earlier runs of the store whose boot variance joined the verdicts."""

    @property
    def primary(self) -> tuple[Verdict, ...]:
        """The one deciding verdict of each comparison."""
        return tuple(v for v in self.verdicts if v.primary)

    @property
    def overrides(self) -> tuple[GateFact, ...]:
        return tuple(g for g in self.gates if g.what == "overridden")


def verdict_key(verdict: Verdict) -> str:
    """Key of a verdict's source."""
    return f"verdict/{verdict.session}/{verdict.pair}/{verdict.metric}"
