"""Every event the ledger can hold, and what its payload must say.

The ledger is append-only; state is a fold over events. Intent is written before the act. Amounts are
integers of micro-dollars (`*_usd_micro`), durations nanoseconds (`*_ns`), times UTC nanoseconds
(`*_utc_ns`). A type not listed here is refused.
"""

from dataclasses import dataclass, field
from typing import Any, Final

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One entry, as stored."""

    seq: int
    """1, 2, ...: no gaps."""
    utc_ns: int
    type: str
    source: str
    """Who saw it: `controller`, or `agent:SESSION`."""
    source_seq: int
    """Sequence number within the source; (source, source_seq) is merged once."""
    session: str | None
    payload: dict[str, Any]
    prev_hash: str
    hash: str
    """SHA-256 over the canonical JSON of all fields above and the previous hash."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """One entry before it has its place in the chain."""

    type: str
    payload: dict[str, Any] = field(default_factory=dict)
    session: str | None = None
    source: str = "controller"
    source_seq: int | None = None
    """None: the ledger numbers it. Agents number their own."""


PAYLOADS: Final[dict[str, frozenset[str]]] = {
    # --- the run
    "run_created": frozenset(
        {
            "run",
            "campaign",
            "spec_sha256",
            "canonical_sha256",
            "plan_sha256",
            "cap_usd_micro",
            "gates",
            "rules",
            "version",
            "install_id",
            "simulated",
        }
    ),
    "controller_started": frozenset({"pid", "host", "mode"}),
    "controller_stopped": frozenset({"reason", "exit_code"}),
    "sessions_added": frozenset({"sessions", "reason"}),
    "run_finished": frozenset({"exit_code", "reason"}),
    # --- money: a lease is permission to bill up to a deadline at a frozen price
    "lease_intent": frozenset(
        {
            "lease",
            "node",
            "provider",
            "usd_per_hour_micro",
            "granularity_s",
            "max_ns",
            "worst_usd_micro",
            "teardown_reserve_usd_micro",
            "billing_from_utc_ns",
        }
    ),
    "lease_refused": frozenset({"node", "worst_usd_micro", "committed_usd_micro", "cap_usd_micro", "why"}),
    "lease_opened": frozenset(
        {
            "lease",
            "node_id",
            "usd_per_hour_micro",
            "granularity_s",
            "deadline_utc_ns",
            "dead_men",
            "price_source",
        }
    ),
    "lease_extended": frozenset({"lease", "deadline_utc_ns", "worst_usd_micro"}),
    "lease_down_asked": frozenset({"lease", "why"}),
    "lease_unreachable": frozenset({"lease", "why", "check_by_hand"}),
    "lease_settled": frozenset({"lease", "settled_usd_micro", "until_utc_ns", "proof"}),
    "phase_started": frozenset({"lease", "phase", "at_utc_ns"}),
    "tokens_billed": frozenset({"lease", "usd_micro", "prompt_tokens", "completion_tokens"}),
    # --- the node
    "boot_started": frozenset({"boot_id", "arm", "arm_hash", "place", "port"}),
    "boot_ready": frozenset({"boot_id", "boot_ns", "provenance"}),
    "boot_failed": frozenset({"boot_id", "kind", "error", "log_tail"}),
    "boot_stopped": frozenset({"boot_id"}),
    "round_started": frozenset({"round_id", "attempt"}),
    "round_committed": frozenset({"round_id", "attempt", "cells"}),
    "round_voided": frozenset({"round_id", "attempt", "reason"}),
    "round_superseded": frozenset({"round_id", "attempt", "cells", "possibly_spent", "torn_bytes"}),
    "group_stopped": frozenset({"group", "look", "why", "skipped"}),
    "forecast_made": frozenset({"group", "workload", "method", "best_tok_s", "stop", "forecasts"}),
    "anchor_judged": frozenset({"position", "step_ms", "reference_ms", "drift", "lo", "hi", "ok", "reasons"}),
    "agent_heartbeat": frozenset({"cell", "done", "total"}),
    "session_started": frozenset({"lease", "plan_sha256"}),
    "session_finished": frozenset({"state", "reason"}),
    "session_held": frozenset({"lease", "until_utc_ns"}),
    # --- gates
    "gate_tripped": frozenset({"gate", "value", "limit", "detail"}),
    "gate_overridden": frozenset({"gate", "reason", "by"}),
    "stop_asked": frozenset({"by", "why"}),
}
"""Event type -> the payload keys it must carry (it may carry more)."""

PHASES: Final = ("provision", "setup", "load", "warmup", "anchor", "measure", "idle", "teardown", "lost")
"""Every dollar has exactly one of these."""
