"""The rules a budget keeps: gates, limits, what a price is, and their registration before the run. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from campaign.ledger.canon import canonical, sha256
from campaign.money import MicroUsd, micro
from campaign.spec.models import SkyNode, Spec

GATES: Final = (
    "cost",
    "price",
    "lease_time",
    "dead_man",
    "heartbeat",
    "max_consecutive_errors",
    "anchor_drift",
    "anchor_quality",
    "max_void_share",
    "telemetry",
    "missing_input",
)
"""Every gate a trip may name, and `--override` may take."""

STANDING: Final = frozenset({"anchor_drift", "anchor_quality", "max_void_share", "telemetry"})
"""Findings about the data: in force until overridden. The others are conditions, judged anew on resume."""

UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Trip:
    """A gate left its limit, or a question was refused. `session` and `lease` None: the whole campaign."""

    gate: str
    value: str
    limit: str
    detail: str
    session: str | None = None
    lease: str | None = None

    @property
    def key(self) -> tuple[str, str | None, str | None]:
        """What makes two trips the same one: conditions by lease, findings about data by their detail."""
        return self.gate, self.session, self.detail if self.gate in STANDING else self.lease

    @property
    def why(self) -> str:
        """One sentence."""
        return f"gate {self.gate}: {self.value} against limit {self.limit} ({self.detail})"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the spec allows."""

    cap_usd: MicroUsd
    heartbeat_ns: int
    max_consecutive_errors: int
    max_void_share: float
    drift_delta: float
    max_usd_per_hour: Mapping[str, MicroUsd] = field(default_factory=dict)
    """By node name."""
    free_nodes: frozenset[str] = frozenset()
    """Nodes declared free: a price of zero is a price there, and nowhere else."""
    session_cap_usd: Mapping[str, MicroUsd] = field(default_factory=dict)
    """By session name, where a session has a cap of its own."""
    max_throttled: float | None = None
    min_sm_mhz: int | None = None


