"""SkyPilot's errors, sorted by what to do next; SSH file transfer keeps to its folder."""

import io
import tarfile
import threading
from decimal import Decimal
from pathlib import Path

import pytest

from campaign.cloud import sky_sdk
from campaign.cloud.shell import NodeShell, unpack
from campaign.cloud.sky import _infra
from campaign.errors import ProviderError, UserError
from campaign.spec.models import Candidate, SkyNode


def error(name: str, text: str = "", *history: str) -> Exception:
    made: Exception = type(name, (Exception,), {})(text)
    if history:
        made.failover_history = [error(h) for h in history]  # type: ignore[attr-defined]  # as SkyPilot's has
    return made


@pytest.mark.parametrize(
    ("name", "text", "history", "kind"),
    [
        ("ResourcesUnavailableError", "Failed to acquire resources", ("ResourcesUnavailableError",), "capacity"),
        ("ResourcesUnavailableError", "Catalog does not contain any instances", (), "refused"),
        ("ResourcesUnavailableError", "Quota exceeded for vCPUs", (), "quota"),
        ("ResourcesUnavailableError", "failed", ("VcpuLimitExceeded",), "quota"),
        ("InvalidCloudCredentials", "", (), "credentials"),
        ("NoCloudAccessError", "", (), "credentials"),
        ("ApiServerConnectionError", "", (), "unreachable"),
        ("RuntimeError", "404 ... not found", (), "unreachable"),
        ("CommandError", "Slurm job 7 has expired", (), "preempted"),
        ("CommandError", "rc 255", (), "unreachable"),
        ("ClusterDoesNotExist", "", (), "preempted"),
        ("ClusterSetUpError", "", (), "setup"),
    ],
)  # fmt: skip
def test_each_failure_has_its_next_step(name: str, text: str, history: tuple[str, ...], kind: str) -> None:
    assert sky_sdk.kind_of(error(name, text, *history)) == kind


def test_value_errors_of_the_client_are_not_repeated() -> None:
    assert sky_sdk.kind_of(ValueError("unknown Slurm cluster")) == "refused"


def test_reads_are_repeated_and_refusals_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)
    calls: list[str] = []

    def lost() -> str:
        calls.append("x")
        if len(calls) < 3:
            raise error("RuntimeError", "404 request not found")
        return "found"

    assert sky_sdk.retried(lost) == "found"
    calls.clear()

    def refused() -> None:
        calls.append("x")
        raise error("InvalidCloudCredentials", "denied")

    with pytest.raises(Exception, match=r"^denied$"):
        sky_sdk.retried(refused)
    assert len(calls) == 1


def archive(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b"])
def test_archive_of_a_node_cannot_leave_the_run_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProviderError, match="outside its folder"):
        unpack(archive(**{name: b"x"}), tmp_path / "run")
    assert not list(tmp_path.rglob("x*"))


