"""From a node's disk through a real S3 server to the run folder: cut lines, a server that forgets, a node that lies."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign.errors import StoreError, StoreUnreachable
from campaign.store.folder import FolderStore
from campaign.store.follow import Follower
from campaign.store.layout import RunDir
from campaign.store.objects import FolderObjects, ObjectStore, address, digest
from campaign.store.s3 import S3Objects
from campaign.store.ship import Shipper, log_key
from campaign.testing.conformance_store import cell, make_row, record
from campaign.testing.proxy import Proxy, Trouble

JOURNAL = "s1.1.jsonl"


def s3_objects(server, run: str, port: int | None = None, tries: int = 4) -> S3Objects:
    found = address(server.store(port))
    assert found is not None
    return S3Objects(found, f"p/{run}", tries=tries, pause_s=0.01)


def shipper(node: Path, remote: ObjectStore) -> Shipper:
    return Shipper(node / "run", FolderObjects(node / "spool"), remote)


def ship(one: Shipper, *, final: bool = False) -> None:
    one.collect(final=final)
    one.push(whole=final)


def follow(remote: ObjectStore, here: Path) -> Follower:
    found = Follower(remote, here, JOURNAL)
    while found.poll():
        pass
    return found


def tree(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    }


def add(node: Path, name: str, data: bytes) -> None:
    path = node / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def work(node: Path, slots: range) -> None:
    """Request rows sealed, a journal that goes on, a log."""
    store = FolderStore(RunDir(node / "run"))
    for slot in slots:
        row = make_row(slot, cell=f"g/a/w/c1/b{slot}", group="g")
        record(cell(store, row), row)
        (file, *_) = cell(store, row).seal()
        add(
            node,
            f"journal/{JOURNAL}",
            json.dumps({"committed": file.path, "sha256": file.sha256}).encode() + b"\n",
        )
        add(node, "logs/boot.log", f"line {slot}\n".encode())


def test_what_was_written_arrives_and_nothing_else(tmp_path: Path, s3) -> None:
    node, here, remote = tmp_path / "node", tmp_path / "here", s3_objects(s3, "whole")
    one = shipper(node, remote)
    work(node, range(2))
    ship(one)
    add(node, "plan.json", b"not a node's to write")
    follower = Follower(remote, here, JOURNAL)
    assert follower.poll()
    assert not follower.poll()
    work(node, range(2, 4))
    add(node, "logs/boot.log", b"no newline yet")
    ship(one)
    assert follower.poll()
    assert b"no newline" not in (here / "logs/boot.log").read_bytes()
    assert not follower.final
    ship(one, final=True)
    assert follower.poll()
    assert follower.final
    expected = {k: v for k, v in tree(node / "run").items() if k != "plan.json"}
    assert tree(here) == expected
    assert [r.slot for r in FolderStore(RunDir(here)).rows()] == [0, 1, 2, 3]


def test_a_file_is_here_before_the_journal_names_it(tmp_path: Path) -> None:
    """Whatever moment the shipper looks: no commit of a round arrives before its rows."""
    node, here = tmp_path / "node", tmp_path / "here"
    remote = FolderObjects(tmp_path / "remote")
    one, follower = shipper(node, remote), Follower(remote, here, JOURNAL)
    for slot in range(4):
        work(node, range(slot, slot + 1))
        ship(one)
        while follower.poll():
            for line in (here / "journal" / JOURNAL).read_text().splitlines():
                said = json.loads(line)
                assert digest((here / said["committed"]).read_bytes()) == said["sha256"]


def test_open_cells_come_and_go(tmp_path: Path) -> None:
    """Finished requests of a cell that is still open are here too; its journal goes when it is sealed."""
    node, here, remote = tmp_path / "node", tmp_path / "here", FolderObjects(tmp_path / "remote")
    one = shipper(node, remote)
    store = FolderStore(RunDir(node / "run"))
    record(cell(store), make_row(0), make_row(1))
    ship(one)
    follower = Follower(remote, here, JOURNAL)
    assert follower.poll()
    assert [r.slot for r in FolderStore(RunDir(here)).rows()] == [0, 1]
    record(cell(store), make_row(2))
    cell(store).seal()
    ship(one)
    assert follower.poll()
    assert not list((here / "journal/cells").glob("*.jsonl"))
    assert [r.slot for r in FolderStore(RunDir(here)).rows()] == [0, 1, 2]
    # A controller that comes back reads from the start, and finds the same.
    before = tree(here)
    follow(remote, here)
    assert tree(here) == before


def test_a_shipper_that_comes_back_goes_on(tmp_path: Path) -> None:
    node, here, remote = tmp_path / "node", tmp_path / "here", FolderObjects(tmp_path / "remote")
    one = shipper(node, remote)
    work(node, range(2))
    one.collect()  # spooled, not sent: it dies here
    work(node, range(2, 3))
    two = shipper(node, remote)
    assert two.number == 1
    ship(two)
    assert follow(remote, here).number == 2
    assert tree(here) == tree(node / "run")


async def test_a_line_that_is_cut_and_late_all_the_time(
    tmp_path: Path, s3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("campaign.store.s3.READ_S", 2.0)
    rng = Random(7)
    cuts = [rng.choice([0, 300, 900, 2500, 9000, 20_000, 50_000]) for _ in range(1000)]
    node, here = tmp_path / "node", tmp_path / "here"

    def trouble(n: int) -> Trouble:
        # Every connection is cut somewhere; few of them carry a whole file of rows.
        return Trouble(delay_s=0.005 * (n % 3), cut_after=cuts[n % 1000])

    async with Proxy(s3.port, trouble) as proxy:
        one = shipper(node, s3_objects(s3, "bad", proxy.port, tries=2))
        reader = Follower(s3_objects(s3, "bad", proxy.port, tries=2), here, JOURNAL)
        for step in range(2):
            work(node, range(step, step + 1))
            one.collect(final=step == 1)
        end = time.monotonic() + 200
        while time.monotonic() < end:
            for part in (one.push, reader.poll):
                with contextlib.suppress(StoreUnreachable):
                    await asyncio.to_thread(part)
            if reader.final:
                break
        assert proxy.cut > 5
    assert reader.final
    assert tree(here) == tree(node / "run")


def test_a_server_that_lost_everything_is_filled_again(tmp_path: Path, s3_alone) -> None:
    """Killed, started again EMPTY: what it had comes from the node's spool, under the same numbers."""
    node, here = tmp_path / "node", tmp_path / "here"
    remote = s3_objects(s3_alone, "r", tries=1)
    one = shipper(node, remote)
    work(node, range(2))
    ship(one)
    early = Follower(remote, here, JOURNAL)
    assert early.poll()
    s3_alone.kill()
    work(node, range(2, 3))
    one.collect()
    with pytest.raises(StoreUnreachable):
        one.push()
    with pytest.raises(StoreUnreachable):
        early.poll()
    s3_alone.start(bucket=False)
    with pytest.raises(StoreUnreachable, match="create bucket"):
        one.push()
    s3_alone.client().create_bucket(Bucket="campaign-test")
    assert remote.keys() == []
    ship(one)
    assert one.losses == 1
    # Who was in the middle goes on; who begins anew finds everything.
    assert early.poll()
    assert tree(here) == tree(node / "run")
    follow(remote, tmp_path / "anew")
    assert tree(tmp_path / "anew") == tree(node / "run")


