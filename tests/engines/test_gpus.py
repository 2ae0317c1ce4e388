"""GPU memory before and after a boot, and strangers on our GPUs. NVML itself is read on a GPU machine only."""

import os
from pathlib import Path

import pytest

from campaign.engines import gpus
from campaign.engines.base import BootOrder
from campaign.engines.gpus import Use
from campaign.engines.host import LocalEngineHost
from campaign.errors import EngineError
from campaign.spec.models import Arm


def test_without_a_driver_nothing_is_claimed() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    assert gpus.look([0]) is None
    assert gpus.foreign(None, ()) == {}
    assert gpus.wait_released([0], None)


def test_only_live_strangers_count(tmp_path: Path) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "11").mkdir()
    use = Use((1000.0,), {10: 600.0, 11: 200.0, 999: 100.0})
    # 999 may be a number of the host that this container sits on: it says nothing.
    assert gpus.foreign(use, {10}, tmp_path) == {11: 200.0}


def test_memory_is_waited_for_and_given_up_on() -> None:
    levels = iter([40_000.0, 40_000.0, 900.0])
    slept: list[float] = []
    before = Use((500.0,), {})
    done = gpus.wait_released([0], before, look_at=lambda _: Use((next(levels),), {}), sleep=slept.append)
    assert done
    assert len(slept) == 2
    stuck = gpus.wait_released(
        [0], before, look_at=lambda _: Use((40_000.0,), {}), timeout_s=1.0, sleep=lambda _: None
    )
    assert not stuck


class Nothing:
    name = "llamacpp"

    def preflight(self, *_args: object) -> None:
        pass


async def test_a_stranger_on_our_gpus_stops_the_boot() -> None:
    def look(indexes):
        return Use(tuple(900.0 for _ in indexes), {os.getppid(): 900.0})

    host = LocalEngineHost(engines=lambda _: Nothing(), look_at=look)  # type: ignore[arg-type,return-value]  # never launched
    order = BootOrder("b", "a", "0" * 16, Arm(engine="llamacpp"), {}, "p0", (0, 1), (), "x", 1.0)
    with pytest.raises(EngineError, match=rf"GPU 0, 1: pid {os.getppid()} \(900 MiB\)") as caught:
        await host.boot(order)
    assert caught.value.kind == "not_effective"


class Nvml:
    """Two GPUs of one node; the second refuses its power limit."""

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self):
        return "580.159.04"

    def nvmlSystemGetCudaDriverVersion(self):
        return 13000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        if handle == 1:
            raise RuntimeError("not supported")
        return 700_000

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50


def test_what_a_boot_says_of_its_gpus() -> None:
    first, second = gpus.identity((0, 1), Nvml())
    assert (first["uuid"], first["driver"], first["cuda_driver"], first["power_limit_w"]) == (
        "GPU-0",
        "580.159.04",
        13000,
        700.0,
    )
    assert first["links"] == {"1": "system"}
    assert (second["power_limit_w"], second["max_sm_mhz"]) == (None, None)
    assert gpus.identity((), None) == []
