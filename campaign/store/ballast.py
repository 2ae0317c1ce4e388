"""A few megabytes held in reserve: given back when the disk is full, so that a run can still settle."""

import contextlib
import errno
import os

from campaign.store.layout import RunDir

BYTES = 4 * 2**20
_FULL = ("disk is full", "No space left", "quota exceeded")


def take(run_dir: RunDir) -> None:
    """Write the reserve; real bytes, so that the file system has to keep them. Raises OSError."""
    with (run_dir.root / "ballast").open("wb") as file:
        file.write(os.urandom(BYTES))
        os.fsync(file.fileno())


def give_back(run_dir: RunDir, error: BaseException | None = None) -> bool:
    """Free the reserve if `error` came of a full disk (None: free it anyway). True if it was there."""
    if error is not None and not _full(error):
        return False
    with contextlib.suppress(OSError):
        (run_dir.root / "ballast").unlink()
        return True
    return False


def _full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return True
        if any(words in str(error) for words in _FULL):
            # sqlite, and errors that crossed a process, say so in words only.
            return True
        error = error.__cause__
    return False
