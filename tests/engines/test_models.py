"""Weights before the first anchor: real hashes of real files, mirrors in folders and in a bucket over a socket."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.engines import gpu, models
from campaign.errors import PreflightError
from campaign.spec.models import Model

SHARDS = {"config.json": b"{}", "model-1.safetensors": b"a" * 1000, "model-2.safetensors": b"b" * 1000}


def write(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    for name, data in (files or SHARDS).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def of_lines(files: dict[str, bytes]) -> str:
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def hub_cache(root: Path, revision: str = "rev1") -> Path:
    """A cache of the hub: blobs by digest, a snapshot of links."""
    repository = root / "models--org--big"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, data in SHARDS.items():
        digest = hashlib.sha256(data).hexdigest()
        (repository / "blobs" / digest).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / digest)
    return snapshot


def test_every_file_is_hashed_and_progress_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    model = Model(path=str(write(tmp_path / "m")), verify="full", sha256=of_lines(SHARDS))
    found = models.prepare("big", model, said.append)
    assert found.sha256 == of_lines(SHARDS)
    assert found.files == {n: hashlib.sha256(d).hexdigest() for n, d in SHARDS.items()}
    assert (found.verified, found.bytes, found.source) == ("full", 2002, "path")
    assert len(said) == 3
    assert said[0].startswith("hashing big 0.0/")


def test_one_flipped_byte_is_refused_with_both_digests(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    pin = of_lines(SHARDS)
    (folder / "model-2.safetensors").write_bytes(b"b" * 999 + b"c")
    now = of_lines({**SHARDS, "model-2.safetensors": b"b" * 999 + b"c"})
    with pytest.raises(PreflightError) as caught:
        models.prepare("big", Model(path=str(folder), verify="full", sha256=pin))
    assert pin in str(caught.value)
    assert now in str(caught.value)
    assert caught.value.exit_code == 2
    # By size alone they are the same: that is what `size` means.
    assert models.prepare("big", Model(path=str(folder))).verified == "size"


def test_a_hub_cache_names_its_blobs_by_digest(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    model = Model(hub="org/big", revision="rev1", cache=str(tmp_path), verify="full")
    found = models.prepare("big", model)
    assert (found.source, found.path, found.verified) == ("cache", str(snapshot), "full")
    assert gpu.ref({"big": model}, "big") == gpu.Ref(str(snapshot), None)
    blob = (snapshot / "model-1.safetensors").resolve()
    blob.write_bytes(b"x" * 1000)
    with pytest.raises(
        PreflightError, match=rf"should have {blob.name} and has {hashlib.sha256(b'x' * 1000).hexdigest()}"
    ):
        models.prepare("big", model)


@pytest.mark.parametrize("where", ["", "org/big", "big"])
def test_a_node_folder_holds_the_weights_in_one_of_the_usual_places(tmp_path: Path, where: str) -> None:
    write(tmp_path / where)
    model = Model(hub="org/big", revision="rev1", cache=str(tmp_path))
    assert models.folder(model) == tmp_path / where
    shutil.rmtree(tmp_path)
    assert models.folder(model) is None
    with pytest.raises(PreflightError, match="mount the volume"):
        models.prepare("big", model)


def test_what_is_not_there_yet_cannot_be_hashed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = Model(hub="org/big", revision="rev1")
    assert models.prepare("big", model).source == "hub"
    with pytest.raises(PreflightError, match="not on this node yet"):
        models.prepare("big", model.model_copy(update={"verify": "full"}))
    hub_cache(tmp_path)
    assert models.prepare("big", model.model_copy(update={"verify": "full"})).verified == "full"
    (tmp_path / "models--org--big" / "blobs" / "x.incomplete").write_bytes(b"")
    assert models.prepare("big", model).path is None


def test_a_copy_that_stopped_short_is_told_by_its_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"config.json": b"{}", "a.safetensors": b"x" * 1_000_000})
    assert models.prepare("big", Model(path=str(folder), gb=0.001)).bytes == 1_000_002
    with pytest.raises(PreflightError, match="finish the copy"):
        models.prepare("big", Model(path=str(folder), gb=0.002))


@pytest.fixture
def bucket(monkeypatch, tmp_path: Path) -> Iterator[object]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="weights")
    for name, data in SHARDS.items():
        client.put_object(Bucket="weights", Key=f"big/{name}", Body=data)
    yield client
    client.close()
    server.stop()


def test_a_bucket_is_copied_once_and_hashed(bucket, monkeypatch) -> None:
    model = Model(
        hub="org/big", revision="rev1", cache="s3://weights/big", verify="full", sha256=of_lines(SHARDS)
    )
    assert models.folder(model) is None
    said: list[str] = []
    found = models.prepare("big", model, said.append)
    assert found.sha256 == of_lines(SHARDS)
    assert sum(s.startswith("fetching big") for s in said) == 3
    assert gpu.ref({"big": model}, "big").name == found.path
    said.clear()
    models.prepare("big", model, said.append)
    assert not any(s.startswith("fetching") for s in said)
    # An interrupted copy goes on: what is whole is kept, the rest is fetched.
    target = Path(str(found.path))
    (target / "campaign-model.txt").unlink()
    (target / "model-1.safetensors").write_bytes(b"a" * 10)
    said.clear()
    assert models.prepare("big", model, said.append).sha256 == of_lines(SHARDS)
    assert sum(s.startswith("fetching big") for s in said) == 1
    # No room: refused before a byte is copied.
    shutil.rmtree(target)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(PreflightError, match="GiB free"):
        models.prepare("big", model)
    empty = model.model_copy(update={"cache": "s3://weights/none"})
    with pytest.raises(PreflightError, match="holds no file"):
        models.prepare("big", empty)
    with pytest.raises(PreflightError, match="check bucket, region and credentials"):
        models.prepare("big", model.model_copy(update={"cache": "s3://no-such-bucket/x"}))
    with pytest.raises(PreflightError, match="only s3://"):
        models.prepare("big", model.model_copy(update={"cache": "gs://weights/big"}))


SPEC = """\
version: 1
campaign: pinned
budget: {{cap_usd: 1}}
nodes: {{here: {{provider: local, usd_per_hour: 1, max_hours: 0.2}}}}
models: {{big: {{path: "{path}", verify: full, sha256: {pin}}}}}
arms: {{a: {{engine: command, model: big, command: {{argv: ["{{python}}", "{{model_path}}", "{{port}}"]}}}}}}
workloads: {{w: {{pack: quickstart-chat, n: 2, max_tokens: 4}}}}
anchor: {{arm: a, workload: w, drift_delta: 0.5}}
pairs: {{aa: {{kind: aa, a: a, workload: w, primary: decode_tok_s, boots: 2}}}}
sessions: {{main: {{node: here, pairs: [aa]}}}}
ray: {{mode: inline}}
store: {store}
"""


def test_a_run_on_other_weights_ends_before_its_first_anchor(tmp_path: Path, monkeypatch) -> None:
    from click.testing import CliRunner

    from campaign.cli import cli
    from campaign.store.run import open_run

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = write(tmp_path / "m")
    pin, now = of_lines(SHARDS), of_lines({**SHARDS, "config.json": b"[]"})
    (folder / "config.json").write_bytes(b"[]")
    file = tmp_path / "e.yaml"
    file.write_text(SPEC.format(path=folder, pin=pin, store=tmp_path / "results"))
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert result.exit_code == 2, result.output
    said = "".join(result.output.split())
    assert pin in said
    assert now in said
    run = open_run(None, tmp_path / "results")
    assert run.state().boots == {}
    assert not list((run.dir.root / "logs").glob("*.log"))
