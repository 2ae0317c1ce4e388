"""Reconcile over every run of a store, for cron: no controller of a run has to be alive, none is disturbed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from campaign.clock import Clock
from campaign.cloud import naming
from campaign.cloud.base import Provider
from campaign.errors import CampaignError, LedgerLocked
from campaign.fleet.create import registered_id
from campaign.fleet.drive import remote_providers
from campaign.fleet.reconcile import Finding
from campaign.fleet.start import reconcile_run
from campaign.ledger.journal import read_events
from campaign.ledger.state import fold
from campaign.spec.load import parse_canonical
from campaign.store.layout import RunDir


@dataclass(frozen=True, slots=True)
class Swept:
    """What was found in one run; `note` says why a run was left alone."""

    run: str
    findings: tuple[Finding, ...]
    note: str = ""
    alarming: bool = False


def sweep(
    runs: list[RunDir], install_id: str, clock: Clock, providers: Mapping[str, Provider] | None = None
) -> list[Swept]:
    """Reconcile each run in turn. What the ledgers of other runs know to be alive is not touched."""
    known = known_nodes(runs, install_id)
    given = remote_providers() if providers is None else providers
    out = []
    for run_dir in runs:
        try:
            spec = parse_canonical(run_dir.canonical.read_bytes())
            found = reconcile_run(run_dir, spec, clock, lambda: known, given)
            out.append(Swept(run_dir.name, tuple(found.findings), alarming=bool(found.alarms)))
        except LedgerLocked as error:
            out.append(Swept(run_dir.name, (), f"left to its controller: {error}"))
        except (CampaignError, OSError, ValueError) as error:
            out.append(
                Swept(
                    run_dir.name, (), f"cannot be read, so nothing of it is touched: {error}", alarming=True
                )
            )
    return out


def known_nodes(runs: list[RunDir], install_id: str) -> dict[str, str]:
    """Node name -> why it is left alone: open leases of every ledger that can be read."""
    known = {}
    for run_dir in runs:
        try:
            state = fold(read_events(run_dir.ledger))
        except CampaignError:
            continue
        for lease in state.open_leases:
            deadline = lease.billing_from_utc_ns + lease.max_ns
            made_by = registered_id(state.created) or install_id
            name = naming.node_name(made_by, run_dir.name, lease.id, deadline)
            known[name] = f"lease {lease.id} of run {run_dir.name} is open in its own ledger"
    return known


def runs_of(store: Path) -> list[RunDir]:
    """Every run of a store, by name."""
    return [RunDir(p.parent.resolve()) for p in sorted(store.glob("*/ledger.db"))]
