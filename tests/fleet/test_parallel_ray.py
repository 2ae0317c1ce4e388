"""Two sessions at once, supervised by one actor, under one budget actor: the product's wiring with a simulated cloud."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from campaign.ledger.journal import read_events
from campaign.ledger.state import fold
from campaign.testing import drill

PROGRAM = Path(__file__).parents[1] / "support" / "parallel_ray.py"

pytestmark = pytest.mark.ray


def test_two_sessions_at_once_under_ray(tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(root)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    ending = json.loads(done.stdout.splitlines()[-1])
    assert ending["exit_code"] == 0, ending
    _, plan, _ = drill._template()
    state = fold(read_events(root / "ledger.db"))
    one, two = state.leases["s1.1"], state.leases["s2.1"]
    assert one.until_utc_ns is not None
    assert one.billing_from_utc_ns <= two.billing_from_utc_ns < one.until_utc_ns
    planned = {(s.name, r.id) for s in plan.sessions for g in s.groups for r in g.rounds}
    assert {k for k, r in state.rounds.items() if r.state == "committed"} == planned
    assert state.cap_usd is not None
    assert sum(le.settled_usd or 0 for le in state.leases.values()) <= state.cap_usd
