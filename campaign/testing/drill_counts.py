"""What random campaigns came to: one, and many together."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """What one campaign came to."""

    seed: int
    faults: int = 0
    crashes: int = 0
    nodes: int = 0
    leaked: int = 0
    over_cap: int = 0
    rows_lost: int = 0
    duplicated: int = 0
    unreachable: int = 0
    finished: bool = False
    added: int = 0
    """Additions that a held node took."""
    resumed: bool = False
    """To its end, after everything answered again."""
    ending: str = ""
    spent_micro: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether a promise was broken."""
        return bool(self.problems)


@dataclass(slots=True)
class Totals:
    """Many campaigns."""

    campaigns: int = 0
    faults: int = 0
    nodes: int = 0
    leaked: int = 0
    over_cap: int = 0
    rows_lost: int = 0
    duplicated: int = 0
    unreachable: int = 0
    crashes: int = 0
    finished: int = 0
    resumed: int = 0
    added: int = 0
    bad: list[Outcome] = field(default_factory=list)

    def add(self, out: Outcome) -> None:
        """Count one campaign."""
        self.campaigns += 1
        for name in (
            "faults",
            "nodes",
            "leaked",
            "over_cap",
            "rows_lost",
            "duplicated",
            "unreachable",
            "crashes",
        ):
            setattr(self, name, getattr(self, name) + getattr(out, name))
        self.finished += out.finished
        self.resumed += out.resumed
        self.added += out.added
        if out.bad:
            self.bad.append(out)

    def line(self) -> str:
        """The one line that says it."""
        return (
            f"drill: {self.campaigns} campaigns, {self.faults} faults, {self.nodes} nodes created, "
            f"{self.leaked} leaked, {self.over_cap} over cap, {self.rows_lost} rows lost, "
            f"{self.duplicated} duplicated ({self.unreachable} unreachable: still billed and alarmed)"
        )
