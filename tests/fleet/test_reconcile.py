"""Reconcile: what it ends, what it reports, what it never touches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign.clock import Clock
from campaign.cloud import naming
from campaign.fleet.budget import BudgetController
from campaign.fleet.reconcile import Finding, Reconciled, Reconciler, Scope
from campaign.fleet.sweep import known_nodes
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.money import MicroUsd, bill, micro
from campaign.store.layout import RunDir
from campaign.testing import drill
from campaign.testing.clock import VirtualClock
from campaign.testing.cloud import SimCloud, SimulatedProvider

HOUR_NS = 3600 * 10**9


class Rig:
    """A ledger in memory with one lease, and a cloud."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.spec, self.plan, _ = drill._template()
        self.cloud = SimCloud(self.clock)
        self.db = drill.sqlite3.connect(":memory:", factory=drill.Database, isolation_level=None)
        self.ledger = Ledger.over(self.db, self.clock)
        self.ledger.append(
            NewEvent(
                "run_created",
                {
                    "run": "r", "campaign": "c", "spec_sha256": "", "canonical_sha256": "", "plan_sha256": "",
                    "cap_usd_micro": micro(100), "gates": {}, "rules": {}, "version": "0",
                    "install_id": drill.INSTALL, "simulated": True,
                },
            )
        )  # fmt: skip
        self.budget = BudgetController(self.ledger, self.clock, self.spec)
        self.provider = SimulatedProvider(self.cloud, drill.limits(self.spec))
        self.scope = Scope("r", "c", drill.INSTALL, "", self.spec.nodes, ("sky",))

    async def lease(self, session: str = "s1") -> str:
        quote = await self.provider.quote(self.spec.nodes["n1"])
        grant = await self.budget.admit_lease(
            session=session, node="n1", provider="sky", quote=quote, max_ns=HOUR_NS // 2
        )
        return grant.lease  # type: ignore[union-attr]  # admitted: the cap is large

    async def launch(self, lease: str) -> str:
        held = (await self.budget.state()).leases[lease]
        intent = Reconciler(self.budget, {}, self.scope, self.clock)._intent(held, self.spec.nodes["n1"])
        return (await self.provider.launch(intent)).node_id

    async def reconcile(self, **more: Any) -> Reconciled:
        return await Reconciler(self.budget, {"sky": self.provider}, self.scope, self.clock, **more).run()


def whats(found: Reconciled) -> list[str]:
    return [f.what for f in found.findings]


@pytest.fixture
async def rig() -> Any:
    it = Rig()
    yield it
    await it.cloud.close()
    it.db.close()


async def test_lease_of_a_dead_controller_is_ended_and_billed_to_the_proof(rig: Rig) -> None:
    lease = await rig.lease()
    node = await rig.launch(lease)
    await rig.clock.sleep(600)
    found = await rig.reconcile()
    assert whats(found) == ["settled"]
    held = (await rig.budget.state()).leases[lease]
    assert held.settled_usd is not None
    assert held.settled_usd >= rig.cloud.cost(rig.cloud.nodes[node])
    assert rig.cloud.nodes[node].ended_by == "down"
    assert await rig.reconcile() == Reconciled()  # the second time there is nothing to do


async def test_intent_without_a_node_is_settled_too(rig: Rig) -> None:
    lease = await rig.lease()
    found = await rig.reconcile()
    assert whats(found) == ["settled"]
    assert (await rig.budget.state()).leases[lease].settled


async def test_lease_that_a_supervisor_holds_is_left_to_it(rig: Rig) -> None:
    lease = await rig.lease()
    node = await rig.launch(lease)
    assert await rig.reconcile(active=lambda: frozenset({"s1"})) == Reconciled()
    assert rig.cloud.nodes[node].ended_utc_ns is None
    assert not (await rig.budget.state()).leases[lease].settled


async def test_unreachable_node_bills_on_and_says_what_to_check(rig: Rig) -> None:
    lease = await rig.lease()
    node = await rig.launch(lease)
    rig.cloud.nodes[node].unreachable = True
    found = await rig.reconcile()
    (alarm,) = found.alarms
    assert alarm.what == "unreachable"
    assert node in alarm.check_by_hand
    money = await rig.budget.money()
    await rig.clock.sleep(60)
    later = await rig.budget.money()
    assert later.unreachable > money.unreachable > 0
    rig.cloud.nodes[node].unreachable = False
    assert whats(await rig.reconcile()) == ["settled"]
    assert (await rig.budget.state()).leases[lease].settled


async def test_node_the_ledger_says_has_ended_is_ended(rig: Rig) -> None:
    lease = await rig.lease()
    node = await rig.launch(lease)
    await rig.budget.settle(lease, rig.clock.utc_ns(), "down returned, and was believed")
    found = await rig.reconcile()
    assert whats(found) == ["downed"]
    assert rig.cloud.nodes[node].ended_utc_ns is not None


async def test_our_node_of_no_readable_ledger_is_reported_until_its_deadline_is_over(rig: Rig) -> None:
    deadline = rig.clock.utc_ns() + HOUR_NS
    name = naming.node_name(drill.INSTALL, "another-run", "s.1", deadline)
    node = rig.cloud.foreign(name, drill.INSTALL)
    first = await rig.reconcile()
    assert whats(first) == ["unknown"]
    assert first.alarms
    assert node.ended_utc_ns is None
    await rig.clock.sleep(3600 + 180)
    assert whats(await rig.reconcile()) == ["downed"]
    assert node.ended_utc_ns is not None


