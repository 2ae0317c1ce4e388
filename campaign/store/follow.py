"""What a node ships, turned back into the files of a run folder: the reading half of `campaign.store.ship`.

Reading twice changes nothing, so a controller that comes back begins at the first commit. A node may write into the
folders that are a node's to write, and into no journal but its own.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from campaign.errors import StoreError, StoreUnreachable
from campaign.store import atomic
from campaign.store.objects import ObjectStore, digest
from campaign.store.ship import FOLDERS, data_key, log_key


class Follower:
    """One lease's commits, applied to a run folder in order."""

    def __init__(self, remote: ObjectStore, root: Path, journal: str) -> None:
        # `journal`: the name of the one file under journal/ that this lease may write.
        self._remote, self._root, self._journal = remote, root, journal
        self.number = 0
        """Commits applied."""
        self.final = False
        """Whether the node has said that nothing will be added."""

    def poll(self) -> bool:
        """Apply the next commit; whether there was one.

        Raises StoreUnreachable (ask again), or StoreError for what is damaged or not the node's to write.
        """
        data = self._remote.get(log_key(self.number + 1))
        if data is None:
            return False
        commit = _commit(data, self.number + 1)
        # Files before journals: what a journal names is here when it is read.
        for file in commit["files"]:
            self._file(self._inside(file["path"]), str(file["sha256"]))
        for tail in commit["tails"]:
            self._tail(self._inside(tail["path"]), int(tail["from"]), int(tail["size"]), str(tail["sha256"]))
        for name in commit["gone"]:
            atomic.remove(self._inside(name))
        self.number, self.final = self.number + 1, bool(commit["final"])
        return True

    def _file(self, path: Path, sha256: str) -> None:
        if not path.is_file() or digest(path.read_bytes()) != sha256:
            atomic.write(path, self._data(sha256))

    def _tail(self, path: Path, start: int, size: int, sha256: str) -> None:
        there = path.read_bytes() if path.is_file() else b""
        if len(there) >= start + size and digest(there[start : start + size]) == sha256:
            return
        data = self._data(sha256)
        if start < len(there) and data.startswith(there[start:]):
            # Ours, cut short: a controller that was killed, or a disk that was full, in the middle of an append.
            data, there = data[len(there) - start :], there[:start]
        if len(there) != start and path.is_relative_to(self._root / "journal" / "cells"):
            # Sealed and removed here before, and read again from the start: it goes again with its own `gone`.
            there = there[:start]
        if len(there) != start:
            raise StoreError(
                f"{path} has {len(there)} bytes; the node goes on at {start}: somebody else wrote it"
            )
        with atomic.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                out.write(data)

    def _data(self, sha256: str) -> bytes:
        data = self._remote.get(data_key(sha256))
        if data is None or digest(data) != sha256:
            # Put before its commit; a store that was emptied is being filled again.
            raise StoreUnreachable(f"{data_key(sha256)} is not there yet")
        return data

    def _inside(self, name: object) -> Path:
        parts = PurePosixPath(str(name)).parts
        good = len(parts) > 1 and parts[0] in FOLDERS and ".." not in parts and "\x00" not in str(name)
        if good and parts[0] == "journal":
            good = parts[1] == "cells" or parts[1:] == (self._journal,)
        path = self._root.joinpath(*parts)
        if not good or not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise StoreError(f"the node names a file that is not its to write: {name!r}")
        return path


def _commit(data: bytes, number: int) -> dict[str, Any]:
    try:
        commit: dict[str, Any] = json.loads(data)
        good = commit["n"] == number and all(isinstance(commit[k], list) for k in ("tails", "files", "gone"))
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise StoreError(f"{log_key(number)} is not a commit")
    return commit
