"""A client in a process of its own, without Ray: calls and answers as pickles over its standard streams."""

import asyncio
import contextlib
import itertools
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any

from campaign.client.base import Job, Outcome
from campaign.errors import InfrastructureError

_LENGTH = struct.Struct("!I")


class ClientGone(InfrastructureError):
    """The client's process has ended."""


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # noqa: S301 -- the other end is our own child or parent


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return _LENGTH.pack(len(data)) + data


class ProcessClient:
    """Implements `campaign.client.base.Client`. Raises ClientGone where its process has ended."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def run(self, job: Job) -> Outcome:
        """As `Client.run`."""
        outcome: Outcome = await self._call("run", job)
        return outcome

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """As `Client.fetch`."""
        page: tuple[int, bytes] = await self._call("fetch", url, timeout_s)
        return page

    async def selfcheck(self) -> dict[str, Any]:
        """As `HttpClient.selfcheck`, in that process."""
        found: dict[str, Any] = await self._call("selfcheck")
        return found

    async def pin(self, cpus: Sequence[int]) -> None:
        """As `HttpClient.pin`."""
        await self._call("pin", tuple(cpus))

    async def cancel(self) -> None:
        """As `Client.cancel`."""
        if self._process is not None:
            await self._call("cancel")

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            # It closes its client and its files when its input ends.
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _call(self, name: str, *args: Any) -> Any:
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "campaign.client.process",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                self._reader = asyncio.create_task(self._read(self._process))
        stdin = self._process.stdin
        assert stdin is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        stdin.write(_packed((number, name, args)))
        return await answer

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                number, value, error = await _receive(process.stdout)
                answer = self._answers.pop(number)
                if answer.done():
                    continue
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)
        except asyncio.IncompleteReadError:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ClientGone("a client process has ended"))
            self._answers.clear()


async def serve(source: int, target: int) -> None:
    """The child: answer calls read from one descriptor on the other, until its input ends."""
    from campaign.client.http import HttpClient

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(source, "rb") as calls, os.fdopen(target, "wb", buffering=0) as answers:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
        client, tasks = HttpClient(), set()

        async def answer(number: int, name: str, args: tuple[Any, ...]) -> None:
            value, error = None, None
            try:
                value = await getattr(client, name)(*args)
            except Exception as problem:
                error = problem
            answers.write(_packed((number, value, error)))

        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                task = asyncio.create_task(answer(*await _receive(reader)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await client.close()


if __name__ == "__main__":
    # What prints must not land among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(serve(os.dup(0), answers))
