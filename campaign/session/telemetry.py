"""The machine beside the measurement: CPU, memory and GPU, sampled into JSON lines.

Counters (CPU ticks, energy) are kept as they are and differenced over a window by linear interpolation at
its edges; gauges (frequency, temperature, power) are means of the samples inside it. Measured: a sample costs
0.3 ms of CPU without GPUs and 5 ms with one H200 (NVML 580), so nodes with GPUs are sampled at 10 Hz, in a
thread of their own process (5 % of one core a GPU), and others at 2 Hz.
"""

import asyncio
import contextlib
import json
import os
import platform
import socket
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from campaign.clock import Clock, SystemClock
from campaign.cloud.local import machine_id

RATE_HZ = 2.0
GPU_RATE_HZ = 10.0
_KEPT = 4 * 3600 * 10
"""Samples kept in memory for `window`; the file has them all."""
_TICK_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the machine. `counters` only grow; `gauges` are momentary. Units are in the names."""

    t_ns: int
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    per_cpu: tuple[tuple[float, float], ...] = ()
    """(busy, all) ticks of every CPU since boot."""


class Machine:
    """Reads this node. Every source that is missing is left out, and named in `missing`."""

    def __init__(self, proc: Path = Path("/proc"), rapl: Path = _RAPL, *, gpus: bool = True) -> None:
        self._proc, self.missing = proc, dict[str, str]()
        self._freq = sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._rapl = [p for p in sorted(rapl.glob("intel-rapl:?")) if os.access(p / "energy_uj", os.R_OK)]
        if not self._rapl:
            self.missing["cpu_joules"] = "no readable RAPL counter"
        self._rapl_last: dict[Path, tuple[float, float]] = {}
        found = _nvml(self.missing) if gpus else (None, [])
        self._nvml: Any = found[0]
        self._gpus: list[Any] = found[1]

    @property
    def gpus(self) -> int:
        """GPUs that NVML shows."""
        return len(self._gpus)

    def sample(self, t_ns: int) -> Sample:
        """One sample at a time of CLOCK_MONOTONIC that the caller read just before."""
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        per_cpu: list[tuple[float, float]] = []
        for line in (self._proc / "stat").read_text().splitlines():
            if not line.startswith("cpu"):
                break
            name, *fields = line.split()
            ticks = dict(zip(_TICK_FIELDS, map(float, fields), strict=False))
            total = sum(ticks.values())
            busy = total - ticks["idle"] - ticks.get("iowait", 0.0)
            if name == "cpu":
                counters |= {"cpu_total": total, "cpu_busy": busy, "cpu_steal": ticks.get("steal", 0.0)}
            else:
                per_cpu.append((busy, total))
        with contextlib.suppress(OSError, ValueError, IndexError):
            gauges["load1"] = float((self._proc / "loadavg").read_text().split()[0])
        self._memory(gauges)
        self._frequency(gauges)
        self._cpu_energy(counters)
        self._gpu(counters, gauges)
        return Sample(t_ns, counters, gauges, tuple(per_cpu))

    def _memory(self, gauges: dict[str, float]) -> None:
        with contextlib.suppress(OSError, ValueError):
            kib = {
                line.partition(":")[0]: float(line.split()[1])
                for line in (self._proc / "meminfo").read_text().splitlines()[:6]
            }
            gauges["mem_used_mib"] = (kib["MemTotal"] - kib.get("MemAvailable", kib["MemFree"])) / 1024

    def _frequency(self, gauges: dict[str, float]) -> None:
        values: list[float] = []
        for path in self._freq:
            with contextlib.suppress(OSError, ValueError):
                values.append(float(path.read_text()) / 1000)
        if not values:
            with contextlib.suppress(OSError, ValueError):
                values = [
                    float(line.partition(":")[2])
                    for line in (self._proc / "cpuinfo").read_text().splitlines()
                    if line.startswith("cpu MHz")
                ]
        if values:
            gauges["cpu_mhz"] = sum(values) / len(values)
        else:
            self.missing["cpu_mhz"] = "neither cpufreq nor /proc/cpuinfo says"

    def _cpu_energy(self, counters: dict[str, float]) -> None:
        total = 0.0
        for zone in self._rapl:
            try:
                now = float((zone / "energy_uj").read_text())
                before, base = self._rapl_last.get(zone, (now, 0.0))
                if now < before:  # the counter wrapped
                    base += float((zone / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                return
            self._rapl_last[zone] = (now, base)
            total += (now + base) / 1e6
        if self._rapl:
            counters["cpu_joules"] = total

    def _gpu(self, counters: dict[str, float], gauges: dict[str, float]) -> None:
        nvml = self._nvml
        for i, handle in enumerate(self._gpus):
            for name, call in _GPU_GAUGES.items():
                # A reading that this driver or binding lacks is not there; the others are.
                with contextlib.suppress(nvml.NVMLError, AttributeError):
                    gauges[f"gpu{i}_{name}"] = float(call(nvml, handle))
            with contextlib.suppress(nvml.NVMLError):
                counters[f"gpu{i}_joules"] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000

    def identity(self) -> dict[str, Any]:
        """What this node is. The machine id is hashed: it says same or other node, and nothing else."""
        cpuinfo = (self._proc / "cpuinfo").read_text()
        model = next(
            (x.partition(":")[2].strip() for x in cpuinfo.splitlines() if x[:10] == "model name"), ""
        )
        meminfo = (self._proc / "meminfo").read_text()
        return {
            "node": machine_id(),
            "host": socket.gethostname(),
            "kernel": platform.release(),
            "arch": platform.machine(),
            "cpu": model,
            "cores": os.cpu_count(),
            "usable_cpus": sorted(os.sched_getaffinity(0)),
            "memory_mib": int(meminfo.split()[1]) // 1024,
            "gpus": [_gpu_identity(self._nvml, h) for h in self._gpus],
            "missing": dict(self.missing),
        }

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml, self._gpus = None, []


def _throttled(nvml: Any, handle: Any) -> bool:
    """Slowed by heat, power brake or hardware; the power cap itself is a normal state of a busy GPU."""
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    bad = (
        nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    return bool(reasons & bad)


def _power_capped(nvml: Any, handle: Any) -> bool:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap)


_GPU_GAUGES: Mapping[str, Callable[[Any, Any], float]] = {
    "w": lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
    "c": lambda nvml, h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
    "sm_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
    "mem_mhz": lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
    "util": lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100,
    "used_mib": lambda nvml, h: nvml.nvmlDeviceGetMemoryInfo(h).used / 2**20,
    "throttle": _throttled,
    "power_cap": _power_capped,
}


def _nvml(missing: dict[str, str]) -> tuple[Any, list[Any]]:
    # A sandboxed kernel has the devices and no /proc entry.
    if not any(Path(p).exists() for p in ("/proc/driver/nvidia", "/dev/nvidiactl")):
        missing["gpu"] = "no NVIDIA driver"
        return None, []
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:
        missing["gpu"] = f"NVML: {error}"
        return None, []


def _gpu_identity(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "memory_mib": nvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
        **_optional(nvml, handle),
    }


def _nvlinks(nvml: Any, handle: Any) -> int:
    """Links that are up."""
    up = 0
    for link in range(18):
        with contextlib.suppress(nvml.NVMLError):
            up += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    return up


_OPTIONAL: dict[str, Callable[[Any, Any], Any]] = {
    "cuda": lambda nvml, _: nvml.nvmlSystemGetCudaDriverVersion(),
    "power_limit_w": lambda nvml, h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
    "max_sm_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
    "max_mem_mhz": lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_MEM),
    "pci": lambda nvml, h: nvml.nvmlDeviceGetPciInfo(h).busId,
    "numa_node": lambda nvml, h: nvml.nvmlDeviceGetNumaNodeId(h),
    "nvlinks": _nvlinks,
}


def _optional(nvml: Any, handle: Any) -> dict[str, Any]:
    """What not every GPU, driver or binding has; what is not there is None."""
    out: dict[str, Any] = {}
    for name, call in _OPTIONAL.items():
        try:
            value = call(nvml, handle)
            out[name] = value.decode() if isinstance(value, bytes) else value
        except Exception:
            out[name] = None
    return out


class HostTelemetry:
    """`session.ports.Telemetry` of this node."""

    def __init__(
        self, clock: Clock | None = None, machine: Machine | None = None, rate_hz: float | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._machine = machine or Machine()
        rate = rate_hz if rate_hz is not None else GPU_RATE_HZ if self._machine.gpus else RATE_HZ
        if not 0 < rate <= 100:
            raise ValueError(f"rate_hz = {rate}: must be above 0 and at most 100")
        self._period = 1 / rate
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._task: asyncio.Task[None] | None = None
        self._file: TextIO | None = None
        self.errors = 0
        """Samples that could not be taken or written; telemetry never stops a measurement."""

    async def start(self, path: str) -> dict[str, Any]:
        """Begin sampling into a file (appended to); returns the identity of the node and what is missing."""
        await self.close()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: ASYNC230,SIM115  # one open a session
        identity = {**self._machine.identity(), "rate_hz": 1 / self._period}
        # Both clocks, so that samples can be put beside logs.
        at = {"utc_ns": self._clock.utc_ns(), "t_ns": self._clock.monotonic_ns()}
        self._write({"type": "node", **at, **identity})
        await self._take()
        self._task = asyncio.create_task(self._run(), name="telemetry")
        return identity

    async def window(self, start_ns: int, end_ns: int) -> dict[str, float | None]:
        """Means over a window of CLOCK_MONOTONIC. None: not sampled, or not before and after the window.

        `cpu_load` and `steal` are shares of all CPUs, `cpu_max_load` that of the busiest one; `joules` is
        the GPUs' where there are any, else the CPU packages'.
        """
        if self._task is not None:
            await self._take()  # a sample at or after the end, so that the window is bracketed
        held = list(self._samples)
        first, last = bisect_right(held, start_ns, key=_time), bisect_left(held, end_ns, key=_time)
        samples = held[max(first - 1, 0) : last + 1]
        total = _grown(samples, "cpu_total", start_ns, end_ns)
        busy = _grown(samples, "cpu_busy", start_ns, end_ns)
        steal = _grown(samples, "cpu_steal", start_ns, end_ns)
        names = {n for s in samples for n in s.counters if n.startswith("gpu") and n.endswith("_joules")}
        gpu_joules = [_grown(samples, n, start_ns, end_ns) for n in sorted(names)]
        joules = _grown(samples, "cpu_joules", start_ns, end_ns)
        if gpu_joules:
            known = [j for j in gpu_joules if j is not None]
            joules = sum(known) if len(known) == len(gpu_joules) else None
        out: dict[str, float | None] = dict(zip(sorted(names), gpu_joules, strict=True))
        out |= {
            "cpu_load": _share(busy, total),
            "cpu_max_load": _busiest(samples, start_ns, end_ns),
            "steal": _share(steal, total),
            "joules": joules,
        }
        inside = samples[bisect_left(samples, start_ns, key=_time) : bisect_right(samples, end_ns, key=_time)]
        for name in sorted({"cpu_mhz", "load1", "mem_used_mib"} | {n for s in inside for n in s.gauges}):
            values = [s.gauges[name] for s in inside if name in s.gauges]
            out[name] = sum(values) / len(values) if values else None
        return out

    async def close(self) -> None:
        """Stop sampling and flush. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    async def _run(self) -> None:
        due = self._clock.monotonic_ns()
        while True:
            # A late sample does not shift the later ones, and missed ones are not made up for.
            now = self._clock.monotonic_ns()
            due = max(due + int(self._period * 1e9), now)
            await self._clock.sleep((due - now) / 1e9)
            await self._take()

    async def _take(self) -> None:
        now = self._clock.monotonic_ns()
        try:
            if self._machine.gpus:
                sample = await asyncio.to_thread(self._machine.sample, now)
            else:
                sample = self._machine.sample(now)
        except (OSError, ValueError, KeyError):
            self.errors += 1
            return
        last = self._samples[-1].t_ns if self._samples else -1
        if sample.t_ns <= last:
            return
        self._samples.append(sample)
        self._write(
            {
                "type": "sample",
                "t_ns": sample.t_ns,
                "counters": sample.counters,
                "gauges": sample.gauges,
                "per_cpu": sample.per_cpu,
            }
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError):
            self.errors += 1


