"""What a plan is: every boot, every request, in order, with what it may cost.

A plan is data: frozen, hashable as canonical JSON, and everything the session needs. The session runs
rounds in order. A *round* is a set of boots that are resident together, and the sequence in which their
requests are sent; it is committed as a whole or not at all.
"""

from dataclasses import dataclass
from typing import Any, Literal

from campaign.money import NOTHING, MicroUsd
from campaign.plan.arrivals import LoadPlan
from campaign.spec.models import Arm, Metric

GroupKind = Literal["anchor", "ladder", "pair", "null", "aa"]
PlannedDesign = Literal["alternated", "duet", "blocks", "bracketed", "anchor"]
Position = Literal["first", "between", "last"]


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """An arm as it will be booted."""

    name: str
    """Name in the spec; rungs are `LADDER=VALUE`, a varied arm `PAIR.b`, an A/A's second side `ARM#2`."""
    hash: str
    """First 16 hex digits of the SHA-256 of its canonical configuration (the name is not part of it)."""
    config: Arm
    """Resolved: inheritance applied, `from` gone."""


@dataclass(frozen=True, slots=True)
class BootPlan:
    """One planned start of one engine; a round's boots are started in the order they stand in."""

    arm: str
    index: int
    """Among the boots of this arm in this group, from 0."""
    place: str
    """`p0`, `p1`, ...; swapped between rounds so that a place is not mistaken for an arm."""
    gpus: tuple[int, ...]
    """Empty on CPU."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request of a round's sequence."""

    arm: str
    slot: int
    seed: int
    order: int
    wave: int
    """0 at concurrency 1; above it, the requests of one arm and wave are in flight together, at most
    `concurrency` at once. In a `duet`, requests of equal `order` start together: `wave` is then the slot's
    own at concurrency 1, and above it both arms run the same wave at once."""
    at_ns: int | None = None
    """Planned start in an open loop, after the first moment of this arm's run in this round."""
    cut: bool = False
    """Ramp or tail: sent and stored as warm-up, never analysed."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Boots resident together and the requests sent to them."""

    id: str
    """`GROUP/rINDEX`."""
    index: int
    boots: tuple[BootPlan, ...]
    warmup: tuple[RequestPlan, ...]
    """Stored as their own phase, in the sampling mode and shape of what follows: one request per boot, a wave of them
    above concurrency 1, on the slot after the workload's last (`slot == n`), with seeds that no measured request has."""
    sequence: tuple[RequestPlan, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All rounds of one pair, ladder or anchor at one concurrency."""

    name: str
    """`anchor.first`, `anchor.between1`, `anchor.last`, `ladder.NAME` (`@sN` a later stage), `pair.NAME`, `pair.NAME@cN`."""
    kind: GroupKind
    design: PlannedDesign
    why: str
    """Why this design: printed by `plan`."""
    arms: tuple[str, ...]
    workload: str
    concurrency: int
    rounds: tuple[RoundPlan, ...]
    seconds: float
    """Expected, boots included."""
    usd_expected: MicroUsd
    load: LoadPlan | None = None
    """Steady or open loop; None for waves and concurrency 1."""
    looks: tuple[int, ...] = ()
    """Rounds after which the group may stop early; empty: it runs to its end."""
    look_quads: tuple[int, ...] = ()
    """The same inside rounds: whole quads (two slots on every arm), all rounds of the group counted together."""
    forecast: tuple[str, ...] = ()
    """A stage of a ladder: the arms that have not run before it. Their forecasts are written down first, and the
    group and all stages after it are left out where none of them can win."""

    @property
    def ladder(self) -> str | None:
        """The ladder that this is, or is a stage of."""
        return self.name.removeprefix("ladder.").partition("@")[0] if self.kind == "ladder" else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms of one group that will be compared, fixed before the run."""

    pair: str
    """`NAME` of a pair (`NAME@cN` where it has several concurrencies), `LADDER:A|B` of a ladder."""
    kind: Literal["pair", "ladder", "null", "aa"]
    family: str
    """Comparisons adjusted together: the ladder's name, else the pair's own."""
    group: str
    a: str
    b: str
    workload: str
    concurrency: int
    primary: Metric
    margin: float


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One lease."""

    name: str
    node: str
    priority: int
    arms: dict[str, ArmPlan]
    groups: tuple[GroupPlan, ...]
    """In running order, anchors among them."""
    comparisons: tuple[Comparison, ...]
    boots: int
    requests: int
    """All that are sent, warm-up included."""
    seconds: float
    """Expected, setup included; never past the lease's end."""
    usd_per_hour: MicroUsd
    """Quoted, or the cap of the node where no quote can be had."""
    price_source: Literal["declared", "quoted", "cap"]
    usd_expected: MicroUsd
    usd_worst: MicroUsd
    """The lease to its deadline, dead-man granularity and teardown reserve included."""
    worst_seconds: float
    """Length of the lease asked for: at most the node's `max_hours`."""
    tokens_usd: MicroUsd = NOTHING
    """Most that tokens of priced endpoints come to; part of `usd_worst`, and of `usd_expected` as expected."""
    hold_s: float = 0.0
    """Time the node is kept after its last anchor, for arms that are added; part of the lease."""
    exploratory: bool = False
    """Added while the run was going on: nothing of it was registered before it."""


@dataclass(frozen=True, slots=True)
class Power:
    """What a comparison can resolve."""

    pair: str
    metric: Metric
    n: int
    """Blocks (prompts, or waves)."""
    boots: int
    resolvable_pct: float
    """Smallest difference found with 80 % power at the two-sided 5 % level."""
    rule_pct: float
    """The margin of the spec."""
    source: Literal["prior", "default", "declared"]
    """Of the boot variance: earlier runs, stated defaults (the store knows nothing), or the spec."""


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The cheapest way to resolve what a comparison's margin asks for, from the cost of a boot and of a request."""

    pair: str
    metric: Metric
    difference_pct: float
    design: PlannedDesign
    boots: int
    """Of each arm."""
    n: int
    """Requests a boot."""
    minutes: float
    usd: MicroUsd
    usd_planned: MicroUsd
    """What the file's own design costs; its group may hold further comparisons."""


@dataclass(frozen=True, slots=True)
class CampaignPlan:
    """Everything, before a dollar is spent."""

    campaign: str
    cap_usd: MicroUsd
    sessions: tuple[SessionPlan, ...]
    """By priority, then in the file's order."""
    admitted: tuple[str, ...]
    """Sessions whose worst case fits under the cap together; the others wait for money to settle."""
    power: tuple[Power, ...]
    warnings: tuple[str, ...]
    cut: tuple[str, ...]
    """Where nothing fits: what to cut, one suggestion each."""
    assumptions: tuple[str, ...] = ()
    """What times and dollars rest on, one line each."""
    cheapest: tuple[Cheapest, ...] = ()
    """One proposal for each comparison that some design can resolve."""

    def to_json(self) -> dict[str, Any]:
        """The shape of `campaign plan --json` (a contract, see docs/CONTRACTS.md)."""
        from campaign.plan.view import plan_json

        return plan_json(self)
