"""Commands and files on a node, over OpenSSH. Only paths under one folder of ours; no shell string comes from a user."""

import asyncio
import contextlib
import io
import os
import shlex
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from campaign.errors import ProviderError
from campaign.store.layout import flat
from campaign.store.ship import FOLDERS

SKIP = ("journal/",)
"""Journals: they are brought at the end, when they no longer change; the agent's own is followed line by line until then."""


class NodeShell:
    """One node, reached by `ssh` with these arguments. Raises ProviderError('unreachable')."""

    def __init__(self, argv: Sequence[str], folder: str, timeout_s: float = 60.0) -> None:
        self._argv, self.folder, self._timeout_s = list(argv), folder, timeout_s

    async def run(self, script: str, data: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Run a script in the node's folder; its standard output. A failure of the line or the script raises."""
        code, out, err = await self._exec(f"cd {self.folder} && {script}", data, timeout_s)
        if code != 0:
            raise ProviderError(
                "unreachable", f"ssh: exit {code}: {err.decode(errors='replace').strip()[-300:]}"
            )
        return out

    async def _exec(self, command: str, data: bytes, timeout_s: float | None) -> tuple[int, bytes, bytes]:
        with tempfile.TemporaryFile() as stdin:
            # A file, since a pipe to an ssh that has ended already raises differently from loop to loop.
            stdin.write(data)
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                # A login shell may print; only what comes after our own command counts, so none is used.
                command,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s or self._timeout_s)
        except TimeoutError:
            raise ProviderError("unreachable", "ssh: no answer in time") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                await process.wait()
        return process.returncode or 0, out, err

    async def push(self, files: Mapping[str, bytes]) -> None:
        """Write files, the last one last: it may be waited for."""
        for name in files:
            _safe(name)
        *first, last = files
        if first:
            await self.run(
                "umask 077 && tar -xf - --no-same-owner", _tar({name: files[name] for name in first})
            )
        quoted = shlex.quote(last)
        await self.run(
            f"umask 077 && mkdir -p $(dirname {quoted}) && cat > {quoted}.tmp && mv {quoted}.tmp {quoted}",
            files[last],
        )

    async def tail(self, name: str, offset: int) -> tuple[bytes, int | None]:
        """Bytes of a file from an offset, and the agent's exit code once it has ended."""
        quoted = shlex.quote(_safe(name))
        script = f"code=$(cat exit 2>/dev/null); printf '%s\\n' \"$code\"; tail -c +{offset + 1} {quoted} 2>/dev/null; true"
        out = await self.run(script)
        first, _, rest = out.partition(b"\n")
        return rest, int(first) if first.strip().isdigit() else None

    async def pull(
        self, remote: str, local: Path, *, everything: bool, session: str | None = None
    ) -> list[str]:
        """Bring files of a run folder that are missing or of another size here. Returns their names.

        Only of folders a node may write: the plan here may have grown since the node was given its copy. With
        `everything`, journals are brought too, and local ones of open cells of `session` that the node no longer has are
        removed: they were sealed meanwhile. Those of other sessions are not this node's.
        """
        there = _sizes(
            await self.run(f"find {shlex.quote(remote)} -type f -printf '%s %P\\n' 2>/dev/null; true")
        )
        wanted = [
            name
            for name, size in sorted(there.items())
            if name.partition("/")[0] in FOLDERS
            and "/" in name
            and (everything or not name.startswith(SKIP))
            and not _same(local / name, size)
        ]
        if wanted:
            names = "\n".join(wanted).encode() + b"\n"
            data = await self.run(f"tar -C {shlex.quote(remote)} -cf - -T -", names, timeout_s=1800)
            await asyncio.to_thread(unpack, data, local, frozenset(wanted))
        if everything and session:
            own = (f"{flat(session)}~", f"{flat(session)}.add")
            for path in (local / "journal" / "cells").glob("*.jsonl"):
                if path.name.startswith(own) and f"journal/cells/{path.name}" not in there:
                    path.unlink()
        return wanted


def unpack(data: bytes, local: Path, wanted: frozenset[str] | None = None) -> None:
    """Write regular files of a tar under `local`, each atomically. What would leave the folder is refused.

    `wanted`: names that were asked for; what else a node sends is passed over.
    """
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            if not member.isreg() or (wanted is not None and member.name not in wanted):
                continue
            target = local / _safe(member.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None
            temporary = target.with_name(target.name + ".part")
            temporary.write_bytes(source.read())
            temporary.replace(target)


def _safe(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\n" in name or not name:
        raise ProviderError("unreachable", f"the node names a file outside its folder: {name!r}")
    return name


def _sizes(listing: bytes) -> dict[str, int]:
    found = {}
    for line in listing.decode(errors="replace").splitlines():
        size, _, name = line.partition(" ")
        if size.isdigit() and name:
            found[_safe(name)] = int(size)
    return found


def _same(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
