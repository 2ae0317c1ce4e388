"""The source of an engine as files: a wheel, an sdist, a folder, or a folder at a git revision."""

import hashlib
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from campaign.errors import PreflightError

_VERSION = re.compile(r"^[a-z0-9_.]+-([0-9][^-]*?)(?:-|\.tar\.gz$)", re.IGNORECASE)
_LIMIT = 8 * 1024 * 1024
"""A source file beyond this is data, not source."""


@dataclass(frozen=True)
class Source:
    """Python files of one package, read when asked for."""

    name: str
    """File name of the wheel or sdist, or what was given."""
    version: str | None
    sha256: str | None
    """Of the wheel or sdist; None for a folder."""
    paths: tuple[str, ...]
    """Python files, from the package's own folder on: `vllm/envs.py`."""
    read: Callable[[str], str]

    def matching(self, pattern: str) -> Iterable[str]:
        """Paths that a regular expression matches from their start."""
        return (p for p in self.paths if re.match(pattern, p))


def open_source(given: str, package: str) -> Source:
    """A wheel, sdist, folder, or `FOLDER@REVISION` of a git checkout. Raises PreflightError."""
    path = Path(given).expanduser()
    if path.is_file() and path.suffix == ".whl":
        return _wheel(path, package)
    if path.is_file() and path.name.endswith((".tar.gz", ".tgz")):
        return _sdist(path, package)
    if path.is_dir():
        return _folder(path, package)
    folder, at, revision = given.rpartition("@")
    if at and Path(folder).expanduser().is_dir():
        return _git(Path(folder).expanduser(), revision, package)
    raise PreflightError(
        f"engine source {given}: no such wheel, sdist or folder. Fix: give a path that exists"
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wheel(path: Path, package: str) -> Source:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise PreflightError(
            f"engine source {path.name}: not a wheel ({error}). Fix: download it again"
        ) from None
    sizes = {i.filename: i.file_size for i in archive.infolist()}
    paths = _ours({n: n for n in sizes}, package)
    _some(paths, path.name, package)
    metadata = next((n for n in sizes if n.endswith(".dist-info/METADATA")), None)
    version = None
    if metadata:
        version = Parser().parsestr(archive.read(metadata).decode("utf-8", "replace"))["Version"]

    def read(name: str) -> str:
        return "" if sizes[paths[name]] > _LIMIT else archive.read(paths[name]).decode("utf-8", "replace")

    return Source(path.name, version, _digest(path), tuple(sorted(paths)), read)


def _sdist(path: Path, package: str) -> Source:
    files: dict[str, bytes] = {}
    with tarfile.open(path, "r:gz") as archive:  # members are read, never extracted
        for member in archive:
            if member.isfile() and member.name.endswith(".py") and member.size <= _LIMIT:
                data = archive.extractfile(member)
                if data is not None:
                    files[member.name] = data.read()
    paths = _ours({n: n for n in files}, package)
    _some(paths, path.name, package)
    found = _VERSION.match(path.name)

    def read(name: str) -> str:
        return files[paths[name]].decode("utf-8", "replace")

    return Source(path.name, found[1] if found else None, _digest(path), tuple(sorted(paths)), read)


def _folder(folder: Path, package: str) -> Source:
    paths = _ours({str(p.relative_to(folder)): str(p) for p in folder.rglob("*.py") if p.is_file()}, package)
    _some(paths, str(folder), package)
    infos = sorted(folder.glob(f"{package}-*.dist-info"))
    version = infos[0].name.removesuffix(".dist-info").partition("-")[2] if infos else None

    def read(name: str) -> str:
        path = Path(paths[name])
        return "" if path.stat().st_size > _LIMIT else path.read_text(encoding="utf-8", errors="replace")

    return Source(str(folder), version, None, tuple(sorted(paths)), read)


def _git(folder: Path, revision: str, package: str) -> Source:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, errors="replace"
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["failed"])[-1]
            raise PreflightError(
                f"engine source {folder}@{revision}: git: {last}. Fix: name a revision it has"
            )
        return done.stdout

    commit = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").strip()
    listed = [n for n in git("ls-tree", "-r", "--name-only", commit).splitlines() if n.endswith(".py")]
    paths = _ours({n: n for n in listed}, package)
    _some(paths, f"{folder}@{revision}", package)
    return Source(
        f"{folder.name}@{commit[:12]}",
        None,
        None,
        tuple(sorted(paths)),
        lambda name: git("cat-file", "blob", f"{commit}:{paths[name]}"),
    )


def _ours(names: Mapping[str, str], package: str) -> dict[str, str]:
    """Path from the package's folder on -> name in the archive; tests and vendored copies left out."""
    found: dict[str, str] = {}
    for name, value in names.items():
        parts = name.split("/")
        if not name.endswith(".py") or package not in parts:
            continue
        # `python/sglang/srt/x.py` of a checkout and `sglang-0.5/python/sglang/x.py` of an sdist alike.
        inner = parts[parts.index(package) :]
        if "tests" not in inner and "test" not in inner[:2]:
            found.setdefault("/".join(inner), value)
    return found


def _some(paths: Mapping[str, str], name: str, package: str) -> None:
    if not paths:
        raise PreflightError(
            f"engine source {name}: holds no package {package}. Fix: give the engine's own source"
        )
