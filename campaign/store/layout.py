"""Where everything of a run lives, and how a run is found."""

from dataclasses import dataclass
from pathlib import Path

from campaign.errors import RunNotFound


def flat(name: str) -> str:
    """A name as one path component: `/` becomes `~`. Raises ValueError for what could leave the folder."""
    if name in {"", ".", ".."} or "\x00" in name or "\\" in name:
        raise ValueError(f"not a usable name: {name!r}")
    return name.replace("/", "~")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run folder."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def canonical(self) -> Path:
        return self.root / "canonical.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def next_plan(self) -> Path:
        """A plan with one session more, until the ledger has its hash."""
        return self.root / "plan.next.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.db"

    @property
    def lock(self) -> Path:
        return self.root / "run.lock"

    @property
    def stop_file(self) -> Path:
        """`campaign stop` writes it; the controller polls it."""
        return self.root / "stop.json"

    @property
    def journals(self) -> Path:
        return self.root / "journal"

    @property
    def cell_journals(self) -> Path:
        return self.root / "journal" / "cells"

    @property
    def rows(self) -> Path:
        return self.root / "rows"

    @property
    def chunks(self) -> Path:
        return self.root / "chunks"

    @property
    def text(self) -> Path:
        return self.root / "text"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance"

    @property
    def telemetry(self) -> Path:
        return self.root / "telemetry"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"


def find_run(name: str | None, results: Path = Path("results")) -> RunDir:
    """The run called `name` (a folder or a name under `results`), or the newest. Raises RunNotFound."""
    if name is not None:
        for folder in (Path(name), results / name):
            if (folder / "ledger.db").is_file():
                return RunDir(folder.resolve())
        raise RunNotFound(f"no run {name!r} under {results}/. Fix: `ls {results}` shows the runs there are")
    runs = [p.parent for p in results.glob("*/ledger.db")]
    if not runs:
        raise RunNotFound(f"no run under {results}/. Fix: start one with `campaign run experiments.yaml`")
    return RunDir(max(runs, key=lambda p: ((p / "canonical.json").stat().st_mtime, p.name)).resolve())
