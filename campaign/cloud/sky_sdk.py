"""SkyPilot's SDK (0.14), called from threads, its errors sorted by what to do next.

`import sky` succeeds on an empty folder of that name: the module is asked for `launch`. A request id is lost when
the API server restarts (404): what can be asked again without harm is asked again, what cannot is looked up.
"""

import asyncio
import contextvars
import functools
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from campaign.errors import ProviderError, UserError

READ_TRIES = 4
CALL_S = 900.0
"""The longest a call may take that is no launch: `down` was measured at 81 s, clouds take minutes."""


@functools.cache
def load() -> Any:
    """The `sky` module. Raises UserError where SkyPilot is not installed."""
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    try:
        import sky
    except ImportError as error:
        raise UserError(f"SkyPilot is not installed ({error}). Fix: pip install 'campaign[sky]'") from None
    if not hasattr(sky, "launch"):
        raise UserError(
            "`import sky` found a folder that is not SkyPilot. Fix: pip install 'campaign[sky]', and no __init__.py in sky/"
        )
    return sky


_KINDS = {
    **dict.fromkeys(
        (
            "InvalidCloudCredentials", "CloudUserIdentityError", "ApiServerAuthenticationError", "NoCloudAccessError",
            "PermissionDeniedError", "NoWorkspaceAccessError", "ClusterOwnerIdentityMismatchError",
        ),
        "credentials",
    ),
    **dict.fromkeys(("ClusterSetUpError", "CommandFailureException", "ProvisionPrechecksError"), "setup"),
    **dict.fromkeys(("ClusterDoesNotExist", "ClusterNotUpError"), "preempted"),
    **dict.fromkeys(("NotSupportedError", "UserRequestRejectedByPolicy"), "refused"),
}  # fmt: skip


def kind_of(error: BaseException) -> str:
    """One of ProviderError's kinds: what came, sorted by what to do next."""
    name, text = type(error).__name__, str(error).lower()
    if name in _KINDS:
        return _KINDS[name]
    if name == "ResourcesUnavailableError":
        return _unavailable(error, text)
    if name == "CommandError":
        return "preempted" if "expired" in text else "unreachable"
    return "refused" if isinstance(error, (ValueError, TypeError)) else "unreachable"


def _unavailable(error: BaseException, text: str) -> str:
    history = " ".join(
        f"{type(e).__name__} {e}".lower() for e in getattr(error, "failover_history", ()) or ()
    )
    if any(word in text + history for word in ("quota", "limitexceeded", "limit exceeded")):
        return "quota"
    never = ("catalog does not contain", "does not exist", "not supported")
    return "refused" if not history and any(word in text for word in never) else "capacity"


def is_missing(error: BaseException) -> bool:
    """Whether SkyPilot says that it has no such cluster."""
    return type(error).__name__ == "ClusterDoesNotExist"


def _transient(error: BaseException) -> bool:
    name = type(error).__name__
    return name in {"ApiServerConnectionError", "ServerTemporarilyUnavailableError", "ConnectionError", "RequestInterruptedError",
                    "ReadTimeout", "ConnectTimeout", "ChunkedEncodingError"} or "404" in str(error)  # fmt: skip


def retried(call: Callable[[], Any]) -> Any:
    """For calls that change nothing: again after an API server restart, a lost request or a broken line."""
    for attempt in Retrying(
        stop=stop_after_attempt(READ_TRIES),
        wait=wait_exponential(multiplier=1, max=10),
        retry=retry_if_exception(_transient),
        reraise=True,
    ):
        with attempt:
            return call()
    raise AssertionError("unreachable")


async def in_thread(call: Callable[[], Any], what: str, limit_s: float = CALL_S) -> Any:
    """Run a blocking call; its errors come out as ProviderError.

    SkyPilot waits for its server without limit. A call that has no answer within `limit_s` counts as unreachable; its
    thread is left behind and keeps no process alive.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await _apart(call)
    except (ProviderError, UserError):
        raise
    except TimeoutError as error:
        if not limit.expired():
            raise ProviderError("unreachable", f"{what}: TimeoutError: {_short(error)}") from error
        raise ProviderError("unreachable", f"{what}: no answer within {limit_s:.0f} s") from None
    except Exception as error:
        raise ProviderError(kind_of(error), f"{what}: {type(error).__name__}: {_short(error)}") from error


async def _apart(call: Callable[[], Any]) -> Any:
    """As `asyncio.to_thread`, in a daemon thread of its own: a loop that ends waits for the executor's threads."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def give(result: Any, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as failed:
            # A future refuses to carry a StopIteration, and would never be done.
            error = RuntimeError(repr(failed)) if isinstance(failed, StopIteration) else failed
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(give, result, error)

    threading.Thread(target=work, name="skypilot", daemon=True).start()
    return await answer


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def slurm_clusters() -> list[str]:
    """Slurm clusters this account can log in to, from ~/.slurm/config."""
    try:
        text = Path(os.path.expanduser("~/.slurm/config")).read_text(encoding="utf-8")  # noqa: PTH111  # HOME may be set
    except OSError:
        return []
    words = (line.split() for line in text.splitlines())
    return [w[1] for w in words if len(w) > 1 and w[0].lower() == "host" and "*" not in w[1]]


def slurm(cluster: str, command: str) -> str:
    """A command on a Slurm login node: the scheduler's own word, past SkyPilot. Raises ProviderError."""
    config = os.path.expanduser("~/.slurm/config")  # noqa: PTH111  # HOME may be set
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]  # fmt: skip
    try:
        done = subprocess.run(
            ["ssh", "-F", config, *options, cluster, command],
            capture_output=True, text=True, timeout=40, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError("unreachable", f"Slurm {cluster}: {error}") from error
    if done.returncode != 0:
        raise ProviderError("unreachable", f"Slurm {cluster}: {done.stderr.strip()[-200:]}")
    return done.stdout


def version() -> str:
    """SkyPilot's version."""
    return str(load().__version__)


def cost_report() -> dict[str, float]:
    """Cluster name -> dollars, as SkyPilot reports them. Raises ProviderError."""
    sky = load()
    try:
        rows = retried(lambda: sky.get(sky.cost_report()))
    except Exception as error:
        raise ProviderError(kind_of(error), f"cost report: {_short(error)}") from error
    found: dict[str, float] = {}
    for row in rows:
        name, total = str(row.get("name")), row.get("total_cost")
        if isinstance(total, (int, float)):
            found[name] = found.get(name, 0.0) + float(total)
    return found
