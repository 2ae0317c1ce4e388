"""`report.html` and `report.json` in the run folder, and the report on the terminal with their path."""

import os
from pathlib import Path

from rich.console import Console
from rich.text import Text

from campaign.errors import StoreError
from campaign.report import html, jsonview, terminal
from campaign.report.model import Report
from campaign.store.layout import RunDir


def publish(report: Report, run_dir: RunDir, console: Console) -> None:
    """(Re)write both files, print the report, and say where the page is.

    The files first: a reader of the output that goes away must not cost them. Where the folder cannot be
    written the report is printed all the same, and then StoreError is raised.
    """
    failed: StoreError | None = None
    try:
        write(report, run_dir)
    except StoreError as error:
        failed = error
    terminal.render(report, console)
    if failed is not None:
        raise failed
    console.print(Text(f"page    {shown(run_dir.report_html)}"), soft_wrap=True)


def write(report: Report, run_dir: RunDir) -> None:
    """(Re)write `report.html` and `report.json`, each whole or not at all. Raises StoreError."""
    write_page(report, run_dir.report_html)
    try:
        html.replace_text(run_dir.report_json, jsonview.dumps(report))
    except OSError as error:
        raise _cannot(run_dir.report_json, error) from error


def write_page(report: Report, path: Path) -> None:
    """Write the page alone. Raises StoreError."""
    try:
        html.write(report, path)
    except OSError as error:
        raise _cannot(path, error) from error


def shown(path: Path) -> str:
    """A path as the user would type it: relative where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _cannot(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write {path}: {error.strerror or error}. Fix: `campaign report --html PATH`")
