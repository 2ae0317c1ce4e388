"""Weights on the node before the first anchor: found, fetched from a mirror, and hashed whole where the spec asks.

A mirror is a folder that is there (a mounted volume, a cache of the hub) or a bucket, which is copied once into
`$XDG_CACHE_HOME/campaign/models`. A hub model without a mirror is left to the engine, which fetches its revision.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from campaign.engines import weights
from campaign.errors import PreflightError
from campaign.spec.models import Model

_GIB = 2**30
_DONE = "campaign-model.txt"
_SHA256 = re.compile(r"[0-9a-f]{64}")
Say = Callable[[str], None]
"""Called with what is being done and how far it is, e.g. `fetching kimi 12.0/554.1 GiB`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model as it lies on this node."""

    name: str
    source: str
    """`path`, `package`, `cache` (a folder), `mirror` (a bucket) or `hub` (the engine fetches it)."""
    path: str | None
    bytes: int | None
    files: dict[str, str | int]
    """Name -> SHA-256 after `verify: full`, else size in bytes."""
    sha256: str | None
    """Of the one file, or of the lines `DIGEST  NAME` of all files by name; None unless hashed."""
    verified: str
    """`size` or `full`."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As kept in `provenance/SESSION/model-NAME.json`."""
        return asdict(self)


def folder(model: Model) -> Path | None:
    """Where a mirrored model lies on this node, if it is there; None for a model without a mirror.

    A node folder may hold the weights themselves, `ORG/NAME`, `NAME`, or be a cache of the hub.
    """
    if model.cache is None:
        return None
    if "://" in model.cache:
        target = _target(model)
        return target if (target / _DONE).is_file() else None
    root = Path(model.cache).expanduser()
    places = [root]
    if model.hub is not None:
        hub = f"models--{model.hub.replace('/', '--')}"
        places = [
            root / hub / "snapshots" / str(model.revision),
            root / model.hub,
            root / Path(model.hub).name,
            root,
        ]
    return next((p for p in places if (p / "config.json").is_file() or any(p.glob("*.gguf"))), None)


def prepare(name: str, model: Model, say: Say = lambda _: None) -> Prepared:
    """Make a model ready; idempotent. Raises PreflightError with what to do, or with both digests."""
    started = time.monotonic()
    source, path = _find(name, model, say)
    if path is None:
        if model.verify == "full":
            raise PreflightError(
                f"models.{name}.verify = full: {model.hub} is not on this node yet, so there is nothing to hash. "
                "Fix: give `cache:` a folder or bucket that holds it, or `verify: size`"
            )
        return Prepared(name, source, None, None, {}, None, "size", time.monotonic() - started)
    found = _files(path)
    total = sum(p.stat().st_size for p in found.values())
    _size(name, model, path, found)
    digest: str | None = None
    listed: dict[str, str | int] = {n: p.stat().st_size for n, p in found.items()}
    if model.verify == "full" or (model.sha256 is not None and path.is_dir()):
        digests = _hash(name, found, total, say)
        digest = next(iter(digests.values())) if path.is_file() else _of_lines(digests)
        listed = dict(digests)
        _blobs(name, found, digests)
        if model.sha256 is not None and digest != model.sha256:
            raise PreflightError(
                f"models.{name}.sha256 = {model.sha256}: {path.name} has {digest}. Fix: use the pinned weights, or pin these"
            )
    elif model.sha256 is not None:
        digest = weights.check_pin(path, model.sha256, name)
    verified = "full" if digest else "size"
    return Prepared(name, source, str(path), total, listed, digest, verified, time.monotonic() - started)


def _find(name: str, model: Model, say: Say) -> tuple[str, Path | None]:
    if model.cache is not None:
        if "://" in model.cache:
            return "mirror", _copy(name, model, say)
        there = folder(model)
        if there is None:
            raise PreflightError(
                f"models.{name}.cache = {model.cache}: holds no weights of {model.hub or name} at {model.revision}. "
                "Fix: mount the volume, or put them there"
            )
        return "cache", there
    if model.path is not None:
        path = Path(model.path).expanduser()
        if not path.exists():
            raise PreflightError(f"models.{name}.path = {path}: not there. Fix: put the weights there")
        return "path", path.resolve()
    if model.package is not None:
        return "package", weights.find(model, name)
    return "hub", _hub_snapshot(model)


