"""What a running campaign looks like from outside, once a moment."""

from dataclasses import dataclass, field

from campaign.money import MicroUsd


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """One session."""

    name: str
    node: str
    state: str
    """`waiting`, `launching`, `booting`, `measuring`, `tearing down`, `done`, `stopped`, `failed`."""
    phase: str
    cell: str
    done: int
    """Requests finished, warm-up included."""
    total: int
    tok_s: float | None
    """Decode rate of the last request."""
    deadline_utc_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole campaign."""

    run: str
    campaign: str
    elapsed_s: float
    left_s: float | None
    """Expected seconds to go: planned minus done, scaled by the pace so far."""
    cap_usd: MicroUsd
    spent_usd: MicroUsd
    """Settled plus accrued on open leases."""
    committed_usd: MicroUsd
    sessions: tuple[SessionSnapshot, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Newest last: anchors judged, gates tripped, rounds committed."""
