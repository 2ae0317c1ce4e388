"""What the adapters of SGLang and vLLM share: weights, interpreter, flag table, environment, patches."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from campaign.engines import models as mirror
from campaign.engines import runtimes, weights
from campaign.engines.base import BootOrder
from campaign.engines.flags import check as flag_check
from campaign.engines.flags import table as tables
from campaign.engines.flags.table import FlagTable
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Runtime

LOCAL_PORT_FLAGS = frozenset({"--host", "--port", "--model", "--model-path", "--served-model-name"})
"""Set by the host alone."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Weights as an engine's command line names them."""

    name: str
    revision: str | None


def ref(models: Mapping[str, Model], name: str | None) -> Ref:
    """Hub id and revision, or the folder on the node. Raises PreflightError."""
    model = weights.entry(models, name)
    mirrored = mirror.folder(model)
    if mirrored is not None:
        return Ref(str(mirrored), None)
    if model.hub is not None:
        return Ref(model.hub, model.revision)
    if model.path is not None:
        return Ref(str(Path(model.path).expanduser()), None)
    raise PreflightError(
        f"models.{name}: SGLang and vLLM read a hub model or a folder. Fix: give `hub:` or `path:`"
    )


def require_folder(models: Mapping[str, Model], name: str | None) -> None:
    """A model given by path must be on this node, whole. Raises PreflightError."""
    model = weights.entry(models, name)
    if model.path is None:
        return
    path = Path(model.path).expanduser()
    if not (path / "config.json").is_file():
        raise PreflightError(
            f"models.{name}.path = {path}: no config.json there. Fix: give the folder of the weights"
        )
    if model.gb is not None:
        have = sum(p.stat().st_size for p in path.glob("*.safetensors")) / 1e9
        if abs(have - model.gb) > 0.02 * model.gb:
            raise PreflightError(
                f"models.{name}.gb = {model.gb:g}: the weights under {path} have {have:.2f} GB. Fix: finish the download, or correct it"
            )


def flag_table(engine: str, runtime: Runtime | None) -> FlagTable | None:
    """The table of what will start: its own source if named, else its version's; None where neither is known."""
    if runtime is not None and runtime.source is not None:
        return tables.of_source(runtime.source, engine)
    known = runtimes.version(runtime, engine)
    if known is not None and (found := tables.of_version(engine, known)) is not None:
        return found
    site = None if runtime is None else runtimes.site_packages(runtime)
    if site is not None and (site / tables.PACKAGES[engine]).is_dir():
        return _installed(engine, str(site))
    return None


@lru_cache(maxsize=8)
def _installed(engine: str, site: str) -> FlagTable:
    from dataclasses import replace

    from campaign.engines.flags.source import open_source

    # Only the package's own folder: a site-packages folder holds ten thousand other files.
    source = open_source(f"{site}/{tables.PACKAGES[engine]}", tables.PACKAGES[engine])
    infos = sorted(Path(site).glob(f"{engine}-*.dist-info"))
    version = infos[0].name.removesuffix(".dist-info").partition("-")[2] if infos else None
    prefix = tables.PACKAGES[engine]
    named = replace(
        source,
        version=version,
        paths=tuple(p if p.startswith(prefix + "/") else f"{prefix}/{p}" for p in source.paths),
    )
    return tables.read(named, engine)


def check_flags(
    engine: str, arm: Arm, runtime: Runtime | None, argv: Sequence[str], env: Mapping[str, str]
) -> None:
    """On the node, before weights load: the same check as `campaign preflight`. Raises PreflightError."""
    table = flag_table(engine, runtime)
    if table is None:
        return
    found = flag_check.check(
        table, argv, env, others=tables.others(engine, table.version), allow=arm.allow_unknown
    )
    if found:
        lines = (f"{f.word}{f' = {f.value}' if f.value else ''}: {f.why}. Fix: {f.fix}" for f in found)
        raise PreflightError("; ".join(lines))


def doubled(arm: Arm, argv: Sequence[str]) -> None:
    """A flag in `extra_args` that a field of the arm, or the host, sets already. Raises PreflightError."""
    own = [word for word, _ in flag_check.options(argv)]
    for word, _ in flag_check.options(arm.extra_args):
        if word in own or word in LOCAL_PORT_FLAGS:
            raise PreflightError(
                f"extra_args: {word} is set by a field of the arm or by the host. Fix: say it in one place"
            )


def environment(order: BootOrder, own: Mapping[str, str]) -> dict[str, str]:
    """Explicit: the GPUs, what the adapter needs, what the arm sets; no user site, no working folder."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in order.gpus),
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        **own,
        **order.config.env,
    }


def apply_patches(order: BootOrder) -> dict[str, str]:
    """Put an arm's patches into its runtime, and read them back: target -> SHA-256 on the live install.

    Only a venv that campaign made is written to; in one of the user's the file must hold the patch already.
    Raises PreflightError.
    """
    found: dict[str, str] = {}
    for patch in order.config.patches:
        site = None
        if order.runtime is not None:
            site = runtimes.site_packages(order.runtime, patches=order.config.patches)
        if site is None:
            raise PreflightError(
                f"patches: {patch.target}: the arm has no runtime of its own. Fix: give it one (pip, lock, venv)"
            )
        target = (site / patch.target).resolve()
        if not target.is_relative_to(site.resolve()):
            raise PreflightError(
                f"patches: {patch.target}: leaves site-packages. Fix: write a path inside it"
            )
        data = _read(Path(patch.file).expanduser())
        if _sha256(data) != patch.sha256:
            raise PreflightError(
                f"patches: {patch.file}: SHA-256 is {_sha256(data)}. Fix: use the pinned file, or pin this one"
            )
        ours = order.runtime is not None and order.runtime.venv is None
        if ours and (not target.is_file() or _sha256(target.read_bytes()) != patch.sha256):
            _replace(target, data)
        live = _sha256(_read(target))
        if live != patch.sha256:
            raise PreflightError(
                f"patches: {patch.target}: the install has {live}. Fix: put the patch into the venv, or use a `pip` runtime"
            )
        found[patch.target] = live
    return found


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(target)
    # Python takes bytecode for current by size and whole seconds: what is cached of the old file may pass for it.
    for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PreflightError(f"patches: {path}: {error.strerror}. Fix: give a file that exists") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_SHARDS = re.compile(
    r"(?:Loading|loading)[^\n\r]*?(?:checkpoint )?shards[^\n\r]*?(\d+)/(\d+)(?:[^\n\r]*?<([\d:]+))?"
)


def shards(log: str) -> tuple[int, int, str | None] | None:
    """(loaded, all, time left) of the last progress line of weight loading; None where there is none."""
    lines = list(_SHARDS.finditer(log))
    return (int(lines[-1][1]), int(lines[-1][2]), lines[-1][3]) if lines else None


def numbers(value: Any) -> list[int] | None:
    """A list of whole numbers as JSON gives it."""
    return [int(x) for x in value] if isinstance(value, (list, tuple)) else None
