"""Receive stamps of the kernel, and the offset that puts them on the monotonic clock.

`SO_TIMESTAMPING` with software receive stamps says when a segment reached the socket layer, whatever this
process was doing then. The kernel stamps in CLOCK_REALTIME; its offset to CLOCK_MONOTONIC changes only by a
step (both clocks run at one rate), so it is sampled before and after a request and a difference voids it.
Constants are those of Linux (include/uapi/linux/net_tstamp.h, asm-generic/socket.h).
"""

import asyncio
import contextlib
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

_SO_TIMESTAMPING: Final = 37
_RX_SOFTWARE: Final = 1 << 3
_SOFTWARE: Final = 1 << 4
_TIMESPEC: Final = struct.Struct("qq")
_UNPACK: Final = struct.Struct("qq32x").unpack
_TCP_INFO: Final = 11
_DATA_SEGS_IN: Final = 152
"""Offset of tcpi_data_segs_in in struct tcp_info."""

ANCILLARY: Final = socket.CMSG_SPACE(3 * _TIMESPEC.size)
"""Room for one `struct scm_timestamping`."""
STEP_NS: Final = 20_000
"""A change of the offset beyond this and the samples' own uncertainty is a step of the clock."""
_GOOD_NS: Final = 2_000
_TRIES: Final = 16


def enable(sock: socket.socket) -> bool:
    """Ask for kernel receive stamps; False where this system has none."""
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _RX_SOFTWARE | _SOFTWARE)
    except OSError:
        return False
    return True


class Keeper:
    """Keeps the kernel's receive stamps switched on.

    It starts them some time after they are first asked for, and stops them with the last socket that wants them.
    """

    def __init__(self) -> None:
        self._sock: socket.socket | None = None

    async def ready(self) -> None:
        """Wait until stamps come (0.2 s at most); at once after the first time."""
        if self._sock is not None:
            return
        self._sock = sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(0)
        if not enable(sock):
            return
        for _ in range(200):
            sock.sendto(b".", sock.getsockname())
            with contextlib.suppress(BlockingIOError):
                if realtime_ns(sock.recvmsg(16, ANCILLARY)[1]):
                    return
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Let go."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def realtime_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Stamp (CLOCK_REALTIME ns) of the last segment a read took; 0 where the kernel gave none."""
    if not ancillary:
        return 0
    # Nothing else is asked for, so nothing else comes.
    seconds, nanos = _UNPACK(ancillary[0][2])
    return seconds * 1_000_000_000 + nanos  # type: ignore[no-any-return]  # two whole numbers


NONE: Final = bytes(48)
"""Where a read brought no stamp: no moment of any clock."""


def realtimes_ns(stamps: Sequence[bytes]) -> list[int]:
    """CLOCK_REALTIME ns of each `struct scm_timestamping`; 0 of `NONE`."""
    words = array("q")
    words.frombytes(b"".join(stamps))
    return [s * 1_000_000_000 + ns for s, ns in zip(words[0::6], words[1::6], strict=True)]


class Offset(NamedTuple):
    """CLOCK_REALTIME minus CLOCK_MONOTONIC."""

    ns: int
    uncertainty_ns: int


def offset() -> Offset:
    """Sample the offset: the tightest of a few tries, so that a preempted one does not count."""
    best = Offset(0, 1 << 62)
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best.uncertainty_ns:
            best = Offset(real - (before + after) // 2, after - before)
            if best.uncertainty_ns <= _GOOD_NS:
                break
    return best


def stepped(before: Offset, after: Offset) -> bool:
    """Whether CLOCK_REALTIME was set between two samples."""
    return abs(after.ns - before.ns) > STEP_NS + before.uncertainty_ns + after.uncertainty_ns


def segments_in(sock: socket.socket) -> int | None:
    """Data segments this connection has received (TCP_INFO); None where the kernel does not say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except OSError:
        return None
    if len(info) < _DATA_SEGS_IN + 4:
        return None
    return int.from_bytes(info[_DATA_SEGS_IN : _DATA_SEGS_IN + 4], sys.byteorder)
