"""What the store already knows: earlier runs beside this one, measured and of the same device.

Used by `plan` (a prior for power), by the session (looks, anchors held against past ones) and by the report (boot
variance of past runs). Simulated and imported runs lend nothing; a run that cannot be read is left out.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from campaign.analysis.drift import Past
from campaign.analysis.economics import gpus
from campaign.analysis.variance import boots_of, prior
from campaign.errors import CampaignError
from campaign.plan.expand import expand
from campaign.plan.model import CampaignPlan, SessionPlan
from campaign.plan.power import Prior, default_prior
from campaign.spec.models import Spec
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


def prior_of(
    rows: Sequence[RequestRow], *, cpu: bool, arm_hashes: Collection[str] = frozenset()
) -> Prior | None:
    """Variance components of these rows; None where they tell none.

    Groups that hold one of these arms are taken alone where boots of them repeat; else all of the same device.
    `Prior.said` names the runs and which of the two it was.
    """
    wanted = {(r.run, r.session, r.group) for r in rows if r.arm_hash in arm_hashes}
    own = [r for r in rows if (r.run, r.session, r.group) in wanted]
    device = "CPU" if cpu else "GPU"
    for chosen, what in ((own, "the same arms"), (rows, f"other arms on the same kind of node ({device})")):
        if not chosen:
            continue
        found = prior(chosen, default_prior("cpu" if cpu else "gpu"))
        if found.source == "prior" and (found.boot_df or chosen is rows):
            return replace(found, said=f"{_named({r.run for r in chosen})}, {what}")
    return None


def _named(runs: set[str]) -> str:
    names = sorted(runs)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"run{'s' if len(names) > 1 else ''} {', '.join(names[-3:])}{more}"


def cpu_only(spec: Spec) -> bool:
    """Whether no node of the file has accelerators."""
    return not any(getattr(n, "gpus", ()) or n.provider == "sky" for n in spec.nodes.values())


def for_plan(spec: Spec, results: Path) -> Prior | None:
    """What the store knows of this file's arms, or of its kind of node; None where it knows nothing."""
    if "://" in spec.store or not any(results.glob("*/ledger.db")):
        return None
    cpu = cpu_only(spec)
    hashes = {arm.hash for name in spec.sessions for draft in expand(spec, name) for arm in draft.arms}
    return prior_of(earlier(results, cpu=cpu), cpu=cpu, arm_hashes=hashes)


def hashes(plan: CampaignPlan) -> frozenset[str]:
    """Of every arm of a plan."""
    return frozenset(a.hash for s in plan.sessions for a in s.arms.values())


@dataclass(frozen=True, slots=True)
class Known:
    """What a session starts with: boot variance of past runs, and past anchors of its reference arm."""

    prior: Prior | None = None
    anchors: Past | None = None


def for_session(run_dir: RunDir, session: SessionPlan) -> Known:
    """What the report of this run will know too: runs beside it, created before it."""
    run = Run(run_dir)
    try:
        created, plan = run.events()[0], run.plan()
    except (CampaignError, IndexError):
        return Known()
    if created.payload.get("simulated"):
        return Known()
    anchor = next((g for g in session.groups if g.kind == "anchor"), None)
    placed = [b.gpus for g in session.groups for r in g.rounds for b in r.boots]
    cpu = not any(placed)
    rows = earlier(run_dir.root.parent, before_utc_ns=created.utc_ns, cpu=cpu)
    known = prior_of(rows, cpu=cpu, arm_hashes=hashes(plan))
    if anchor is None:
        return Known(known)
    first = anchor.rounds[0].boots[0]
    gpu_set = ",".join(map(str, first.gpus)) if first.gpus else "cpu"
    return Known(known, past_anchors(rows, session.arms[first.arm].hash, gpu_set))


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