def test_single_objects_that_were_lost_are_found_at_the_end(tmp_path: Path, s3) -> None:
    node, remote = tmp_path / "node", s3_objects(s3, "single")
    one = shipper(node, remote)
    work(node, range(2))
    ship(one)
    lost = next(k for k in remote.keys("data/"))
    s3.client().delete_object(Bucket="campaign-test", Key=f"p/single/{lost}")
    ship(one, final=True)
    assert one.losses == 1
    assert follow(remote, tmp_path / "here").final
    assert tree(tmp_path / "here") == tree(node / "run")


@pytest.mark.parametrize(
    "name",
    [
        "ledger.db",
        "plan.json",
        "../x",
        "rows/../ledger.db",
        "/etc/passwd",
        "journal/s2.1.jsonl",
        "journal",
        "rows",
        "",
    ],
)
@pytest.mark.parametrize("part", ["files", "tails", "gone"])
def test_a_node_cannot_write_what_is_not_its_own(tmp_path: Path, name: str, part: str) -> None:
    remote = FolderObjects(tmp_path / "remote")
    sha256 = digest(b"x")
    remote.put(f"data/{sha256}", b"x")
    entry: object = name if part == "gone" else {"path": name, "from": 0, "size": 1, "sha256": sha256}
    commit = {"n": 1, "tails": [], "files": [], "gone": [], "final": False, part: [entry]}
    remote.put(log_key(1), json.dumps(commit).encode())
    here = tmp_path / "run"
    here.mkdir()
    (here / "ledger.db").write_bytes(b"the ledger")
    with pytest.raises(StoreError, match="not its to write"):
        Follower(remote, here, JOURNAL).poll()
    assert tree(tmp_path / "run") == {"ledger.db": b"the ledger"}


