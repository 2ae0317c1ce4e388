"""What a node writes, as numbered commits of immutable objects: the sending half. `campaign.store.follow` reads them.

    data/SHA256          a whole file, or whole lines that were added to a growing one
    log/NNNNNNNN.json    commit N: which of them belong where

A commit is put after all that it names, so who sees commit N sees its data. Commits are made in a spool on the node's
own disk first and copied from there: a store that lost everything is filled again, under the same numbers.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from campaign.errors import StoreError
from campaign.store.objects import FolderObjects, ObjectStore, digest

FOLDERS: Final = ("journal", "rows", "chunks", "text", "provenance", "telemetry", "logs")
"""What of a run folder a node may write."""
GROWING: Final = frozenset({".jsonl", ".log", ".txt"})
"""Files that are only ever added to; all others are whole, or replaced as a whole."""
MOST: Final = 4 << 20
"""Bytes of one growing file in one commit."""


def log_key(number: int) -> str:
    """Where commit `number` is."""
    return f"log/{number:08}.json"


def data_key(sha256: str) -> str:
    """Where the bytes with this hash are."""
    return f"data/{sha256}"


@dataclass(slots=True)
class _Seen:
    """A whole file as it was when it was spooled."""

    sha256: str
    stat: tuple[int, int, int] | None = None


class Shipper:
    """One lease's run folder on its way into an object store. Not thread-safe: one step at a time."""

    def __init__(self, root: Path, spool: FolderObjects, remote: ObjectStore) -> None:
        self._root, self._spool, self._remote = root, spool, remote
        self._tails: dict[str, int] = {}
        self._whole: dict[str, _Seen] = {}
        self.number = 0
        """Commits in the spool."""
        self.sent = 0
        """Commits that are in the store, as far as is known."""
        self._part: list[str] = []
        """Keys of the commit under way that are in the store: a line that is cut again and again gets through."""
        self.losses = 0
        """Times the store had lost what it had."""
        while (data := spool.get(log_key(self.number + 1))) is not None:
            self._learn(json.loads(data))

    def _learn(self, commit: dict[str, Any]) -> None:
        self.number = commit["n"]
        for tail in commit["tails"]:
            self._tails[tail["path"]] = tail["from"] + tail["size"]
        for file in commit["files"]:
            self._whole[file["path"]] = _Seen(file["sha256"])
        for path in commit["gone"]:
            self._tails.pop(path, None)

    # --- node -> spool

    def collect(self, *, final: bool = False) -> bool:
        """Spool what is new; whether there was anything. `final`: nothing will be added any more.

        Journals are read before files are looked for: a file is sealed before the journal names it.
        """
        tails = list(self._new_tails(final=final))
        gone = sorted(path for path in self._tails if not (self._root / path).is_file())
        files = list(self._new_files())
        if not (tails or gone or files or final):
            return False
        commit: dict[str, Any] = {
            "n": self.number + 1,
            "tails": tails,
            "files": files,
            "gone": gone,
            "final": final,
        }
        self._spool.put(log_key(commit["n"]), json.dumps(commit, sort_keys=True).encode())
        self._learn(commit)
        return True

    def _paths(self, *, growing: bool) -> Iterator[tuple[str, Path]]:
        for folder in FOLDERS:
            for path in sorted((self._root / folder).rglob("*")):
                usual = not path.name.startswith(".") and not path.name.endswith((".tmp", ".part"))
                if usual and (path.suffix in GROWING) is growing and path.is_file() and not path.is_symlink():
                    yield path.relative_to(self._root).as_posix(), path

    def _new_tails(self, *, final: bool) -> Iterator[dict[str, Any]]:
        # Cell journals before the agent's own: what it says of a round comes after what was measured in it.
        for name, path in sorted(
            self._paths(growing=True), key=lambda p: (not p[0].startswith("journal/cells/"), p[0])
        ):
            start = self._tails.get(name, 0)
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read(MOST)
            except FileNotFoundError:
                continue  # sealed in this moment
            whole = data if final and path.suffix != ".jsonl" else data[: data.rfind(b"\n") + 1]
            if not whole and len(data) == MOST:
                whole = data  # one line longer than that: it is put together at the other end
            if whole:
                sha256 = digest(whole)
                self._spool.put(data_key(sha256), whole)
                yield {"path": name, "from": start, "size": len(whole), "sha256": sha256}

    def _new_files(self) -> Iterator[dict[str, Any]]:
        for name, path in self._paths(growing=False):
            try:
                stat = path.stat()
                mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                seen = self._whole.get(name)
                if seen is not None and seen.stat == mark:
                    continue
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            sha256 = digest(data)
            if seen is None or seen.sha256 != sha256:
                self._spool.link(data_key(sha256), path, data)
                yield {"path": name, "size": len(data), "sha256": sha256}
            self._whole[name] = _Seen(sha256, mark)

    # --- spool -> store

    def push(self, *, whole: bool = False) -> int:
        """Copy commits that are not in the store yet, in order; how many. Raises StoreUnreachable.

        Where the last object that was sent is gone, all go again. `whole`: look for every single object.
        """
        newest = self._part[-1] if self._part else log_key(self.sent) if self.sent else None
        if newest is not None and not self._remote.has(newest):
            self.sent, self.losses = 0, self.losses + 1
            self._part.clear()
        if whole:
            self._part.clear()
            there = set(self._remote.keys())
            lost = [n for n in range(1, self.sent + 1) if not set(self._keys(n)) <= there]
            if lost:
                self.sent, self.losses = min(lost) - 1, self.losses + 1
        before = self.sent
        while self.sent < self.number:
            for key in self._keys(self.sent + 1):
                if key in self._part:
                    continue
                data = self._spool.get(key)
                if data is None:
                    raise StoreError(f"the spool has lost {key}")
                self._remote.put(key, data)
                self._part.append(key)
            self.sent += 1
            self._part.clear()
        return self.sent - before

    def _keys(self, number: int) -> list[str]:
        """What commit `number` consists of, itself last."""
        data = self._spool.get(log_key(number))
        if data is None:
            raise StoreError(f"the spool has lost commit {number}")
        commit = json.loads(data)
        parts = [data_key(part["sha256"]) for part in (*commit["tails"], *commit["files"])]
        return [*dict.fromkeys(parts), log_key(number)]
