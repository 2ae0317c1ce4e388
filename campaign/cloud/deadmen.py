"""What ends a node when our controller is gone, cloud by cloud.

Two dead-men act without the controller on every cloud: SkyPilot's autodown timer, given in the launch call, and
the lease timer on the node. A third exists where a scheduler limits the life of an allocation. Whether each ends
the bill depends on the cloud; what is not known to end it is `ineffective`. A launch with fewer than two
effective ones is refused.

Sources: [S] SkyPilot 0.14.1, `sky/clouds/CLOUD.py`, `_CLOUD_UNSUPPORTED_FEATURES` (and Hyperbolic, PrimeIntellect,
Verda, Yotta say there that autodown is not supported); [M] measured on the lab (docs/MONEY.md); [V] the vendor's
documentation of a shutdown from inside the machine.
"""

from dataclasses import dataclass
from typing import Final, Literal

Effect = Literal["terminates", "stops", "ineffective"]

AUTODOWN: Final = "autodown"
NODE_TIMER: Final = "node_timer"
TIME_LIMIT: Final = "time_limit"

NEEDED: Final = 2
"""Effective dead-men without which a node is not used."""

DEAD_MAN_S: Final = 180
"""The longest a node outlives its deadline while one dead-man works.

Autodown: SkyPilot looks once a minute, and was measured to end a node 87 s after the minute asked for; its minutes
are the lease's rounded up to whole ones, set before the deadline by the difference. Time limit: whole minutes, and
up to 43 s late on Slurm. The node's timer: 30 s to flush.
"""
TEARDOWN_S: Final = 300
"""Reserve for `down` and its proof: down took 1.4 to 81 s on the lab; clouds take minutes."""


@dataclass(frozen=True, slots=True)
class DeadMen:
    """One cloud's row."""

    autodown: Effect
    autodown_source: str
    shutdown: Effect
    """What ending the machine from inside does to the bill."""
    shutdown_source: str
    how: str
    """How the node's own timer ends it."""
    time_limit: bool = False
    """A scheduler ends the allocation by itself."""
    credential: str = "none: SkyPilot's cluster on the node ends itself with an instance role"
    """What autodown needs on the node."""

    def effective(self) -> tuple[str, ...]:
        """Names of those that end the bill of the machine."""
        found = []
        if self.autodown != "ineffective":
            found.append(AUTODOWN)
        if self.shutdown != "ineffective":
            found.append(NODE_TIMER)
        if self.time_limit:
            found.append(TIME_LIMIT)
        return tuple(found)


_OFF = "sudo shutdown -h now"
_TERMINATES: Final = "[S] autodown is not among the unsupported features"
_NONE: Final = "[S] autodown is listed as not supported"

TABLE: Final[dict[str, DeadMen]] = {
    "slurm": DeadMen(
        "terminates",
        "[M] gone 2:07 to 2:27 after a launch with one minute, its job still asleep",
        "terminates",
        "[M] scancel of its own allocation; a shared node is never shut down",
        'scancel "$SLURM_JOB_ID"',
        time_limit=True,
        credential="none: scancel of one's own allocation needs no secret",
    ),
    "aws": DeadMen(
        "terminates",
        _TERMINATES,
        "stops",
        "[V] shutdown behaviour `stop` unless launched otherwise: the instance stops billing, its disks go on",
        _OFF,
        credential="an instance role (`aws.remote_identity: SERVICE_ACCOUNT`)",
    ),
    "gcp": DeadMen(
        "terminates",
        _TERMINATES,
        "stops",
        "[V] a guest shutdown leaves the instance TERMINATED: no charge for it, its disks go on",
        _OFF,
        credential="a service account (`gcp.remote_identity: SERVICE_ACCOUNT`)",
    ),
    "azure": DeadMen(
        "terminates",
        _TERMINATES,
        "ineffective",
        "[V] a guest shutdown is `Stopped`, not `deallocated`: it bills on",
        _OFF,
        credential="the login that SkyPilot uploads",
    ),
    "lambda": DeadMen(
        "terminates",
        _TERMINATES,
        "ineffective",
        "[S] instances cannot be stopped; [V] billed until they are terminated",
        _OFF,
        credential="the API key that SkyPilot uploads",
    ),
    "nebius": DeadMen(
        "terminates",
        _TERMINATES,
        "ineffective",
        "not known",
        _OFF,
        credential="the key file SkyPilot uploads",
    ),
    "runpod": DeadMen(
        "terminates", _TERMINATES, "ineffective", "not known", _OFF, credential="the API key SkyPilot uploads"
    ),
    "kubernetes": DeadMen(
        "terminates", _TERMINATES, "ineffective", "not known", _OFF, credential="a service account of the pod"
    ),
    **{
        name: DeadMen("ineffective", _NONE, "ineffective", "not known", _OFF, credential="-")
        for name in ("hyperbolic", "primeintellect", "verda", "yotta")
    },
}
UNKNOWN: Final = DeadMen(
    "ineffective", "this cloud is not in the table", "ineffective", "not known", _OFF, credential="not known"
)


def row(cloud: str) -> DeadMen:
    """The row of a cloud, by SkyPilot's name in any case; one without effective dead-men where it has none."""
    return TABLE.get(cloud.lower(), UNKNOWN)
