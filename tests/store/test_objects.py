"""Objects in a folder and on a real S3 server: one suite, and what befalls a line."""

import asyncio
import itertools
from pathlib import Path
from random import Random

import pytest

from campaign.errors import StoreError, StoreUnreachable, UserError
from campaign.store.objects import FolderObjects, ObjectStore, address, open_objects
from campaign.store.s3 import S3Objects
from campaign.testing.conformance_objects import ObjectsConformance
from campaign.testing.proxy import Proxy, Trouble

_NUMBER = itertools.count()


def on(server, run: str, port: int | None = None, tries: int = 4) -> S3Objects:
    found = address(server.store(port))
    assert found is not None
    return S3Objects(found, f"{found.prefix}/{run}", tries=tries, pause_s=0.01)


class TestFolder(ObjectsConformance):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> ObjectStore:
        return FolderObjects(tmp_path / "objects")


class TestS3(ObjectsConformance):
    @pytest.fixture
    def objects(self, s3) -> ObjectStore:
        return on(s3, f"run{next(_NUMBER)}")


def test_a_folder_shares_a_file_and_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"rows")
    objects = FolderObjects(tmp_path / "o")
    objects.link("data/x", file, b"rows")
    assert (tmp_path / "o/data/x").stat().st_ino == file.stat().st_ino
    file.unlink()
    assert objects.get("data/x") == b"rows"


def test_addresses() -> None:
    assert address("results/") is None
    found = address("s3://my-bucket/a/b/?endpoint=http://127.0.0.1:9&region=eu")
    assert found is not None
    assert (found.bucket, found.prefix, found.endpoint, found.region) == (
        "my-bucket", "a/b", "http://127.0.0.1:9", "eu",
    )  # fmt: skip
    assert address("s3://my-bucket") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        "gs://bucket/x",
        "s3://ab/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/../x",
        "s3://bucket/x?secret=1",
        "s3://bucket/x?endpoint=file:///etc/passwd",
        "s3://bucket/x?endpoint=http://user:pass@host",
        "s3:///x",
    ],
)
def test_addresses_that_are_none(wrong: str) -> None:
    with pytest.raises(UserError, match="Fix: store"):
        address(wrong)


def test_one_prefix_for_each_lease(s3) -> None:
    one, two = (open_objects(s3.store(), "run", lease) for lease in ("s/1.1", "s/1.2"))
    assert one is not None
    assert two is not None
    one.put("k", b"1")
    two.put("k", b"2")
    assert (one.get("k"), two.get("k")) == (b"1", b"2")
    listed = s3.client().list_objects_v2(Bucket="campaign-test", Prefix="p/run/")
    assert [o["Key"] for o in listed["Contents"]] == ["p/run/s~1.1/k", "p/run/s~1.2/k"]


def test_more_keys_than_one_page_holds(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("campaign.store.s3.PAGE", 2)
    objects = on(s3, "pages")
    for n in range(5):
        objects.put(f"k{n}", b"")
    assert objects.keys() == [f"k{n}" for n in range(5)]


def test_bytes_that_changed_on_the_way_are_refused(s3) -> None:
    objects = on(s3, "changed")
    objects.put("k", b"one")
    s3.client().put_object(Bucket="campaign-test", Key="p/changed/k", Body=b"two", Metadata={"sha256": "0"})
    with pytest.raises(StoreError, match="not what was written"):
        objects.get("k")


def test_what_a_cut_upload_left_behind_is_replaced(s3) -> None:
    """A lax server keeps half a body under the key: it is not what its hash says, so it is nobody's object."""
    objects = on(s3, "torn")
    for metadata in ({"sha256": "0" * 64}, {}):
        s3.client().put_object(
            Bucket="campaign-test", Key=f"p/torn/{len(metadata)}", Body=b"on", Metadata=metadata
        )
        objects.put(f"{len(metadata)}", b"one")
        assert objects.get(f"{len(metadata)}") == b"one"


async def test_every_operation_survives_a_line_that_is_cut_and_late(s3) -> None:
    """Cut before the request, in it, in the answer: what was put is there once, whole."""
    rng = Random(3)
    data = bytes(range(256)) * 8

    def trouble(_: int) -> Trouble:
        return Trouble(delay_s=0.01, cut_after=rng.choice([0, 150, 700, 3000, 6000, 8000]))

    async with Proxy(s3.port, trouble) as proxy:
        objects = on(s3, "cut", proxy.port, tries=12)
        await asyncio.to_thread(objects.put, "k", data)
        assert await asyncio.to_thread(objects.get, "k") == data
        assert await asyncio.to_thread(objects.has, "k")
        assert await asyncio.to_thread(objects.keys) == ["k"]
        assert proxy.cut >= 3


async def test_a_put_whose_answer_was_lost_is_made_again(s3) -> None:
    """The server has it; the line is cut before it says so. The same put again is not a conflict."""
    data = b"x" * 4000

    def trouble(n: int) -> Trouble:
        # The whole request passes, the answer does not.
        return Trouble(cut_after=5000 if n == 0 else None)

    async with Proxy(s3.port, trouble) as proxy:
        objects = on(s3, "lost", proxy.port)
        await asyncio.to_thread(objects.put, "k", data)
        assert proxy.cut == 1
    assert on(s3, "lost").get("k") == data


async def test_a_line_that_stays_cut_is_unreachable(s3) -> None:
    async with Proxy(s3.port) as proxy:
        proxy.refuse = True
        with pytest.raises(StoreUnreachable):
            await asyncio.to_thread(on(s3, "dead", proxy.port).put, "k", b"")


def test_a_bucket_that_is_not_there(s3) -> None:
    found = address(s3.store().replace("campaign-test", "no-such-bucket"))
    assert found is not None
    with pytest.raises(StoreUnreachable, match="create bucket no-such-bucket"):
        S3Objects(found, "x", tries=1).put("k", b"")


def test_without_credentials(s3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="no credential"):
        on(s3, "anonymous").put("k", b"")
