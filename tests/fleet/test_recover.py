"""Picking up a run: from ledgers, journals and files as a crash leaves them."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from campaign.errors import BudgetRefused, LedgerError, LedgerLocked, UserError
from campaign.fleet.create import create_run, read_prompts
from campaign.fleet.start import new_drive, rerun_drive, resumed_drive
from campaign.ledger.agent import AgentJournal
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState, fold
from campaign.money import micro
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import CampaignPlan, RoundPlan
from campaign.spec.load import Loaded, load
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.store.row import RequestRow
from campaign.store.run import open_run
from campaign.testing.clock import VirtualClock
from campaign.testing.conformance_store import make_row
from campaign.workloads.packs import load_all

ROOT = Path(__file__).parents[2]


class Left:
    """A run folder as a crash leaves it."""

    def __init__(self, tmp_path: Path, *sets: str) -> None:
        self.clock = VirtualClock()
        self.loaded: Loaded = load(ROOT / "experiments.yaml", sets)
        self.plan: CampaignPlan = build(self.loaded.spec, declared_prices(self.loaded.spec))
        prompts = load_all(self.loaded, ROOT)
        self.run_dir, created = create_run(self.loaded, self.plan, prompts, tmp_path / "results", self.clock)
        self.store = FolderStore(self.run_dir)
        self.journal = AgentJournal(self.run_dir.journals / "main.jsonl", "agent:main", self.clock)
        now = self.clock.utc_ns()
        intent = {
            "lease": "main.1", "node": "here", "provider": "local", "usd_per_hour_micro": micro("0.60"), "granularity_s": 1,
            "max_ns": 600_000_000_000, "worst_usd_micro": micro("0.10"), "teardown_reserve_usd_micro": 834,
            "billing_from_utc_ns": now, "deadline_utc_ns": now + 600_000_000_000,
        }  # fmt: skip
        with Ledger.open(self.run_dir, self.clock, create=True) as ledger:
            ledger.append(created, NewEvent("lease_intent", intent, "main"))

    def say(self, type_: str, **payload: object) -> None:
        self.journal.append(NewEvent(type_, payload, "main"))

    @property
    def rounds(self) -> list[tuple[str, RoundPlan]]:
        return [(g.name, r) for g in self.plan.sessions[0].groups for r in g.rounds]

    def measure(
        self, n: int, attempt: int = 0, *, commit: bool, seal: bool = True, validity: str | None = None
    ) -> None:
        """Do the n-th round of the plan, as far as told."""
        group, round_ = self.rounds[n]
        self.say("round_started", round_id=round_.id, attempt=attempt)
        cells = []
        for boot in round_.boots:
            cell = f"{group}/{boot.arm}/w/c1/b{boot.index}"
            writer = self.store.open_cell("main", cell, attempt)
            for request in round_.sequence:
                if request.arm == boot.arm:
                    row = replace(
                        make_row(), session="main", group=group, cell=cell, arm=boot.arm, boot_index=boot.index,
                        boot_attempt=attempt, round=round_.index, slot=request.slot, seed=request.seed, phase="measure",
                    )  # fmt: skip
                    writer.begin(
                        {
                            "phase": "measure",
                            "slot": row.slot,
                            "seed": row.seed,
                            "attempt": 0,
                            "round": row.round,
                        }
                    )
                    writer.finish(row)
            if seal:
                cells.append(
                    {
                        "cell": cell,
                        "attempt": attempt,
                        "files": [asdict(f) for f in writer.seal(validity)],
                    }  # type: ignore[arg-type]
                )
            writer.close()  # type: ignore[attr-defined]  # of the folder store
        if commit:
            self.say("round_committed", round_id=round_.id, attempt=attempt, cells=cells)
        elif validity == "void":
            self.say("round_voided", round_id=round_.id, attempt=attempt, reason="died")

    def done(self) -> None:
        self.journal.close()

    @property
    def state(self) -> RunState:
        return open_run(self.run_dir.root).state()

    def all_rows(self) -> list[RequestRow]:
        return open_run(self.run_dir.root).requests(valid_only=False).rows()


def test_committed_rounds_stay_and_a_half_done_one_is_superseded_and_planned_again(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.measure(0, commit=True)
    left.measure(1, commit=False, seal=False)
    left.done()
    (job,) = resumed_drive(left.run_dir, (), left.clock).jobs
    assert job.done == (left.rounds[0][1].id,)
    assert job.attempts == {left.rounds[1][1].id: 1}
    validity = {(r.group, r.round): r.validity for r in left.all_rows()}
    assert validity == {(left.rounds[0][0], 0): "valid", (left.rounds[1][0], 1): "superseded"}
    assert left.state.rounds["main", left.rounds[1][1].id].state == "superseded"


def test_cells_sealed_before_a_commit_that_never_came_are_superseded(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.measure(0, commit=False, seal=True)
    left.done()
    (job,) = resumed_drive(left.run_dir, (), left.clock).jobs
    assert job.attempts == {left.rounds[0][1].id: 1}
    assert {r.validity for r in left.all_rows()} == {"superseded"}


def test_void_rows_go_on_saying_why_they_were_lost(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.measure(0, commit=False, validity="void")
    left.done()
    resumed_drive(left.run_dir, (), left.clock)
    assert {r.validity for r in left.all_rows()} == {"void"}


def test_resuming_twice_changes_nothing_more(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.measure(0, commit=True)
    left.measure(1, commit=False, seal=False)
    left.done()
    first = resumed_drive(left.run_dir, (), left.clock).jobs
    events = len(open_run(left.run_dir.root).events())
    second = resumed_drive(left.run_dir, (), left.clock).jobs
    assert [(j.done, j.attempts) for j in first] == [(j.done, j.attempts) for j in second]
    assert len(open_run(left.run_dir.root).events()) == events


@pytest.mark.parametrize(("waited_s", "billed_s"), [(120, 120), (3600, 600)])
def test_abandoned_lease_bills_to_now_or_its_deadline(tmp_path: Path, waited_s: int, billed_s: int) -> None:
    left = Left(tmp_path)
    left.done()
    left.clock.advance(waited_s)
    resumed_drive(left.run_dir, (), left.clock)
    (lease,) = left.state.leases.values()
    assert lease.settled_usd == billed_s * micro("0.60") // 3600
    assert [m.phase for m in lease.marks] == ["lost"]


def test_run_that_died_after_its_last_round_is_finished(tmp_path: Path) -> None:
    left = Left(tmp_path)
    for n in range(len(left.rounds)):
        left.measure(n, commit=True)
    left.done()
    assert resumed_drive(left.run_dir, (), left.clock).jobs == []
    assert left.state.finished == {"exit_code": 0, "reason": "completed before it was resumed"}


def edit_plan(run_dir: RunDir) -> None:
    run_dir.plan.write_bytes(run_dir.plan.read_bytes() + b"\n")


def edit_canonical(run_dir: RunDir) -> None:
    data = json.loads(run_dir.canonical.read_bytes())
    data["anchor"]["drift_delta"] = 0.9
    run_dir.canonical.write_text(json.dumps(data))


def edit_prompts(run_dir: RunDir) -> None:
    path = run_dir.root / "workloads" / "copy.json"
    path.write_text(path.read_text().replace("the", "a"))


@pytest.mark.parametrize("edit", [edit_plan, edit_canonical, edit_prompts])
def test_what_was_registered_may_not_change(tmp_path: Path, edit: Callable[[RunDir], None]) -> None:
    left = Left(tmp_path)
    left.done()
    edit(left.run_dir)
    with pytest.raises(LedgerError, match="registered before the first request"):
        resumed_drive(left.run_dir, (), left.clock)


def test_journal_may_not_say_what_is_not_the_agents_to_say(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.say("lease_settled", lease="main.1", settled_usd_micro=0, until_utc_ns=0, proof="trust me")
    left.done()
    with pytest.raises(LedgerError, match="may not write lease_settled"):
        resumed_drive(left.run_dir, (), left.clock)


def test_overrides_of_an_earlier_resume_hold(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.done()
    with Ledger.open(left.run_dir, left.clock) as ledger:
        ledger.append(NewEvent("gate_overridden", {"gate": "anchor_drift", "reason": "r", "by": "me"}))
    (job,) = resumed_drive(left.run_dir, (), left.clock).jobs
    assert job.overrides == ("anchor_drift",)


def test_rerun_adds_a_session_once_and_its_plan_is_registered(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.done()
    (job,) = rerun_drive(left.run_dir, "kv", left.clock).jobs
    assert job.plan.name == "main-rerun1"
    assert [g.name for g in job.plan.groups if g.kind != "anchor"] == ["pair.kv"]
    plan = codec.load(left.run_dir.plan.read_bytes())
    assert [s.name for s in plan.sessions] == ["main", "main-rerun1"]
    assert left.state.plan_sha256 == codec.plan_hash(plan)
    assert {j.plan.name for j in resumed_drive(left.run_dir, (), left.clock).jobs} == {"main", "main-rerun1"}


def test_rerun_cut_between_plan_and_ledger_can_be_picked_up(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.done()
    rerun_drive(left.run_dir, "kv", left.clock)
    # As if the last rename had not happened.
    left.run_dir.plan.rename(left.run_dir.next_plan)
    left.run_dir.plan.write_bytes(codec.dump(left.plan))
    assert len(resumed_drive(left.run_dir, (), left.clock).jobs) == 2


def test_rerun_that_does_not_fit_the_cap_writes_nothing(tmp_path: Path) -> None:
    left = Left(tmp_path, "budget.cap_usd=0.15")
    left.done()
    left.clock.advance(500)
    before = left.run_dir.plan.read_bytes()
    with pytest.raises(BudgetRefused, match="asked for"):
        rerun_drive(left.run_dir, "depth", left.clock)
    assert left.run_dir.plan.read_bytes() == before
    assert "sessions_added" not in {e.type for e in open_run(left.run_dir.root).events()}


def test_rerun_of_what_is_not_there_names_what_is(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.done()
    with pytest.raises(UserError, match="aa, depth, kv"):
        rerun_drive(left.run_dir, "nothing", left.clock)


def test_live_controller_is_not_disturbed(tmp_path: Path) -> None:
    left = Left(tmp_path)
    left.done()
    with Ledger.open(left.run_dir, left.clock), pytest.raises(LedgerLocked, match="held by pid"):
        resumed_drive(left.run_dir, (), left.clock)


def test_new_run_pins_its_prompts_and_reads_the_same_ones_back(tmp_path: Path) -> None:
    loaded = load(ROOT / "experiments.yaml")
    plan = build(loaded.spec, declared_prices(loaded.spec))
    drive = new_drive(loaded, plan, ROOT, tmp_path / "results", [])
    assert read_prompts(drive.run_dir) == load_all(loaded, ROOT)
    assert fold([]).created is None
    assert drive.opening[0].payload["workloads_sha256"].keys() == loaded.spec.workloads.keys()


def test_tokens_that_were_paid_for_are_settled_after_a_crash(tmp_path: Path) -> None:
    settled = []
    for name, tokens in (("none", 0), ("some", 123_456)):
        left = Left(tmp_path / name)
        left.measure(0, commit=True)
        if tokens:
            left.say("tokens_billed", lease="main.1", usd_micro=tokens, prompt_tokens=9, completion_tokens=9)
        left.done()
        resumed_drive(left.run_dir, (), left.clock)
        settled.append(left.state.leases["main.1"].settled_usd or 0)
    assert settled[1] - settled[0] == 123_456
