"""The engine suite on recorded bytes of SGLang 0.5.14 (H200) and vLLM 0.32.0 (CPU), played over real sockets.

The adapter builds its real command line; the replay server takes it in place of the engine, refuses what the
version does not know, and is booted, watched, killed and stopped by the real host.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from campaign.engines.base import BootOrder, Launch
from campaign.engines.sglang import SGLang
from campaign.engines.vllm import VLLM
from campaign.spec.models import Arm, Model, Speculation
from campaign.testing.conformance_engine import EngineCase, EngineSuite

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"


def replayed(launch: Launch, recording: str, module: str) -> Launch:
    """The engine's command line behind the replay server's."""
    at = launch.argv.index(module) + 1
    argv = (sys.executable, "-I", "-m", "campaign.testing.replay_server", str(FIXTURES / recording))
    return replace(launch, argv=(*argv, *launch.argv[at:]))


class ReplayedSGLang(SGLang):
    def launch(self, order: BootOrder, port: int) -> Launch:
        name = "base" if order.config.speculation is None else "ngram4"
        return replayed(super().launch(order, port), f"sglang_{name}.recording.json", "sglang.launch_server")


class ReplayedVLLM(VLLM):
    def launch(self, order: BootOrder, port: int) -> Launch:
        return replayed(super().launch(order, port), "vllm_cpu.recording.json", "vllm.entrypoints.cli.main")


BASE = Arm(
    engine="sglang", model="m", context=8192, attention_backend="triton", graph_sizes=(1, 2, 4, 8),
    prefill_graphs=False, max_running_requests=8, memory_fraction=0.6, load_format="dummy", prefix_cache=True,
    extra_args=("--sampling-backend", "pytorch", "--grammar-backend", "none", "--decode-log-interval", "20",
                "--random-seed", "1"),
)  # fmt: skip


class TestSGLang0514(EngineSuite):
    def case(self) -> EngineCase:
        return EngineCase(
            engine=ReplayedSGLang(),
            arm=BASE,
            models={"m": Model(hub="org/tiny", revision="abc")},
            speculative=BASE.model_copy(
                update={"speculation": Speculation(method="ngram", depth=3, breadth=1)}
            ),
            refused={
                "entries of `models`: m": BASE.model_copy(update={"model": "other"}),
                "--tp-size": BASE.model_copy(update={"tp": 2, "extra_args": ("--tp-size", "4")}),
                "not one of sglang": BASE.model_copy(
                    update={"speculation": Speculation(method="suffix", depth=3)}
                ),
            },
            pages=(
                ((FIXTURES / "sglang_ngram4.metrics_before.txt").read_text(), {"verify_steps": 162, "generated": 264, "drafts": None}),
                ((FIXTURES / "sglang_base.metrics_before.txt").read_text(), {"verify_steps": None}),
            ),
            life_tokens=64,
            lengths=(64,),
            stream_tokens=48,
            extra={"return_meta_info": True},
            grows=13744,
        )  # fmt: skip


class TestVLLM0320(EngineSuite):
    """No answer outside a stream and no second page were recorded, so no request can be told by its counters."""

    def case(self) -> EngineCase:
        arm = Arm(engine="vllm", model="smol", max_running_requests=1, prefix_cache=False)
        return EngineCase(
            engine=ReplayedVLLM(),
            arm=arm,
            models={"smol": Model(hub="org/smol", revision="abc")},
            refused={
                "not one of vllm": arm.model_copy(
                    update={"speculation": Speculation(method="nextn", depth=3)}
                ),
                "--max-num-seqs": arm.model_copy(update={"extra_args": ("--max-num-seqs", "3")}),
            },
            pages=(
                ((FIXTURES / "vllm_cpu_metrics.txt").read_text(), {"drafts": 17, "drafted": 51, "accepted": 27, "generated": 112}),
            ),
            life_tokens=48,
            stream_tokens=48,
            grows=0,
            answers=False,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["sglang_base", "sglang_ngram4", "vllm_cpu"])
def test_every_file_of_a_recording_is_there(name: str) -> None:
    from campaign.testing.replay_server import Recording

    recording = Recording.load(FIXTURES / f"{name}.recording.json")
    named = [*recording.pages.values(), *recording.metrics, *recording.answers.values()]
    assert named
    assert all(recording.bytes(file) for file in named)
