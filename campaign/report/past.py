"""What the store already knows: earlier runs beside this one, measured and of the same device.

Used by `plan` (a prior for power), by the report (boot variance of past runs) and by anchors that are held against
past ones. Simulated and imported runs lend nothing; a run that cannot be read is left out.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from campaign.analysis.drift import Past
from campaign.analysis.economics import gpus
from campaign.analysis.variance import boots_of, prior
from campaign.errors import CampaignError
from campaign.plan.power import Prior, default_prior
from campaign.store.layout import RunDir
from campaign.store.row import RequestRow
from campaign.store.run import Run

NEWEST = 20
"""Runs read at most: the newest tell most of the machine as it is."""


def earlier(results: Path, *, before_utc_ns: int | None = None, cpu: bool | None = None) -> list[RequestRow]:
    """Valid rows of runs under `results` that were created before a moment, the newest of them."""
    found: list[tuple[int, Run]] = []
    for ledger in results.glob("*/ledger.db"):
        run = Run(RunDir(ledger.parent.resolve()))
        try:
            created = run.events()[0]
        except (CampaignError, IndexError):
            continue
        p = created.payload
        if (
            p.get("simulated")
            or p.get("imported")
            or (before_utc_ns is not None and created.utc_ns >= before_utc_ns)
        ):
            continue
        found.append((created.utc_ns, run))
    rows: list[RequestRow] = []
    for _, run in sorted(found, key=lambda f: -f[0])[:NEWEST]:
        try:
            mine = run.requests().rows()
        except CampaignError:
            continue
        rows += [r for r in mine if not r.simulated and (cpu is None or (r.gpu_set == "cpu") == cpu)]
    return rows


def prior_of(rows: Sequence[RequestRow], *, cpu: bool) -> Prior | None:
    """Variance components of these rows; None where they tell none."""
    if not rows:
        return None
    found = prior(rows, default_prior("cpu" if cpu else "gpu"))
    return found if found.source == "prior" else None


def past_anchors(rows: Sequence[RequestRow], arm_hash: str, gpu_set: str) -> Past | None:
    """The reference set of one arm and node type: first anchors of earlier sessions. None below two sessions."""
    sessions: dict[str, list[RequestRow]] = defaultdict(list)
    for r in rows:
        same_kind = gpus(r.gpu_set) == gpus(gpu_set)
        if r.group == "anchor.first" and r.arm_hash == arm_hash and same_kind:
            sessions[f"{r.run}/{r.session}"].append(r)
    means = []
    for mine in sessions.values():
        boots = boots_of(mine, "step_ms")
        if boots:
            means.append(math.fsum(math.fsum(b.values.values()) / len(b.values) for b in boots) / len(boots))
    n = len(means)
    if n < 2:
        return None
    mean = math.fsum(means) / n
    sd = math.sqrt(math.fsum((m - mean) ** 2 for m in means) / (n - 1))
    return Past(math.exp(mean), sd, n) if sd > 0 else None
