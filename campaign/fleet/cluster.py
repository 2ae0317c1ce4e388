"""A Ray cluster of our own: explicit address, own folder, loopback only, and nothing of it left.

Never `auto`: a stale or foreign cluster is not joined by accident. Facts of Ray 2.60 this rests on: a
node whose address is 127.0.0.1 makes every server listen on loopback only, and on Linux the address is
taken as 127.0.0.1 only where clusters are switched off (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0); the
temporary folder must have a short path (unix sockets); usage reporting is off; token authentication is on.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from campaign.errors import RayError, UserError

_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
_STORE_BYTES = 80 * 2**20
"""Nothing large crosses Ray: the smallest object store it accepts comfortably."""
NAMESPACE = "campaign"
SKYPILOT_PORT = "6380"
"""SkyPilot's Ray on a node that it made."""
START_TRIES = 3


class Cluster:
    """Context manager: a running cluster inside, nothing of it outside.

    `address` joins an existing cluster on purpose; that one is never stopped.
    """

    def __init__(self, address: str | None = None) -> None:
        if address in {"auto", "local", ""}:
            raise UserError(
                f"ray.address = {address!r}: name the cluster as host:port. Fix: leave it out for a cluster of our own"
            )
        if address is not None and address.rpartition(":")[2] == SKYPILOT_PORT:
            raise UserError(
                f"ray.address = {address}: that port is SkyPilot's own Ray; joining or stopping it breaks the node. "
                "Fix: leave it out for a cluster of our own"
            )
        self._address = address
        self._folder: str | None = None
        self._sweeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        os.environ.pop("RAY_ADDRESS", None)
        try:
            if self._address is None:
                self._start_own()
            else:
                self._init(address=self._address)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        import ray

        ray.shutdown()
        if self._sweeper is not None:
            assert self._sweeper.stdin is not None
            self._sweeper.stdin.close()
            self._sweeper.wait(30)

    def _start_own(self) -> None:
        if "ray" in sys.modules and any(os.environ.get(key) != value for key, value in _ENV.items()):
            raise RayError(
                f"Ray was imported before its settings were made. Fix: set {_ENV} first, or use `ray: {{mode: inline}}`"
            )
        os.environ.update(_ENV)
        if "ray" not in sys.modules:
            # A token of this cluster alone, not the one Ray would leave in the home folder.
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        token = f"CAMPAIGN_CLUSTER={secrets.token_hex(8)}"
        key, value = token.split("=")
        os.environ[key] = value
        self._folder = tempfile.mkdtemp(prefix="cmp-", dir="/tmp")  # unix sockets need a short path
        self._sweeper = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-E",
                str(Path(__file__).with_name("sweeper.py")),
                self._folder,
                token,
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={},
        )
        self._init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=self._folder,
        )

    def _init(self, **options: Any) -> None:
        import ray
        from tenacity import RetryError, Retrying, retry_if_exception_message, stop_after_attempt

        # Ray gives a node 30 s to start, whatever the machine is busy with. Nothing runs in it yet.
        slow = retry_if_exception_message(match=".*timed out during startup.*")
        try:
            for attempt in Retrying(stop=stop_after_attempt(START_TRIES), retry=slow):
                with attempt:
                    try:
                        ray.init(namespace=NAMESPACE, log_to_driver=False, configure_logging=False, **options)
                    except BaseException:
                        ray.shutdown()
                        raise
        except Exception as error:
            cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
            raise RayError(
                f"Ray did not start: {cause}. Fix: `ray: {{mode: inline}}` runs without it"
            ) from error
