"""Finds nodes nobody watches any more, takes down those that are ours to end, and bills them.

Taken down: a node of a lease in this ledger that no supervisor holds, and a node that carries our own install
id and a deadline that has passed. Everything else is reported and left alone: runs of others and of other
ledgers share the account.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from campaign.clock import Clock, iso
from campaign.cloud.base import LaunchIntent, NodeHandle, Provider
from campaign.errors import LedgerError, ProviderError
from campaign.fleet.budget import BudgetPort
from campaign.fleet.create import registered_id
from campaign.fleet.supervisor import take_down
from campaign.ledger.events import NewEvent
from campaign.ledger.model import Lease
from campaign.spec.models import Node

SWEEP_TRIES = 2
SWEEP_PAUSE_S = 2.0
GRACE_NS = 60_000_000_000
"""A deadline in a node's name is a whole minute; a node is past it once that minute is over."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The run whose ledger is asked."""

    run: str
    campaign: str
    install_id: str
    run_dir: str
    nodes: Mapping[str, Node]
    providers: tuple[str, ...] = ()
    """Providers to list even where no lease names them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One node or lease, and what was done."""

    what: str
    """`settled`, `downed`, `unreachable`, `unknown`, `held`."""
    node: str
    detail: str
    check_by_hand: str = ""
    usd_micro: int | None = None

    @property
    def alarming(self) -> bool:
        """Whether a person has to look."""
        return self.what in {"unreachable", "unknown"}


@dataclass(slots=True)
class Reconciled:
    """What one pass found."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def alarms(self) -> list[Finding]:
        return [f for f in self.findings if f.alarming]


class Reconciler:
    """One pass over one run; plain asyncio, the provider and the budget are handed in."""

    def __init__(
        self,
        budget: BudgetPort,
        providers: Mapping[str, Provider],
        scope: Scope,
        clock: Clock,
        active: Callable[[], frozenset[str]] = frozenset,
        known_elsewhere: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._budget, self._providers, self._scope, self._clock = budget, providers, scope, clock
        self._active = active
        self._elsewhere = known_elsewhere

    async def run(self) -> Reconciled:
        """Settle every lease nobody holds, then look at what the providers list. Never raises for a provider."""
        out = Reconciled()
        # The ledger first, who is active second: a lease that is taken in between is not in this state.
        state = await self._budget.state()
        active = self._active()
        for lease in state.open_leases:
            if (lease.session or "?") not in active:
                out.findings.append(await self._abandoned(lease))
        await self._listed(out)
        return out

    # --- leases of this ledger

    async def _abandoned(self, lease: Lease) -> Finding:
        provider = self._providers.get(lease.provider)
        node = self._scope.nodes.get(lease.node)
        if provider is None or node is None:
            return Finding(
                "unknown", lease.node, f"lease {lease.id}: provider {lease.provider} is not available here"
            )
        created = (await self._budget.state()).created
        handle = provider.expected(self._intent(lease, node, created))
        if lease.down_asked_at_utc_ns is None:
            asked = {"lease": lease.id, "why": "reconcile: nobody holds this lease"}
            await self._budget.record(NewEvent("lease_down_asked", asked, lease.session))
        await self._save(provider, handle)
        ended = await take_down(provider, handle, self._clock, SWEEP_TRIES, SWEEP_PAUSE_S)
        if not ended.gone:
            if lease.unreachable_since_utc_ns is None:
                payload = {"lease": lease.id, "why": ended.how, "check_by_hand": ended.by_hand}
                await self._budget.record(NewEvent("lease_unreachable", payload, lease.session))
            return Finding("unreachable", handle.node_id, f"lease {lease.id}: {ended.how}", ended.by_hand)
        # What came after the last word of its agent is lost; the bill runs to the proof.
        held = (await self._budget.state()).leases[lease.id]
        if not held.settled and not held.marks:
            await self._budget.mark_phase(lease.id, "lost")
        now = self._clock.utc_ns()
        settled = await self._budget.settle(lease.id, now, f"reconcile: {ended.how}")
        return Finding("settled", handle.node_id, f"lease {lease.id}: {ended.how}", usd_micro=settled.usd)

    async def _save(self, provider: Provider, handle: NodeHandle) -> None:
        """Bring rows and the agent's journal before the node is ended; it is ended all the same."""
        try:
            await self._budget.observe(await provider.fetch(handle, self._scope.run_dir))
        except Exception:
            # A full disk or a torn archive too: rows stay where they are, and the next lease is still to be ended.
            return

    def _intent(self, lease: Lease, node: Node, created: Mapping[str, Any] | None = None) -> LaunchIntent:
        return LaunchIntent(
            run=self._scope.run,
            campaign=self._scope.campaign,
            # A node has the name of the installation that made the run, whoever asks now.
            install_id=registered_id(created) or self._scope.install_id,
            session=lease.session or "?",
            lease=lease.id,
            node_name=lease.node,
            node=node,
            deadline_utc_ns=lease.billing_from_utc_ns + lease.max_ns,
            run_dir=self._scope.run_dir,
        )

    # --- what the providers list

    async def _listed(self, out: Reconciled) -> None:
        state = await self._budget.state()
        names = {lease.provider for lease in state.leases.values()} | set(self._scope.providers)
        for name in sorted(names & set(self._providers)):
            provider = self._providers[name]
            try:
                listed = await provider.list_ours(self._scope.install_id)
            except ProviderError as error:
                out.findings.append(Finding("unreachable", name, f"provider {name} cannot list: {error}"))
                continue
            for handle in listed:
                finding = await self._one(provider, handle)
                if finding is not None:
                    out.findings.append(finding)

    async def _one(self, provider: Provider, handle: NodeHandle) -> Finding | None:
        state = await self._budget.state()
        for lease in state.leases.values():
            node = self._scope.nodes.get(lease.node)
            if lease.provider != provider.name or node is None:
                continue
            if provider.expected(self._intent(lease, node, state.created)).node_id == handle.node_id:
                if not lease.settled:
                    return None  # open: held by its supervisor, or dealt with above
                return await self._end(provider, handle, f"lease {lease.id} has ended in the ledger")
        elsewhere = self._elsewhere().get(handle.node_id)
        if elsewhere is not None:
            return Finding("held", handle.node_id, elsewhere)
        deadline = handle.data.get("deadline_utc_ns")
        if isinstance(deadline, int) and self._clock.utc_ns() > deadline + GRACE_NS:
            return await self._end(
                provider, handle, f"it carries our install id and its deadline {iso(deadline)} has passed"
            )
        until = iso(deadline) if isinstance(deadline, int) else "unknown"
        proof = await self._look(provider, handle)
        return Finding(
            "unknown",
            handle.node_id,
            f"it carries our install id, but no readable ledger knows it; deadline {until}: left alone",
            proof,
        )

    async def _end(self, provider: Provider, handle: NodeHandle, why: str) -> Finding:
        ended = await take_down(provider, handle, self._clock, SWEEP_TRIES, SWEEP_PAUSE_S)
        if ended.gone:
            return Finding("downed", handle.node_id, f"{why}: taken down, lost; {ended.how}")
        return Finding("unreachable", handle.node_id, f"{why}; {ended.how}", ended.by_hand)

    async def _look(self, provider: Provider, handle: NodeHandle) -> str:
        try:
            return (await provider.prove_down(handle)).check_by_hand
        except (ProviderError, LedgerError):
            return ""