def _time(sample: Sample) -> int:
    return sample.t_ns


def _at(points: list[tuple[int, float]], t_ns: int) -> float | None:
    """Value at a time, interpolated between the samples around it; None outside of them."""
    i = bisect_left(points, t_ns, key=lambda p: p[0])
    if i < len(points) and points[i][0] == t_ns:
        return points[i][1]
    if i in {0, len(points)}:
        return None
    (t0, v0), (t1, v1) = points[i - 1], points[i]
    return v0 + (v1 - v0) * (t_ns - t0) / (t1 - t0)


def _between(points: list[tuple[int, float]], start_ns: int, end_ns: int) -> float | None:
    if end_ns <= start_ns:
        return None
    first, last = _at(points, start_ns), _at(points, end_ns)
    if first is None or last is None or last < first:
        return None
    return last - first


def _grown(samples: list[Sample], name: str, start_ns: int, end_ns: int) -> float | None:
    points = [(s.t_ns, s.counters[name]) for s in samples if name in s.counters]
    return _between(points, start_ns, end_ns)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else min(1.0, part / whole)


def _busiest(samples: list[Sample], start_ns: int, end_ns: int) -> float | None:
    width = min((len(s.per_cpu) for s in samples), default=0)
    loads = []
    for cpu in range(width):
        busy = _between([(s.t_ns, s.per_cpu[cpu][0]) for s in samples], start_ns, end_ns)
        total = _between([(s.t_ns, s.per_cpu[cpu][1]) for s in samples], start_ns, end_ns)
        share = _share(busy, total)
        if share is None:
            return None
        loads.append(share)
    return max(loads, default=None)
