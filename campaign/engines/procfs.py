"""What Linux says of live processes and sockets: who listens where, and what really started."""

import contextlib
import os
import random
import re
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from campaign.engines.guard import descendants

_LISTEN = "0A"
_SOCKET = re.compile(r"^socket:\[(\d+)\]$")
_FIRST_PORT, _DEFAULT_EPHEMERAL = 18_000, 32_768


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    inode: int


def listeners(port: int | None = None) -> list[Listener]:
    """Listening TCP sockets of this network namespace, of one port or all."""
    out: list[Listener] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] != _LISTEN:
                    continue
                address, _, number = fields[1].rpartition(":")
                if port is None or int(number, 16) == port:
                    out.append(Listener(_address(address), int(number, 16), int(fields[9])))
    return out


def _address(text: str) -> str:
    # Each 32-bit word is printed in host order, which is little-endian wherever GPUs are rented.
    raw = bytes.fromhex(text)
    words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
    return str(ip_address(b"".join(words)))


def sockets(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that these processes hold; those we may not read are left out."""
    out: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    match = _SOCKET.match(os.readlink(entry.path))  # noqa: PTH115  # it is a path, not a Path
                    if match:
                        out.add(int(match[1]))
    return out


def tree(pid: int) -> list[int]:
    """A process and its live descendants."""
    return [pid, *descendants(pid)]


def state(pid: int) -> str | None:
    """State letter of a process (`R`, `S`, `T` stopped, `Z` zombie); None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return None


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free to servers
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def free_port(taken: Collection[int], rng: random.Random) -> int:
    """A port below the ephemeral range, so that no outgoing connection can slip onto it before the server.

    What remains is another server that binds between this check and ours; readiness finds that. Raises
    OSError when nothing is free.
    """
    first = _DEFAULT_EPHEMERAL
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (_FIRST_PORT, first) if first > _FIRST_PORT + 1000 else (_FIRST_PORT, 60_000)
    for _ in range(200):
        port = rng.randrange(low, high)
        if port not in taken and not listeners(port) and port_is_free(port):
            return port
    raise OSError("no free TCP port on 127.0.0.1")


def describe(pid: int) -> dict[str, Any]:
    """The live process as the kernel has it: argv, exe, cwd, env, start time, threads, affinity."""
    import psutil  # type: ignore[import-untyped]  # psutil ships no type information

    process = psutil.Process(pid)
    with process.oneshot():
        return {
            "pid": pid,
            "argv": process.cmdline(),
            "exe": process.exe(),
            "cwd": process.cwd(),
            "env": process.environ(),
            "created": process.create_time(),
            "threads": process.num_threads(),
            "cpu_affinity": process.cpu_affinity(),
            "rss_bytes": process.memory_info().rss,
            "children": [p.pid for p in process.children(recursive=True)],
        }
