"""A real S3 server process (moto's) on loopback, on a port that the system chose."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BUCKET = "campaign-test"


class Server:
    """Killed and started again EMPTY on the same port: its state is in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: int = s.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, bucket: bool = True) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
            )
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert self._process.poll() is None, (self._folder / "server.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.05)
        if bucket:
            self.client().create_bucket(Bucket=BUCKET)

    def client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def store(self, port: int | None = None, prefix: str = "p") -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port or self.port}&region=us-east-1"


@pytest.fixture(scope="session")
def s3_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def s3(s3_session: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return s3_session


@pytest.fixture
def s3_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: Server) -> Iterator[Server]:
    """One for this test only: it may be killed."""
    server = Server(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()
