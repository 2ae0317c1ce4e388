"""Several client processes as one."""

import asyncio
import json
import os
from dataclasses import asdict

import pytest

from campaign.client.base import Client, Job, Outcome
from campaign.client.http import HttpClient
from campaign.client.process import ClientGone, ProcessClient
from campaign.client.split import SplitClient
from campaign.testing.reference_server import ReferenceServer, Schedule


def job(url, number, folder=None, tokens=10):
    body = {"stream": True, "schedule": asdict(Schedule(ttft_ms=20.0, rate=200.0, tokens=tokens))}
    return Job(f"r{number}", url, "/v1/chat/completions", body, 20, tokens, sidecar_dir=folder)


@pytest.fixture(scope="module")
def server():
    with ReferenceServer() as running:
        yield running


async def test_two_processes_share_the_load(server, tmp_path):
    client = SplitClient(ProcessClient, first=HttpClient())
    assert isinstance(client, Client)
    await client.scale(2, sorted(os.sched_getaffinity(0)))
    assert client.processes == 2
    jobs = [job(server.url, i, str(tmp_path / "cell")) for i in range(8)]
    outcomes = await asyncio.gather(*map(client.run, jobs))
    await client.close()
    assert [o.request_id for o in outcomes] == [j.request_id for j in jobs]
    assert {(o.state, o.content_chunks) for o in outcomes} == {("ok", 10)}
    own = [json.loads(x)["request_id"] for x in (tmp_path / "cell" / "chunks.jsonl").read_text().splitlines()]
    other = [
        json.loads(x)["request_id"]
        for x in (tmp_path / "cell" / "p1" / "chunks.jsonl").read_text().splitlines()
    ]
    assert len(own) == len(other) == 4
    assert sorted(own + other) == sorted(j.request_id for j in jobs)


async def test_cancelling_reaches_every_process(server):
    client = SplitClient(ProcessClient)
    await client.scale(2)
    tasks = [asyncio.create_task(client.run(job(server.url, i, tokens=10_000))) for i in range(2)]
    while not all(t.done() for t in tasks):
        # A request is only dropped once its process has it.
        await client.cancel()
    assert {t.result().state for t in tasks} == {"cancelled"}
    await client.close()


async def test_a_process_that_ends_is_an_error_of_every_call(server):
    client = ProcessClient()
    await client.fetch(server.url + "/stats", 10)
    running = asyncio.create_task(client.run(job(server.url, 0, tokens=10_000)))
    await asyncio.sleep(0)
    client._process.kill()
    with pytest.raises(ClientGone):
        await running
    await client.close()


async def test_errors_cross(server):
    client = ProcessClient()
    with pytest.raises(ValueError, match="not an http"):
        await client.run(job("ftp://x", 0))
    await client.close()
    await client.close()


class Counting:
    def __init__(self):
        self.jobs, self.pins, self.go = [], [], asyncio.Event()

    async def run(self, job):
        self.jobs.append(job)
        await self.go.wait()
        return Outcome(
            job.request_id,
            "ok",
            0,
            0,
            1,
            2,
            3,
            "kernel",
            1,
            1,
            1,
            None,
            None,
            None,
            200,
            None,
            None,
            None,
            None,
        )

    async def pin(self, cpus):
        self.pins.append(cpus)


async def test_the_one_with_the_fewest_in_flight_is_asked():
    made = []

    def make():
        made.append(Counting())
        return made[-1]

    client = SplitClient(make)
    await client.scale(3, (0, 1))
    tasks = [asyncio.create_task(client.run(job("http://x", i, "cell"))) for i in range(7)]
    await asyncio.sleep(0)
    assert [len(c.jobs) for c in made] == [3, 2, 2]
    assert [c.jobs[0].sidecar_dir for c in made] == ["cell", "cell/p1", "cell/p2"]
    assert [c.pins for c in made] == [[(0, 1)]] * 3
    for one in made:
        one.go.set()
    await asyncio.gather(*tasks)
    assert client._in_flight == [0, 0, 0]
