"""Immutable objects under keys: what a node writes as it measures, and the controller follows.

An object is put once and never changed. Putting the same bytes again changes nothing, so a put whose answer was lost
may be repeated; putting other bytes under a key that is taken is refused. What comes over a network is checked against
the hash it was written with. One conformance suite runs against every implementation (campaign.testing.conformance_objects).
"""

import contextlib
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import parse_qs, urlsplit

from campaign.errors import StoreError, UserError
from campaign.store import atomic

_KEY = re.compile(r"[A-Za-z0-9_.=~@-]+(/[A-Za-z0-9_.=~@-]+)*")


@runtime_checkable
class ObjectStore(Protocol):
    """Objects of one run's lease. Raises StoreUnreachable where asking again later may help, else StoreError."""

    def put(self, key: str, data: bytes) -> None:
        """Durable on return. Raises StoreError where the key holds other bytes."""
        ...

    def get(self, key: str) -> bytes | None:
        """The bytes, checked against their hash; None where there is no such object."""
        ...

    def has(self, key: str) -> bool:
        """Whether the object is there."""
        ...

    def keys(self, prefix: str = "") -> list[str]:
        """Every key that begins with `prefix`, sorted."""
        ...


def digest(data: bytes) -> str:
    """SHA-256, hex."""
    return hashlib.sha256(data).hexdigest()


def checked(key: str) -> str:
    """The key, if it is one. Raises StoreError for what could leave the store or means something to a server."""
    if not _KEY.fullmatch(key) or any(part in {".", ".."} for part in key.split("/")):
        raise StoreError(f"not a key: {key!r}")
    return key


def taken(key: str) -> StoreError:
    """The refusal to change an object."""
    return StoreError(f"{key} is taken by other contents: an object is never changed")


class FolderObjects:
    """Objects as files under one folder. Files on a disk of ours are not hashed again when they are read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key: str, data: bytes) -> None:
        path = self.root / checked(key)
        with atomic.writing(path):
            atomic.make_folder(path.parent)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=atomic.TEMP_SUFFIX) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                self._take(Path(file.name), path)
        if self.get(key) != data:
            raise taken(key)

    def link(self, key: str, file: Path, data: bytes) -> None:
        """As `put`, without a second copy where the file system can share one. The file must never change."""
        path = self.root / checked(key)
        try:
            with atomic.writing(path):
                atomic.make_folder(path.parent)
                self._take(file, path)
        except StoreError:
            self.put(key, data)

    @staticmethod
    def _take(file: Path, path: Path) -> None:
        """Give a whole file its name, unless the name is taken: of many that try, one wins."""
        with contextlib.suppress(FileExistsError):
            os.link(file, path)
            atomic.sync_folder(path.parent)

    def get(self, key: str) -> bytes | None:
        path = self.root / checked(key)
        with atomic.writing(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def has(self, key: str) -> bool:
        return (self.root / checked(key)).is_file()

    def keys(self, prefix: str = "") -> list[str]:
        paths = (p for p in self.root.rglob("*") if p.is_file() and not p.name.startswith("."))
        return sorted(key for p in paths if (key := p.relative_to(self.root).as_posix()).startswith(prefix))


@dataclass(frozen=True, slots=True)
class Address:
    """`s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, taken apart."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    """None: what the environment says (AWS_ENDPOINT_URL_S3), or AWS itself."""
    region: str | None = None


def address(store: str) -> Address | None:
    """The bucket a spec's `store:` names; None for a folder. Raises UserError for an address that is none."""
    if "://" not in store:
        return None
    parts = urlsplit(store)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(set(query) - {"endpoint", "region"})
    wrong = None
    if parts.scheme != "s3":
        wrong = f"{parts.scheme}:// is not a store"
    elif not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc):
        wrong = f"{parts.netloc!r} is not a bucket's name (no user, no password, no port belongs there)"
    elif unknown:
        wrong = f"unknown: {', '.join(unknown)}"
    elif "endpoint" in query and urlsplit(query["endpoint"]).scheme not in {"http", "https"}:
        wrong = f"endpoint {query['endpoint']!r} is not an http(s) address"
    elif urlsplit(query.get("endpoint", "")).username is not None:
        wrong = "an endpoint carries no credential: this file is stored with the run"
    prefix = parts.path.strip("/")
    if wrong is None and prefix:
        with contextlib.suppress(StoreError):
            prefix = checked(prefix)
            return Address(parts.netloc, prefix, query.get("endpoint"), query.get("region"))
        wrong = f"{prefix!r} is not a prefix"
    if wrong is not None:
        raise UserError(f"store = {store}: {wrong}. Fix: store: results/ or store: s3://bucket/prefix")
    return Address(parts.netloc, prefix, query.get("endpoint"), query.get("region"))


def open_objects(store: str, run: str, lease: str) -> ObjectStore | None:
    """The objects of one lease in the bucket that `store:` names; None where it names a folder."""
    found = address(store)
    if found is None:
        return None
    from campaign.store.s3 import S3Objects

    where = "/".join(part for part in (found.prefix, run, lease.replace("/", "~")) if part)
    return S3Objects(found, where)
