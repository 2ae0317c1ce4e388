"""Whole files or none: temporary file in the same folder, fsync, rename, fsync of the folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from campaign.errors import StoreError
from campaign.store.jsonl import describe

TEMP_SUFFIX: Final = ".tmp"
"""Temporary files are `.NAME.tmp`: no reader's glob and no dataset scan takes them for data."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into one StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StoreError(describe(error, path)) from error


def write(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one. Durable on return.

    One writer a path. Raises StoreError (disk full, read-only, ...); then the old file is untouched.
    """
    temp = path.with_name(f".{path.name}{TEMP_SUFFIX}")
    with writing(path):
        make_folder(path.parent)
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            temp.replace(path)
        except OSError:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, each durable. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, durably; missing is fine. Raises StoreError."""
    with writing(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals inside `folder` durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
