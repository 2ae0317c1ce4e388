"""What a ledger says, as frozen data; `campaign.ledger.state` folds events into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from campaign.money import NOTHING, MicroUsd
from campaign.store.base import SealedFile

RoundState = Literal["begun", "committed", "voided", "superseded"]
BootState = Literal["starting", "ready", "failed", "stopped"]


def money(payload: Mapping[str, Any], key: str) -> MicroUsd | None:
    """An amount, or None for whatever is not a whole number of at least 0."""
    value = payload.get(key)
    return MicroUsd(value) if type(value) is int and value >= 0 else None


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """From `at_utc_ns` to the lease's next mark, its dollars belong to this phase."""

    phase: str
    at_utc_ns: int
    group: str | None
    round: tuple[str, str, int] | None
    """(session, round id, attempt) that was open when the mark was written."""
    session: str | None = None
    """Whose mark it is: the lease's own session, or one that was added to it."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to bill up to a deadline at a frozen price. None is unknown."""

    id: str
    session: str | None
    node: str
    provider: str
    quoted_usd_per_hour: MicroUsd | None
    """The price its reserve was computed from."""
    usd_per_hour: MicroUsd | None
    """What it bills at: the quote, or what the provider said at launch where that is more."""
    granularity_s: int
    max_ns: int
    dead_man_ns: int
    teardown_ns: int
    worst_usd: MicroUsd | None
    """To the deadline, dead-man granularity included; without the teardown reserve."""
    teardown_reserve_usd: MicroUsd | None
    billing_from_utc_ns: int
    free_allowed: bool
    max_usd_per_hour: MicroUsd | None
    """The spec's limit on the price, where it has one."""
    opened_at_utc_ns: int | None = None
    node_id: str | None = None
    deadline_utc_ns: int | None = None
    dead_men: tuple[str, ...] = ()
    price_source: str | None = None
    down_asked_at_utc_ns: int | None = None
    down_why: str | None = None
    unreachable_since_utc_ns: int | None = None
    unreachable_why: str | None = None
    check_by_hand: str | None = None
    settled: bool = False
    settled_usd: MicroUsd | None = None
    until_utc_ns: int | None = None
    proof: str | None = None
    agent_ended_at_utc_ns: int | None = None
    """When its session's agent said it was finished."""
    marks: tuple[PhaseMark, ...] = ()
    tokens_reserve_usd: MicroUsd = NOTHING
    """Most that tokens of priced endpoints may come to on this lease."""
    tokens_usd: MicroUsd = NOTHING
    """What they have come to so far."""

    @property
    def opened(self) -> bool:
        """Whether the provider gave the node."""
        return self.opened_at_utc_ns is not None


@dataclass(frozen=True, slots=True)
class Cell:
    """One sealed cell of a round."""

    cell: str
    attempt: int
    files: tuple[SealedFile, ...]
    data: Mapping[str, Any]
    """The payload as written, telemetry included."""


@dataclass(frozen=True, slots=True)
class Round:
    """The latest attempt of one planned round."""

    session: str
    id: str
    attempt: int
    state: RoundState
    begun_at_utc_ns: int | None
    ended_at_utc_ns: int | None = None
    cells: tuple[Cell, ...] = ()
    reason: str | None = None
    possibly_spent: int = 0
    """Requests begun and not finished, over all superseded attempts."""
    torn_bytes: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """(session, round id)."""
        return self.session, self.id


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of one server."""

    id: str
    session: str | None
    arm: str | None
    arm_hash: str | None
    place: str | None
    state: BootState
    boot_ns: int | None = None
    provenance: Any = None
    kind: str | None = None
    error: str | None = None
    log_tail: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """What its agent last said."""

    name: str
    state: str
    """`planned`, `running`, or what `session_finished` said."""
    lease: str | None = None
    reason: str | None = None
    last_seen_utc_ns: int | None = None
    """When the ledger last merged an event of its agent."""
    cell: str = ""
    done: int = 0
    total: int = 0
    open_round: tuple[str, str, int] | None = None
    held_until_utc_ns: int | None = None
    """Its plan is done, and its node is kept until then for what is added."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One trip, as recorded."""

    seq: int
    utc_ns: int
    session: str | None
    lease: str | None
    gate: str
    value: str
    limit: str
    detail: str


