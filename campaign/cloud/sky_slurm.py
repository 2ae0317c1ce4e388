"""What a Slurm cluster itself lists, past SkyPilot. Raises ProviderError where it cannot be asked."""

from contextlib import suppress

from campaign.cloud import sky_sdk
from campaign.errors import ProviderError


def names(cluster: str) -> list[str]:
    """Our form of name of every allocation; SkyPilot adds its user's hash to it."""
    names = sky_sdk.slurm(cluster, "squeue -h -o %j").split()
    return [name.rsplit("-", 1)[0] for name in names]


def jobs(cluster: str, name: str) -> list[str]:
    lines = (line.split() for line in sky_sdk.slurm(cluster, "squeue -h -o '%i %j'").splitlines())
    return [w[0] for w in lines if len(w) == 2 and w[1].rsplit("-", 1)[0] == name]


def left_s(cluster: str, name: str) -> float | None:
    """Seconds until the scheduler ends the allocation, or None where it would not."""
    with suppress(ProviderError, ValueError):
        for line in sky_sdk.slurm(cluster, "squeue -h -o '%j %L'").splitlines():
            job, _, left = line.partition(" ")
            if job.rsplit("-", 1)[0] == name:
                days, _, clock = left.rpartition("-")
                parts = [int(p) for p in clock.split(":")]
                seconds = float(sum(p * 60**i for i, p in enumerate(reversed(parts))))
                return int(days or 0) * 86400 + seconds
    return None
