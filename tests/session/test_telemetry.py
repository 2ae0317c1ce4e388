"""Telemetry: windows over known counters, the real machine, and what sampling costs."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.cloud.local import machine_id as node_name
from campaign.session.ports import Telemetry
from campaign.session.telemetry import HostTelemetry, Machine, Sample
from campaign.testing.clock import VirtualClock

S = 1_000_000_000


class Known(Machine):
    """A machine whose load is a function of time: half busy, then idle, at a frequency that steps."""

    def __init__(self) -> None:
        super().__init__(gpus=False)

    def sample(self, t_ns: int) -> Sample:
        t = t_ns / S
        busy = min(t, 10) * 100
        return Sample(
            t_ns,
            {"cpu_total": t * 200, "cpu_busy": busy, "cpu_steal": t * 2, "cpu_joules": t * 50},
            {"cpu_mhz": 2000.0 if t < 10 else 1000.0, "load1": 1.0},
            ((busy, t * 100), (0.0, t * 100)),
        )


async def test_windows_of_a_known_machine(tmp_path: Path) -> None:
    clock = VirtualClock()
    telemetry = HostTelemetry(clock, Known(), rate_hz=2)
    assert isinstance(telemetry, Telemetry)
    path = tmp_path / "t" / "s.jsonl"
    identity = await telemetry.start(str(path))
    assert identity["cores"] >= 1
    await clock.sleep(20)
    first = await telemetry.window(int(2.25 * S), int(7.75 * S))
    assert first["cpu_load"] == pytest.approx(0.5)
    assert first["cpu_max_load"] == pytest.approx(1.0)
    assert first["steal"] == pytest.approx(0.01)
    assert first["joules"] == pytest.approx(50 * 5.5)
    assert first["cpu_mhz"] == 2000.0
    idle = await telemetry.window(12 * S, 15 * S)
    assert idle["cpu_load"] == 0.0
    assert idle["cpu_mhz"] == 1000.0
    across = await telemetry.window(9 * S, 11 * S)
    assert across["cpu_load"] == pytest.approx(0.25, abs=0.01)
    await telemetry.close()
    await telemetry.close()
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert lines[0]["type"] == "node"
    samples = [x for x in lines if x["type"] == "sample"]
    assert 39 <= len(samples) <= 43
    gaps = {b["t_ns"] - a["t_ns"] for a, b in pairwise(samples)}
    assert max(gaps) <= S // 2


async def test_a_window_that_was_not_sampled_is_unknown(tmp_path: Path) -> None:
    clock = VirtualClock()
    telemetry = HostTelemetry(clock, Known(), rate_hz=2)
    clock.advance(5)
    await telemetry.start(str(tmp_path / "t.jsonl"))
    await clock.sleep(5)
    before = await telemetry.window(1 * S, 6 * S)
    assert before["cpu_load"] is None
    assert before["joules"] is None
    ahead = await telemetry.window(8 * S, 60 * S)
    assert ahead["cpu_load"] is None
    empty = await telemetry.window(7 * S, 7 * S)
    assert empty["cpu_load"] is None
    await telemetry.close()


async def test_a_window_shorter_than_a_sample_uses_the_bracket(tmp_path: Path) -> None:
    clock = VirtualClock()
    telemetry = HostTelemetry(clock, Known(), rate_hz=1)
    await telemetry.start(str(tmp_path / "t.jsonl"))
    await clock.sleep(5.3)
    short = await telemetry.window(int(5.1 * S), int(5.2 * S))
    assert short["cpu_load"] == pytest.approx(0.5)
    assert short["cpu_mhz"] is None
    await telemetry.close()


async def test_a_disk_that_is_full_does_not_stop_a_measurement(tmp_path: Path) -> None:
    clock = VirtualClock()
    telemetry = HostTelemetry(clock, Known(), rate_hz=2)
    await telemetry.start("/dev/full")
    await clock.sleep(2)
    assert telemetry.errors >= 3
    assert (await telemetry.window(0, 1 * S))["cpu_load"] == pytest.approx(0.5)
    await telemetry.close()


@pytest.mark.parametrize("rate", [0, -1, 101, float("nan")])
def test_a_rate_that_makes_no_sense_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_hz"):
        HostTelemetry(VirtualClock(), Known(), rate_hz=rate)


def machine_id() -> str:
    path = Path("/etc/machine-id")
    return path.read_text().strip() if path.exists() else "no machine id here"


async def test_this_machine(tmp_path: Path) -> None:
    telemetry = HostTelemetry(rate_hz=50)
    identity = await telemetry.start(str(tmp_path / "t.jsonl"))
    start = time.monotonic_ns()
    deadline = time.process_time() + 0.15
    while time.process_time() < deadline:  # noqa: ASYNC110  # burning CPU is the point
        await asyncio.sleep(0)  # load of a known kind: one busy core
    window = await telemetry.window(start, time.monotonic_ns())
    await telemetry.close()
    assert 0 < window["cpu_load"] <= 1
    assert 0.2 < window["cpu_max_load"] <= 1
    assert 0 <= window["steal"] <= 1
    assert identity["node"] == node_name()  # the name that the ledger has for it
    assert identity["memory_mib"] > 0
    assert machine_id() not in json.dumps(identity)


def test_a_sample_costs_under_one_percent_of_a_core_at_two_hertz() -> None:
    machine = Machine(gpus=False)
    machine.sample(0)
    before = time.process_time()
    for i in range(50):
        machine.sample(i + 1)
    assert (time.process_time() - before) / 50 * 2 < 0.01


def test_energy_counters_that_wrap(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "max_energy_range_uj").write_text("1000000\n")
    machine = None
    seen = []
    for value in (900_000, 950_000, 50_000, 60_000):
        (zone / "energy_uj").write_text(f"{value}\n")
        machine = machine or Machine(rapl=tmp_path, gpus=False)
        seen.append(machine.sample(0).counters["cpu_joules"])
    assert [b - a for a, b in pairwise(seen)] == pytest.approx([0.05, 0.1, 0.01])


@given(st.floats(0, 19), st.floats(0.01, 10), st.floats(0.01, 10))
def test_windows_add_up(start: float, first: float, second: float) -> None:
    """Energy of two windows is the energy of both together, wherever the edges fall."""
    telemetry = HostTelemetry(VirtualClock(), Known(), rate_hz=2)
    telemetry._samples.extend(Known().sample(int(i * 0.5 * S)) for i in range(90))
    edges = [int(x * S) for x in (start, start + first, start + first + second)]

    async def joules(a: int, b: int) -> float:
        return (await telemetry.window(a, b))["joules"]

    async def all_three() -> tuple[float, float, float]:
        return await joules(*edges[:2]), await joules(*edges[1:]), await joules(edges[0], edges[2])

    one, two, both = asyncio.run(all_three())
    assert one + two == pytest.approx(both)