@dataclass(frozen=True, slots=True)
class Override:
    """One override: which gate, for which session (None: all), why, by whom."""

    seq: int
    session: str | None
    gate: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class AnchorJudged:
    """One anchor as judged during the run."""

    seq: int
    utc_ns: int
    session: str | None
    position: str
    data: Mapping[str, Any]
    """step_ms, reference_ms, drift, lo, hi, ok, reasons."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything the ledger says, at one event."""

    seq: int = 0
    head: str = ""
    latest_utc_ns: int = 0
    """Newest time of any event; a clock that steps back does not take it back."""
    created: Mapping[str, Any] | None = None
    """Payload of `run_created`."""
    created_at_utc_ns: int | None = None
    plan_sha256: str | None = None
    """Of the plan in force: the one the run was created with, or the last that a session was added to."""
    controllers: int = 0
    controller_since_seq: int = 0
    """Event at which the present controller started; trips before it are history."""
    controller_since_utc_ns: int | None = None
    leases: Mapping[str, Lease] = field(default_factory=dict)
    refused: tuple[Mapping[str, Any], ...] = ()
    sessions: Mapping[str, Session] = field(default_factory=dict)
    rounds: Mapping[tuple[str, str], Round] = field(default_factory=dict)
    """By (session, round id)."""
    attempt_states: Mapping[tuple[str, str, int], RoundState] = field(default_factory=dict)
    """How every attempt of every round ended, or `begun`."""
    boots: Mapping[str, Boot] = field(default_factory=dict)
    anchors: tuple[AnchorJudged, ...] = ()
    stopped_early: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """By (session, group): `look` (rounds run), `quads` of the next, `why`, and the round ids `skipped`."""
    forecasts: tuple[Mapping[str, Any], ...] = ()
    """Made before a stage of a ladder ran: the payload of `forecast_made` with `session` and `at_utc_ns`."""
    tripped: tuple[Gate, ...] = ()
    overridden: tuple[Override, ...] = ()
    stop_asked: Mapping[str, Any] | None = None
    """by and why, since the present controller started."""
    finished: Mapping[str, Any] | None = None
    """exit_code and reason."""
    files: Mapping[str, SealedFile] = field(default_factory=dict)
    """By path: files whose hash stands in a committed round. Rows of no other file are valid."""

    @property
    def cap_usd(self) -> MicroUsd | None:
        """The campaign's cap; None before `run_created`."""
        return money(self.created, "cap_usd_micro") if self.created is not None else None

    @property
    def open_leases(self) -> tuple[Lease, ...]:
        """Leases that may still bill: from their intent until they are settled."""
        return tuple(lease for lease in self.leases.values() if not lease.settled)

    def done(self, session: str) -> tuple[str, ...]:
        """Round ids of a session that are committed, or that an early stop left out."""
        committed = [r.id for r in self.rounds.values() if r.session == session and r.state == "committed"]
        skipped = [i for (s, _), e in self.stopped_early.items() if s == session for i in e["skipped"]]
        return tuple(dict.fromkeys([*committed, *skipped]))

    def attempts(self, session: str) -> dict[str, int]:
        """Round id -> the next attempt number, of a session's rounds that were begun and not committed."""
        return {
            r.id: r.attempt + 1
            for r in self.rounds.values()
            if r.session == session and r.state != "committed"
        }

    def is_overridden(self, gate: str, session: str | None) -> bool:
        """Whether a gate was overridden for this session, or for all."""
        return any(o.gate == gate and o.session in {None, session} for o in self.overridden)