async def test_node_of_another_readable_ledger_is_held(rig: Rig) -> None:
    name = naming.node_name(drill.INSTALL, "another-run", "s.1", rig.clock.utc_ns())
    node = rig.cloud.foreign(name, drill.INSTALL)
    await rig.clock.sleep(3600)
    found = await rig.reconcile(known_elsewhere=lambda: {name: "open in its own ledger"})
    assert whats(found) == ["held"]
    assert not found.alarms
    assert node.ended_utc_ns is None


async def test_look_alikes_and_a_colleagues_cluster_survive_every_reconcile(rig: Rig) -> None:
    past = rig.clock.utc_ns() - HOUR_NS
    ours = naming.node_name(drill.INSTALL, "run", "s.1", past)
    others = [
        rig.cloud.foreign(ours, "ffffffffffff"),  # our name, but its label says another install
        rig.cloud.foreign(ours + "-2", drill.INSTALL),
        rig.cloud.foreign("x" + ours, drill.INSTALL),
        rig.cloud.foreign(naming.node_name("ffffffffffff", "run", "s.1", past), "ffffffffffff"),
        rig.cloud.foreign("alice-training", "ffffffffffff"),
    ]
    for _ in range(3):
        assert await rig.reconcile() == Reconciled()
        await rig.clock.sleep(7200)
    assert all(node.ended_utc_ns is None for node in others)


async def test_provider_that_cannot_list_is_an_alarm(rig: Rig) -> None:
    rig.cloud.reachable = False
    found = await rig.reconcile()
    assert whats(found) == ["unreachable"]


async def test_rows_are_brought_before_the_node_is_ended(rig: Rig) -> None:
    lease = await rig.lease()
    node = rig.cloud.nodes[await rig.launch(lease)]
    node.disk["rows/a.parquet"] = 3
    payload = {"lease": lease, "plan_sha256": None}
    node.journal.append(NewEvent("session_started", payload, "s1", "agent:s1", 1))
    await rig.reconcile()
    assert rig.provider.store == {"rows/a.parquet": 3}
    assert (await rig.budget.state()).sessions["s1"].lease == lease


def test_findings_that_need_a_person() -> None:
    words = {w: Finding(w, "n", "").alarming for w in ("settled", "downed", "held", "unreachable", "unknown")}
    assert words == {"settled": False, "downed": False, "held": False, "unreachable": True, "unknown": True}
    assert replace(Finding("held", "n", "x"), what="unknown").alarming
    assert isinstance(VirtualClock(), Clock)


async def test_node_is_ended_where_its_rows_cannot_be_written_here(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await rig.lease()
    node = rig.cloud.nodes[await rig.launch(lease)]

    async def fetch(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.provider, "fetch", fetch)
    assert whats(await rig.reconcile()) == ["settled"]
    assert node.ended_by == "down"


async def test_node_is_found_from_another_account_too(rig: Rig) -> None:
    """Its name carries the installation that made the run: asked under another one, nothing would be listed."""
    lease = await rig.lease()
    node = rig.cloud.nodes[await rig.launch(lease)]
    rig.scope = replace(rig.scope, install_id="f" * 12)
    assert whats(await rig.reconcile()) == ["settled"]
    assert node.ended_by == "down"


async def test_launch_without_an_answer_costs_the_most_it_may(rig: Rig) -> None:
    lease = await rig.lease()
    await rig.launch(lease)
    held, now = (await rig.budget.state()).leases[lease], rig.clock.utc_ns()
    assert (held.usd_per_hour, held.max_usd_per_hour) == (micro(24), micro(30))
    settled = await rig.budget.settle(lease, now, "proof")
    assert settled.usd == bill(micro(30), now - held.billing_from_utc_ns) > 0


async def test_reserve_of_a_node_without_a_readable_price_is_not_made_smaller(rig: Rig) -> None:
    lease = await rig.lease()
    before = (await rig.budget.state()).leases[lease]
    node = rig.spec.nodes["n1"]
    handle = rig.provider.expected(Reconciler(rig.budget, {}, rig.scope, rig.clock)._intent(before, node))
    trips = await rig.budget.lease_opened(lease, replace(handle, usd_per_hour=MicroUsd(-1)))
    assert "price" in {t.gate for t in trips}
    after = (await rig.budget.state()).leases[lease]
    assert (after.worst_usd, after.usd_per_hour) == (before.worst_usd, None)


async def test_nodes_other_ledgers_know_have_the_names_of_who_made_them(tmp_path: Path) -> None:
    rig, run_dir = Rig(), RunDir(tmp_path / "r")
    ledger = Ledger.open(run_dir, rig.clock, create=True)
    (created, *_) = rig.ledger.events()
    ledger.append(NewEvent("run_created", created.payload))
    rig.budget = BudgetController(ledger, rig.clock, rig.spec)
    id_ = await rig.lease()
    lease = (await rig.budget.state()).leases[id_]
    await rig.budget.close()
    rig.db.close()
    name = naming.node_name(drill.INSTALL, "r", lease.id, lease.billing_from_utc_ns + lease.max_ns)
    assert list(known_nodes([run_dir], "f" * 12)) == [name]
