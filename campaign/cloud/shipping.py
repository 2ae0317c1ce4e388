"""What a rented node is given: the project itself, and what its arms need beside it."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from campaign import __version__
from campaign.cloud import templates
from campaign.errors import ProviderError
from campaign.plan.model import SessionPlan
from campaign.spec.models import Spec


def wheel(cache: Path) -> Path | None:
    """The project's wheel, built from the checkout this runs from; None where it was installed from an index.

    Built once for each state of the sources, and kept in `cache`.
    """
    root = templates.checkout()
    if root is None:
        return None
    key = _sources_hash(root)
    folder = cache / key
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if found:
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        uv = Path(sys.executable).with_name("uv")
        builder = (
            [str(uv), "build", "--wheel", "--quiet"]
            if uv.is_file()
            else [sys.executable, "-m", "build", "--wheel"]
        )
        out = "--out-dir" if uv.is_file() else "--outdir"
        done = subprocess.run(
            [*builder, out, temporary, str(root)], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode != 0:
            raise ProviderError("setup", f"the project's wheel cannot be built: {done.stderr.strip()[-300:]}")
        try:
            Path(temporary).rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        else:
            Path(temporary).mkdir()
    return min(folder.glob("*.whl"))


def requirement(wheel_name: str | None, session: SessionPlan) -> str:
    """What pip installs on the node; `local` brings the llama.cpp server where an arm runs beside us."""
    beside = any(a.config.engine == "llamacpp" and a.config.runtime is None for a in session.arms.values())
    extra = "[local]" if beside else ""
    return f"campaign{extra} @ file://{wheel_name}" if wheel_name else f"campaign{extra}=={__version__}"


def weight_packages(spec: Spec, session: SessionPlan) -> list[str]:
    """Packages that carry weights, at the version installed here, for models the session uses."""
    found = []
    for model in {a.config.model for a in session.arms.values()} - {None}:
        package = spec.models[model or ""].package
        if package is not None:
            try:
                found.append(f"{package}=={version(package)}")
            except PackageNotFoundError:
                found.append(package)
    return sorted(set(found))


def hub_models(spec: Spec, session: SessionPlan) -> list[str]:
    """`ID@REVISION` of hub models the session uses."""
    used = {a.config.model for a in session.arms.values()} - {None}
    models = [spec.models[name or ""] for name in used]
    return sorted({f"{m.hub}@{m.revision}" for m in models if m.hub is not None})


def secrets(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The named variables. Raises ProviderError for one that is not set here."""
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ProviderError(
            "credentials",
            f"{', '.join(missing)} is not set here. Fix: export it, or take it out of the node's `secrets`",
        )
    return {name: environment[name] for name in names}


def pins(wheel_cache: Path) -> Path:
    """A constraints file: the checkout's pins, or an empty one."""
    root = templates.checkout()
    if root is not None and (root / "constraints.txt").is_file():
        return root / "constraints.txt"
    empty = wheel_cache / "constraints.txt"
    empty.parent.mkdir(parents=True, exist_ok=True)
    empty.touch()
    return empty


def _sources_hash(root: Path) -> str:
    digest = hashlib.sha256()
    files = [root / "pyproject.toml", *sorted((root / "sky").glob("*"))]
    files += sorted(p for p in (root / "campaign").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    for file in files:
        digest.update(json.dumps(str(file.relative_to(root))).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