def test_links_in_an_archive_are_passed_over(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("rows")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    unpack(out.getvalue(), tmp_path)
    assert not list(tmp_path.iterdir())


async def test_push_tail_and_pull_over_a_line(tmp_path: Path) -> None:
    """The same scripts a node runs, through a local shell in place of ssh."""
    node, here = tmp_path / "node", tmp_path / "here"
    (node / "run" / "rows").mkdir(parents=True)
    shell = NodeShell(["bash", "-c", 'exec bash -c "$0"'], str(node))
    await shell.push({"run/canonical.json": b"{}", "control/0001.json": b"signed"})
    assert (node / "run" / "canonical.json").read_bytes() == b"{}"
    (node / "run" / "rows" / "a b.parquet").write_bytes(b"rows")
    (node / "run" / "journal" / "cells").mkdir(parents=True)
    (node / "run" / "journal" / "cells" / "s~g~a@0.jsonl").write_bytes(b"1\n")
    (node / "run" / "journal" / "s.jsonl").write_bytes(b"one\ntwo\n")
    assert await shell.tail("run/journal/s.jsonl", 4) == (b"two\n", None)
    (node / "exit").write_text("0\n")
    assert await shell.tail("run/journal/s.jsonl", 8) == (b"", 0)
    assert "rows/a b.parquet" in await shell.pull("run", here, everything=False)
    assert not (here / "journal" / "cells").exists()
    assert await shell.pull("run", here, everything=False) == []  # nothing is brought twice
    await shell.pull("run", here, everything=True, session="s")
    assert (here / "journal" / "cells" / "s~g~a@0.jsonl").read_bytes() == b"1\n"
    (node / "run" / "journal" / "cells" / "s~g~a@0.jsonl").unlink()
    for other in ("s2~g~a@0.jsonl", "s.draw2~g~a@0.jsonl"):  # of sessions that run elsewhere at the same time
        (here / "journal" / "cells" / other).write_bytes(b"1\n")
    await shell.pull("run", here, everything=True, session="s")
    assert not (here / "journal" / "cells" / "s~g~a@0.jsonl").exists()
    assert len(list((here / "journal" / "cells").iterdir())) == 2


async def test_dead_line_is_unreachable() -> None:
    # Ended before it has read a byte of what it is given.
    with pytest.raises(ProviderError) as caught:
        await NodeShell(["bash", "-c", "exec 0<&-; exit 255"], "x").run("cat", b"x" * 1_000_000)
    assert caught.value.kind == "unreachable"
    with pytest.raises(ProviderError) as caught:
        await NodeShell(["false"], "x").run("true")
    assert caught.value.kind == "unreachable"
    with pytest.raises(ProviderError, match="no answer in time"):
        await NodeShell(["bash", "-c", "sleep 30"], "x", timeout_s=0.2).run("true")


@pytest.mark.parametrize(
    ("infras", "said"),
    [
        (("aws", "slurm/lab"), "aws,slurm/lab"),
        (("aws", None), ""),  # the second may be anywhere: every scheduler is asked
        ((), ""),
    ],
)
def test_where_a_node_may_be(infras: tuple[str | None, ...], said: str) -> None:
    node = SkyNode(
        provider="sky", accelerators="B200:4", max_usd_per_hour=Decimal(30), max_hours=1,
        any_of=tuple(Candidate(infra=infra) for infra in infras),
    )  # fmt: skip
    assert _infra(node) == said


async def test_a_server_that_does_not_answer_is_unreachable() -> None:
    """And a thread that still waits for it keeps no process alive."""
    never = threading.Event()
    with pytest.raises(ProviderError, match="down: no answer within 0 s") as caught:
        await sky_sdk.in_thread(never.wait, "down", limit_s=0.05)
    assert caught.value.kind == "unreachable"
    (left,) = (t for t in threading.enumerate() if t.name == "skypilot")
    assert left.daemon
    never.set()
    left.join(10)


async def test_answers_and_errors_of_a_thread_come_back() -> None:
    assert await sky_sdk.in_thread(lambda: 7, "price") == 7
    for raised, kind in ((ValueError("x"), "refused"), (TimeoutError("x"), "unreachable")):

        def fail(raised: Exception = raised) -> None:
            raise raised

        with pytest.raises(ProviderError, match=type(raised).__name__) as caught:
            await sky_sdk.in_thread(fail, "price")
        assert caught.value.kind == kind
    with pytest.raises(ProviderError, match="StopIteration"):
        await sky_sdk.in_thread(lambda: next(iter(())), "launch")
    with pytest.raises(UserError):
        await sky_sdk.in_thread(lambda: (_ for _ in ()).throw(UserError("no SkyPilot")), "price")


@pytest.mark.parametrize("everything", [False, True])
async def test_a_plan_that_has_grown_here_is_not_taken_back_by_a_node(
    tmp_path: Path, everything: bool
) -> None:
    """A continuation or an addition made the plan longer; the node has the one it was given, and may write none."""
    node, here = tmp_path / "node" / "run", tmp_path / "here"
    for folder in (node / "rows", here):
        folder.mkdir(parents=True)
    for name in ("plan.json", "canonical.json", "ledger.db"):
        (node / name).write_bytes(b"the node's")
        (here / name).write_bytes(b"ours, and longer than that")
    (node / "rows" / "a.parquet").write_bytes(b"rows")
    shell = NodeShell(["bash", "-c", 'exec bash -c "$0"'], str(node.parent))
    assert await shell.pull("run", here, everything=everything) == ["rows/a.parquet"]
    assert (here / "plan.json").read_bytes() == b"ours, and longer than that"
    assert not (here / "a.parquet").exists()
    unpack(archive(**{"rows/a.parquet": b"rows", "ledger.db": b"x"}), here, frozenset({"rows/a.parquet"}))
    assert (here / "ledger.db").read_bytes() == b"ours, and longer than that"
