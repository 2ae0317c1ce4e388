"""A process that dies at a boundary of its own, and a database that knows when."""

import asyncio
import sqlite3
from dataclasses import dataclass, field
from typing import Any


class Crash(BaseException):
    """The controller's process ends here. Not an Exception: nothing of the product may catch it."""


@dataclass(slots=True)
class Process:
    """One life of the controller. Every boundary it crosses is counted; at `dies_at` it is dead."""

    dies_at: int | None
    crossed: int = 0
    dead: bool = False
    died: asyncio.Event = field(default_factory=asyncio.Event)

    def cross(self, _: str = "") -> None:
        """A boundary: a commit, or one end of a call. A dead process gets no further."""
        self.crossed += 1
        if self.dead or (self.dies_at is not None and self.crossed >= self.dies_at):
            self.dead = True
            self.died.set()
            raise Crash


class Database(sqlite3.Connection):
    """A connection whose owner may die right before or right after any commit."""

    process: Process | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run a statement; both sides of COMMIT are boundaries."""
        if sql != "COMMIT" or self.process is None:
            return super().execute(sql, parameters)
        self.process.cross()
        done = super().execute(sql, parameters)
        self.process.cross()
        return done
