"""Who uses the GPUs of a boot, through NVML. Without a driver nothing is known, and nothing is claimed."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RELEASE_S = 60.0
"""Longest wait for the memory of a server that has ended."""
_SLACK_MIB = 512


@dataclass(frozen=True, slots=True)
class Use:
    """What NVML says of some GPUs."""

    used_mib: tuple[float, ...]
    """By GPU, in the order asked for."""
    holders: dict[int, float]
    """Process -> MiB. In a container these may be numbers of the host, which mean nothing here."""


def driver() -> bool:
    """Whether an NVIDIA driver shows itself; a sandboxed kernel has the devices and no /proc entry."""
    return any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl"))


Look = Callable[[Sequence[int]], Use | None]


def look(indexes: Sequence[int]) -> Use | None:
    """Memory and processes of these GPUs; None where NVML does not answer."""
    if not indexes or not driver():
        return None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in indexes]
        holders: dict[int, float] = {}
        for handle in handles:
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                holders[int(process.pid)] = holders.get(int(process.pid), 0.0) + _mib(process.usedGpuMemory)
        return Use(tuple(_mib(nvml.nvmlDeviceGetMemoryInfo(h).used) for h in handles), holders)
    except Exception:
        return None


def identity(indexes: Sequence[int], nvml: Any = None) -> list[dict[str, Any]]:
    """Of each GPU: index, UUID, name, driver, CUDA of the driver, clocks, power limit, links to the others.

    `links` maps another GPU of the list to NVML's nearest common ancestor (`internal` one board, `single` one PCIe
    switch, `multiple`, `hostbridge`, `node` one NUMA node, `system`). Empty where NVML does not answer; a member that
    it refuses is None.
    """
    if nvml is None:
        if not indexes or not driver():
            return []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:
            return []
        nvml = pynvml

    def ask(name: str, *args: Any) -> Any:
        try:
            value = getattr(nvml, name)(*args)
        except Exception:
            return None
        return value.decode() if isinstance(value, bytes) else value

    handles = {i: ask("nvmlDeviceGetHandleByIndex", i) for i in indexes}
    out = []
    for i, handle in handles.items():
        limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        others = ((j, other) for j, other in handles.items() if j != i)
        ancestors = ((j, ask("nvmlDeviceGetTopologyCommonAncestor", handle, other)) for j, other in others)
        out.append(
            {
                "index": i,
                "uuid": ask("nvmlDeviceGetUUID", handle),
                "name": ask("nvmlDeviceGetName", handle),
                "driver": ask("nvmlSystemGetDriverVersion"),
                "cuda_driver": ask("nvmlSystemGetCudaDriverVersion"),
                "power_limit_w": None if limit is None else limit / 1000,
                "max_sm_mhz": ask("nvmlDeviceGetMaxClockInfo", handle, 1),
                "links": {str(j): _LEVELS.get(level) for j, level in ancestors},
            }
        )
    return out


_LEVELS = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}
"""`nvmlGpuTopologyLevel_t`."""


def _mib(value: Any) -> float:
    return 0.0 if value is None else float(value) / 2**20


def foreign(use: Use | None, ours: Collection[int], proc: Path = Path("/proc")) -> dict[int, float]:
    """Holders that are live processes of this node and none of ours. Numbers nobody has here say nothing."""
    if use is None:
        return {}
    return {pid: mib for pid, mib in use.holders.items() if pid not in ours and (proc / str(pid)).exists()}


def lowest(
    indexes: Sequence[int], first: Use | None, others: Sequence[int], second: Use | None
) -> Use | None:
    """`second`, by GPU of `others`, no higher than `first` where both saw that GPU; the one there is if only one is."""
    if first is None or second is None:
        return second
    seen = dict(zip(indexes, first.used_mib, strict=True))
    used = tuple(min(mib, seen.get(g, mib)) for g, mib in zip(others, second.used_mib, strict=True))
    return Use(used, second.holders)


def wait_gone(
    indexes: Sequence[int],
    pids: Collection[int],
    *,
    look_at: Look = look,
    timeout_s: float = RELEASE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until none of these processes holds memory of the GPUs. True where none does, or nobody can tell."""
    waited = 0.0
    while True:
        now = look_at(indexes)
        if now is None or not set(pids) & set(now.holders):
            return True
        if waited >= timeout_s:
            return False
        sleep(0.2)
        waited += 0.2


def wait_released(
    indexes: Sequence[int],
    before: Use | None,
    *,
    look_at: Look = look,
    timeout_s: float = RELEASE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until the GPUs hold no more than before the boot. True where they do, or where nobody can tell."""
    waited = 0.0
    while before is not None:
        now = look_at(indexes)
        if now is None or all(
            n <= b + _SLACK_MIB for n, b in zip(now.used_mib, before.used_mib, strict=True)
        ):
            return True
        if waited >= timeout_s:
            return False
        sleep(0.2)
        waited += 0.2
    return True
