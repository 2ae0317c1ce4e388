"""What the verbs that drive a campaign share: show it, report it, and exit with what it means."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from campaign.errors import UserError
from campaign.fleet.controller import Ending
from campaign.fleet.drive import Drive, drive_run
from campaign.ledger.events import NewEvent
from campaign.spec.models import FailOn, Spec

if TYPE_CHECKING:
    from rich.console import Console

    from campaign.analysis.model import Verdict


def overrides(gates: Sequence[str], reason: str | None) -> list[NewEvent]:
    """Override events. An unknown gate, or one without a reason, is refused."""
    from campaign.budget.machine import GATES

    if gates and not reason:
        raise UserError('--override needs --reason "TEXT": it is printed beside every verdict it touches')
    for gate in gates:
        if gate not in GATES:
            raise UserError(f"--override {gate}: no such gate. Fix: one of {', '.join(GATES)}")
    return [
        NewEvent("gate_overridden", {"gate": gate, "reason": reason, "by": "command line"}) for gate in gates
    ]


def hold_seconds(text: str | None) -> float:
    """`30m` in seconds; none is 0. Raises UserError."""
    import re

    units = {"s": 1, "m": 60, "h": 3600}
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text or "0s")
    if found is None:
        raise UserError(f"--hold {text}: not a time. Fix: a number and s, m or h, e.g. --hold 30m")
    return float(found[1]) * units[found[2]]


def results_folder(spec: Spec, file: Path) -> Path:
    """Where runs are kept here: the store of a spec, or results/ where its nodes write into a bucket first."""
    from campaign.store.objects import address

    try:
        return Path(spec.store) if address(spec.store) is None else Path("results")
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def drive_and_report(drive: Drive, console: "Console", *, as_json: bool) -> NoReturn:
    """Run to the end, print what it found, exit with its code."""
    from campaign.report.live import LiveDisplay

    # What `campaign resume` finds: a name under results/, or the folder.
    root = drive.run_dir.root
    name = root.name if root.parent == Path("results").resolve() else str(root)
    if drive.jobs:
        with LiveDisplay(console) as live:
            ending = asyncio.run(drive_run(drive, live.update))
    else:
        ending = Ending(0, "", ())
        console.print(f"{name} is complete: nothing is left to do", soft_wrap=True)
    try:
        tripped = _report(drive, console, as_json=as_json)
    except SystemExit:
        # rich's way to say that nobody reads any more: the run ended as it ended.
        sys.exit(ending.exit_code)
    if ending.exit_code:
        console.print(f"stopped: {ending.reason}", style="bold", markup=False, soft_wrap=True)
        if ending.exit_code != 2:
            console.print(f"go on with: campaign resume {name}", markup=False, soft_wrap=True)
        sys.exit(ending.exit_code)
    for line in tripped:
        console.print(f"fail_on: {line}", style="bold", markup=False, soft_wrap=True)
    sys.exit(1 if tripped else 0)


def _report(drive: Drive, console: "Console", *, as_json: bool) -> list[str]:
    """Write report.html and report.json, print the report; what `fail_on` says of it."""
    import click

    from campaign.report import files, jsonview
    from campaign.report.assemble import assemble
    from campaign.store.run import open_run

    report = assemble(open_run(str(drive.run_dir.root)))
    if as_json:
        files.write(report, drive.run_dir)
        click.echo(jsonview.dumps(report), nl=False)
    else:
        files.publish(report, drive.run_dir, console)
    return failures(drive.spec.fail_on, report.primary)


def failures(rule: FailOn, verdicts: Sequence["Verdict"]) -> list[str]:
    """What of the primary verdicts `fail_on` does not accept, one line each."""
    found = []
    for v in verdicts:
        if "exploratory" in v.reasons:
            continue  # nothing of it was registered
        if rule.slower is not None and v.verdict == "slower" and v.ratio is not None:
            # The loss, whichever way the metric points: a rate falls, a time grows.
            loss = 1 / v.ratio - 1 if v.metric == "decode_tok_s" else v.ratio - 1
            if loss > rule.slower:
                found.append(f"{v.pair}: {v.metric} is {loss:.1%} slower (limit {rule.slower:.1%})")
        if rule.invalid and v.verdict == "invalid":
            found.append(f"{v.pair}: invalid ({', '.join(v.reasons)})")
        if rule.unresolved and v.verdict == "unresolved":
            found.append(f"{v.pair}: unresolved ({', '.join(v.reasons)})")
    return found
