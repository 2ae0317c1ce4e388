"""Names of the nodes we launch: whose they are, of which lease, and when they must be gone.

    cmp-INSTALL-LEASE-DEADLINE     cmp-3f9a2b11c0de-5be1a0c4-t2q8xk

INSTALL is the install id, LEASE a hash of run and lease, DEADLINE the minute (base 36) at which the lease ends.
A name that only looks like this is not ours: reconcile compares whole names, and a provider that can carry labels
must show the same install id there.
"""

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

_NAME: Final = re.compile(r"cmp-([0-9a-f]{12})-([0-9a-f]{8})-([0-9a-z]{6})")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_MINUTE_NS: Final = 60_000_000_000

LABEL_INSTALL: Final = "campaign-install"
LABEL_LEASE: Final = "campaign-lease"
LABEL_CAMPAIGN: Final = "campaign-name"
LABEL_DEADLINE: Final = "campaign-deadline"


@dataclass(frozen=True, slots=True)
class NodeName:
    """What a name says."""

    install_id: str
    lease_key: str
    deadline_utc_ns: int
    """The whole minute at or after the lease's deadline."""


def lease_key(run: str, lease: str) -> str:
    """Eight hex digits that stand for one lease of one run."""
    return sha256(f"{run}\n{lease}".encode()).hexdigest()[:8]


def node_name(install_id: str, run: str, lease: str, deadline_utc_ns: int) -> str:
    """The name a node is launched under. Raises ValueError for an install id of another shape."""
    if not re.fullmatch(r"[0-9a-f]{12}", install_id):
        raise ValueError(f"not an install id: {install_id!r}")
    minute = -(-deadline_utc_ns // _MINUTE_NS)
    return f"cmp-{install_id}-{lease_key(run, lease)}-{_base36(minute)}"


def parse(name: str) -> NodeName | None:
    """What a name says, or None for one that was not made by `node_name`."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    install, lease, minute = found.groups()
    return NodeName(install, lease, int(minute, 36) * _MINUTE_NS)


def labels(install_id: str, campaign: str, run: str, lease: str, deadline_utc_ns: int) -> dict[str, str]:
    """Labels beside the name, in characters every cloud takes."""
    safe = re.sub(r"[^a-z0-9_-]", "-", campaign.lower())[:40].strip("-_") or "campaign"
    return {
        LABEL_INSTALL: install_id,
        LABEL_CAMPAIGN: safe,
        LABEL_LEASE: lease_key(run, lease),
        LABEL_DEADLINE: str(-(-deadline_utc_ns // 1_000_000_000)),
    }


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text.rjust(6, "0")
