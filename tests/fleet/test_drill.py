"""The deterministic simulation: a thousand campaigns with new seeds, and proof that it can fail."""

import ast
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaign.budget import machine
from campaign.fleet import again, controller, reconcile, supervisor
from campaign.fleet import drive as product
from campaign.fleet.supervisor import Ended
from campaign.ledger.state import RunState
from campaign.testing import drill

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # a minute on two quiet cores
def test_a_thousand_new_campaigns_keep_every_promise() -> None:
    first = secrets.randbelow(2**40)
    totals = drill.run_many(range(first, first + 1000), workers=2)
    assert not totals.bad, [(o.seed, o.problems) for o in totals.bad]
    # It means nothing where nothing happened.
    assert totals.faults > 1000
    assert totals.crashes > 300
    assert totals.nodes > 1000
    assert totals.finished > 200
    assert totals.resumed > 100
    print(totals.line())


def test_a_seed_gives_the_same_campaign_again() -> None:
    for seed in (3, 17, 42):
        assert drill.run_seed(seed) == drill.run_seed(seed)


def test_a_session_is_continued_under_a_name_of_its_own() -> None:
    """A plan of an earlier life, taken up again, named one continuation twice: its rounds were numbered anew."""
    assert not drill.run_seed(7745).problems


def test_a_commit_that_comes_after_its_round_was_given_away_does_not_count_twice() -> None:
    """A node out of reach at a resume, whose round was drawn again, healed and told of the first."""
    assert not drill.run_seed(7000087).problems


def test_simulator_runs_the_controller_that_run_uses() -> None:
    """The classes are the product's own; Ray is not among what they need."""
    for name in ("Controller", "SupervisorPool", "BudgetController", "Ledger"):
        assert getattr(drill, name) is getattr(product, name)
    assert drill.Reconciler is reconcile.Reconciler
    tree = ast.parse(Path(drill.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        for alias in getattr(node, "names", [])
        if isinstance(node, ast.Import)
    } | {
        node.module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert "ray" not in imported


def broken(monkeypatch: pytest.MonkeyPatch, how: Callable[[pytest.MonkeyPatch], None]) -> drill.Totals:
    how(monkeypatch)
    return drill.run_many(range(150))


def no_down(patch: pytest.MonkeyPatch) -> None:
    """A `down` nobody makes sure of."""

    async def believe(*_: Any, **__: Any) -> Ended:
        return Ended(True, "believed", "")

    patch.setattr(supervisor, "take_down", believe)
    patch.setattr(reconcile, "take_down", believe)


def no_admission(patch: pytest.MonkeyPatch) -> None:
    """A cap nobody asks about."""
    patch.setattr(machine, "_over_cap", lambda *_: None)


def free_time(patch: pytest.MonkeyPatch) -> None:
    """Billing that starts when the node is up."""
    real = machine.settlement

    def late(lease: Any, until: int, reported: Any = None) -> Any:
        amount = real(lease, until, reported)
        return type(amount)(amount // 2)

    patch.setattr(machine, "settlement", late)


def unread(patch: pytest.MonkeyPatch) -> None:
    """A node that is ended with rows on it."""

    async def nothing(_: Any, __: Any, result: Any) -> Any:
        return result

    patch.setattr(supervisor.Supervisor, "_fetch", nothing)


def unsaved(patch: pytest.MonkeyPatch) -> None:
    """A reconcile that ends nodes without looking at what lies on them."""

    async def nothing(*_: Any) -> None:
        return

    patch.setattr(reconcile.Reconciler, "_save", nothing)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """A continuation that does again what is done."""
    real = again.continued

    def anew(plan: Any, state: Any, name: str) -> Any:
        return real(plan, RunState(), name) if real(plan, state, name) else None

    patch.setattr(again, "continued", anew)
    patch.setattr(controller, "continued", anew)


@pytest.mark.parametrize(
    ("how", "counted"),
    [
        (no_down, "leaked"),
        (no_admission, "over_cap"),
        (free_time, "over_cap"),
        (unread, "rows_lost"),
        (unsaved, "rows_lost"),
        (forgetful, "duplicated"),
    ],
)
def test_drill_finds_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, how: Callable[[pytest.MonkeyPatch], None], counted: str
) -> None:
    totals = broken(monkeypatch, how)
    assert getattr(totals, counted) > 0
    assert totals.bad