def test_a_folder_that_is_a_link_does_not_lead_out(tmp_path: Path) -> None:
    remote, here, outside = FolderObjects(tmp_path / "remote"), tmp_path / "run", tmp_path / "outside"
    here.mkdir()
    outside.mkdir()
    (here / "rows").symlink_to(outside)
    remote.put(f"data/{digest(b'x')}", b"x")
    file = {"path": "rows/x", "size": 1, "sha256": digest(b"x")}
    remote.put(
        log_key(1), json.dumps({"n": 1, "tails": [], "files": [file], "gone": [], "final": False}).encode()
    )
    with pytest.raises(StoreError, match="not its to write"):
        Follower(remote, here, JOURNAL).poll()
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    "data", [b"", b"null", b"{}", b'{"n": 2}', b'{"n": 1, "tails": 1, "files": [], "gone": []}']
)
def test_a_commit_that_is_none(tmp_path: Path, data: bytes) -> None:
    remote = FolderObjects(tmp_path / "remote")
    remote.put(log_key(1), data)
    with pytest.raises(StoreError, match="not a commit"):
        Follower(remote, tmp_path / "run", JOURNAL).poll()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("add"), st.sampled_from(["journal/s1.1.jsonl", "logs/a.log"]), st.binary(max_size=40)
            ),
            st.tuples(
                st.just("file"),
                st.sampled_from(["provenance/a.json", "rows/x.parquet"]),
                st.binary(max_size=40),
            ),
            st.sampled_from(["collect", "push", "lose", "restart", "poll", "reread"]),
        ),
        max_size=25,
    )
)
def test_any_order_of_writes_losses_and_restarts(tmp_path_factory: pytest.TempPathFactory, steps) -> None:
    """Both ends see the same in the end, whatever came in between."""
    base = tmp_path_factory.mktemp("ship")
    node, here, remote = base / "node", base / "here", FolderObjects(base / "remote")
    one, reader = shipper(node, remote), Follower(remote, here, JOURNAL)
    for step in steps:
        match step:
            case ("add", name, data):
                add(node, name, data.replace(b"\n", b" ") + b"\n")
            case ("file", name, data):
                path = node / "run" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.tmp")
                temporary.write_bytes(data)
                temporary.replace(path)
            case "collect":
                one.collect()
            case "push":
                one.push()
            case "lose":
                for key in list(FolderObjects.keys(remote)):
                    (remote.root / key).unlink()
            case "restart":
                one = shipper(node, remote)
            case "reread":
                reader = Follower(remote, here, JOURNAL)
            case "poll":
                with contextlib.suppress(StoreUnreachable):
                    reader.poll()
    ship(one, final=True)
    while reader.poll():
        pass
    assert reader.final
    assert tree(here) == tree(node / "run")


class OneAtATime(FolderObjects):
    """A line that is cut after every put."""

    cut = False

    def put(self, key: str, data: bytes) -> None:
        if self.cut:
            self.cut = False
            raise StoreUnreachable("the line was cut")
        super().put(key, data)
        self.cut = True


def test_a_commit_of_many_objects_gets_through_a_line_that_carries_one_at_a_time(tmp_path: Path) -> None:
    node, here, remote = tmp_path / "node", tmp_path / "here", OneAtATime(tmp_path / "remote")
    one = shipper(node, remote)
    work(node, range(3))
    one.collect(final=True)
    tries = 0
    while one.sent < one.number:
        assert tries < 20
        tries += 1
        with contextlib.suppress(StoreUnreachable):
            one.push()
    assert tries > 3
    assert follow(remote, here).final
    assert tree(here) == tree(node / "run")


def test_a_store_that_lost_half_a_commit_is_filled_again(tmp_path: Path) -> None:
    """Emptied before the first commit was whole: nothing that was sent is believed to be there."""
    node, here, remote = tmp_path / "node", tmp_path / "here", OneAtATime(tmp_path / "remote")
    one = shipper(node, remote)
    work(node, range(2))
    one.collect()
    with pytest.raises(StoreUnreachable):
        one.push()
    for key in FolderObjects.keys(remote):
        (remote.root / key).unlink()
    for _ in range(20):
        with contextlib.suppress(StoreUnreachable):
            one.push()
    assert one.losses == 1
    assert follow(remote, here).number == 1
    assert tree(here) == tree(node / "run")


@pytest.mark.parametrize("kept", [1, 5])
def test_an_append_that_was_cut_short_is_finished(tmp_path: Path, kept: int) -> None:
    """A controller killed in the middle of a write, or a full disk: the same commit is applied again, and whole."""
    node, here, remote = tmp_path / "node", tmp_path / "here", FolderObjects(tmp_path / "remote")
    one = shipper(node, remote)
    add(node, f"journal/{JOURNAL}", b'{"a": 1}\n')
    ship(one)
    add(node, f"journal/{JOURNAL}", b'{"b": 2}\n')
    ship(one)
    follow(remote, here)
    path = here / "journal" / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 9 + kept])
    follow(remote, here)
    assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) - 9] + b"other")
    with pytest.raises(StoreError, match="somebody else"):
        follow(remote, here)