def _hub_snapshot(model: Model) -> Path | None:
    """The revision in this node's own cache of the hub, if it is there whole."""
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    repository = root / f"models--{str(model.hub).replace('/', '--')}"
    snapshot = repository / "snapshots" / str(model.revision)
    if not snapshot.is_dir() or any((repository / "blobs").glob("*.incomplete")):
        return None
    return snapshot


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    found = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name != _DONE)
    return {p.relative_to(path).as_posix(): p for p in found}


def _size(name: str, model: Model, path: Path, found: Mapping[str, Path]) -> None:
    if model.gb is None or not path.is_dir():
        return
    have = sum(p.stat().st_size for n, p in found.items() if n.endswith((".safetensors", ".gguf"))) / 1e9
    if abs(have - model.gb) > 0.02 * model.gb:
        raise PreflightError(
            f"models.{name}.gb = {model.gb:g}: the weights under {path} have {have:.2f} GB. Fix: finish the copy, or correct it"
        )


def _hash(name: str, found: Mapping[str, Path], total: int, say: Say) -> dict[str, str]:
    out: dict[str, str] = {}
    done = 0
    for file, path in found.items():
        say(f"hashing {name} {done / _GIB:.1f}/{total / _GIB:.1f} GiB")
        with path.open("rb") as data:
            out[file] = hashlib.file_digest(data, "sha256").hexdigest()
        done += path.stat().st_size
    return out


def _of_lines(digests: Mapping[str, str]) -> str:
    """What `sha256sum` prints of the files, by name, hashed once more."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _blobs(name: str, found: Mapping[str, Path], digests: Mapping[str, str]) -> None:
    """In a cache of the hub a large file is a link to a blob that is named after its SHA-256."""
    for file, path in found.items():
        blob = path.resolve().name
        if path.is_symlink() and _SHA256.fullmatch(blob) and digests[file] != blob:
            raise PreflightError(
                f"models.{name}: {file} should have {blob} and has {digests[file]}. Fix: delete it and fetch it again"
            )


def _target(model: Model) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "campaign" / "models"
    asked = f"{model.cache}\n{model.revision}\n{model.sha256}"
    return base / hashlib.sha256(asked.encode()).hexdigest()[:16]


def _copy(name: str, model: Model, say: Say) -> Path:
    """Copy a bucket's folder once. A file of the right size is kept; one is whole or not there."""
    scheme, _, rest = str(model.cache).partition("://")
    if scheme != "s3":
        raise PreflightError(
            f"models.{name}.cache = {model.cache}: only s3:// is copied. Fix: mount it and give the folder"
        )
    target = _target(model)
    if (target / _DONE).is_file():
        return target
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
    try:
        _copy_objects(name, bucket, prefix, target, say)
    except PreflightError:
        raise
    except Exception as error:  # botocore's errors have no common base that says what a user can do
        raise PreflightError(
            f"models.{name}.cache = {model.cache}: {error}. Fix: check bucket, region and credentials of this node"
        ) from error
    (target / _DONE).write_text(f"{model.cache}\n", encoding="utf-8")
    return target


def _copy_objects(name: str, bucket: str, prefix: str, target: Path, say: Say) -> None:
    import boto3

    client = boto3.client("s3")
    pages: Iterable[Any] = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    objects = {
        o["Key"].removeprefix(prefix): int(o["Size"]) for page in pages for o in page.get("Contents", ())
    }
    objects = {key: size for key, size in objects.items() if key and not key.endswith("/")}
    if not objects:
        raise PreflightError(
            f"models.{name}.cache = s3://{bucket}/{prefix}: holds no file. Fix: check the prefix"
        )
    target.mkdir(parents=True, exist_ok=True)
    missing = {
        k: n for k, n in objects.items() if not ((f := target / k).is_file() and f.stat().st_size == n)
    }
    need, free = sum(missing.values()), shutil.disk_usage(target).free
    if need > free:
        raise PreflightError(
            f"models.{name}: needs {need / _GIB:.1f} GiB and {target} has {free / _GIB:.1f} GiB free. "
            "Fix: a larger disk, or XDG_CACHE_HOME on one"
        )
    done, total = sum(objects.values()) - need, sum(objects.values())
    for key, size in missing.items():
        file = (target / key).resolve()
        if not file.is_relative_to(target.resolve()):
            raise PreflightError(f"models.{name}: {key} leaves its folder. Fix: remove it from the bucket")
        say(f"fetching {name} {done / _GIB:.1f}/{total / _GIB:.1f} GiB")
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part")
        client.download_file(bucket, prefix + key, str(part))
        part.replace(file)
        done += size