def limits(spec: Spec, session_cap_usd: Mapping[str, MicroUsd] | None = None) -> Limits:
    """The limits of a resolved spec."""
    dear = {name: micro(n.max_usd_per_hour) for name, n in spec.nodes.items() if isinstance(n, SkyNode)}
    free = {name for name, n in spec.nodes.items() if not isinstance(n, SkyNode) and n.usd_per_hour == 0}
    return Limits(
        cap_usd=micro(spec.budget.cap_usd),
        heartbeat_ns=round(spec.gates.heartbeat.total_seconds() * 1e9),
        max_consecutive_errors=spec.gates.max_consecutive_errors,
        max_void_share=spec.gates.max_void_share,
        drift_delta=spec.anchor.drift_delta,
        max_usd_per_hour=dear,
        free_nodes=frozenset(free),
        session_cap_usd=dict(session_cap_usd or {}),
        max_throttled=spec.gates.max_throttled,
        min_sm_mhz=spec.gates.min_sm_mhz,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a round may begin."""

    admitted: bool
    trip: Trip | None = None

    @property
    def why(self) -> str | None:
        """Why not, in one sentence."""
        return self.trip.why if self.trip is not None else None


# --- price


def freeze_price(
    raw: object, *, free_allowed: bool = False, max_usd_per_hour: MicroUsd | None = None
) -> MicroUsd | Trip:
    """The price of a launch in micro-dollars per hour, from dollars as a provider gave them.

    A Trip for what is no price: nothing, text that is no number, NaN, infinity, negative zero, a
    negative, zero where the node is not declared free, or more than `max_usd_per_hour`.
    """
    shown = UNKNOWN if raw is None or raw == "" else str(raw)
    limit = dollars(max_usd_per_hour) + "/h" if max_usd_per_hour is not None else "a finite price above 0"
    amount = _decimal(raw)
    if amount is None or not amount.is_finite() or amount.is_signed():
        return Trip("price", shown, limit, "not a price: the launch is refused")
    return check_price(micro(amount), free_allowed=free_allowed, max_usd_per_hour=max_usd_per_hour)


def check_price(
    price: object, *, free_allowed: bool = False, max_usd_per_hour: MicroUsd | None = None
) -> MicroUsd | Trip:
    """The same for a price that is in micro-dollars per hour already."""
    limit = dollars(max_usd_per_hour) + "/h" if max_usd_per_hour is not None else "a finite price above 0"
    if type(price) is not int or price < 0:
        return Trip("price", UNKNOWN if price is None else str(price), limit, "not a price")
    if price == 0 and not free_allowed:
        return Trip("price", "0", limit, "zero, and the node is not declared free")
    if max_usd_per_hour is not None and price > max_usd_per_hour:
        return Trip("price", f"{dollars(price)}/h", limit, "dearer than max_usd_per_hour")
    return MicroUsd(price)


def _decimal(raw: object) -> Decimal | None:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str, Decimal)):
        return None
    try:
        return Decimal(str(raw))
    except InvalidOperation:
        return None


# --- values that others measured


def finite(value: object) -> float | None:
    """The number, or None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def over(gate: str, value: object, limit: float, detail: str, session: str | None = None) -> Trip | None:
    """A Trip where `value` is above `limit`, or is no finite number. At the limit is within it."""
    number = finite(value)
    if number is None:
        return Trip(
            gate, UNKNOWN if value is None else str(value), f"{limit:g}", f"{detail}: unreadable", session
        )
    return Trip(gate, f"{number:g}", f"{limit:g}", detail, session) if number > limit else None


def errors_trip(in_a_row: object, limit: Limits, session: str | None = None) -> Trip | None:
    """Failed requests in a row: the limit itself trips, as `max_consecutive_errors: 3` stops at the third."""
    return over(
        "max_consecutive_errors", in_a_row, limit.max_consecutive_errors - 1, "failed in a row", session
    )


def void_share_trip(void: int, rows: int, limit: Limits, session: str | None = None) -> Trip | None:
    """Share of void rows of a cell. No rows at all is unknown, and trips."""
    share = void / rows if rows > 0 else None
    return over("max_void_share", share, limit.max_void_share, f"{void} of {rows} rows void", session)


def telemetry_trip(window: Mapping[str, object], limit: Limits, session: str | None = None) -> Trip | None:
    """Means of a round against the limits on throttling and clocks. A reading that is not there trips."""
    for name, bound, low in (("throttle", limit.max_throttled, False), ("sm_mhz", limit.min_sm_mhz, True)):
        if bound is None:
            continue
        read = {key: value for key, value in window.items() if re.fullmatch(rf"gpu\d+_{name}", key)}
        for key, value in read.items() or (("", None),):
            number = finite(value)
            bad = number is None or (number < bound if low else number > bound)
            if bad:
                shown = UNKNOWN if number is None else f"{number:g}"
                return Trip("telemetry", shown, f"{bound:g}", key or f"gpu_{name}", session)
    return None


def dollars(amount: int) -> str:
    """`$1.25`, to the micro-dollar where it matters."""
    text = f"{Decimal(amount) / 1_000_000:.6f}"
    whole, cents = text.split(".")
    return f"${whole}.{cents[:2]}{cents[2:].rstrip('0')}"


# --- registration


def registration(spec: Spec) -> dict[str, Any]:
    """`gates`, `rules` and the `rules_sha256` over both: what decides, fixed before anything is known.

    They belong into `run_created`; `rules_hash` of what the ledger holds must give the same hash later.
    """
    gates = spec.gates.model_dump(mode="json")
    rules = {
        "anchor": spec.anchor.model_dump(mode="json"),
        "pairs": {name: pair.model_dump(mode="json") for name, pair in spec.pairs.items()},
        "ladders": {name: ladder.model_dump(mode="json") for name, ladder in spec.ladders.items()},
        "statistics": spec.statistics.model_dump(mode="json"),
        "fail_on": spec.fail_on.model_dump(mode="json"),
    }
    return {"gates": gates, "rules": rules, "rules_sha256": rules_hash(gates, rules)}


def rules_hash(gates: Mapping[str, Any], rules: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the canonical JSON of gates and decision rules; the order of keys is no matter."""
    return sha256(canonical({"gates": gates, "rules": rules}))
