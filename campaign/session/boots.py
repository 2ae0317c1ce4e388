"""The engines of one round: booted as their GPUs allow, quiet before the first request, the same at the end."""

import asyncio
from dataclasses import asdict
from typing import Any

from campaign.engines.base import BootOrder, BootRecord, Counters
from campaign.errors import EngineError
from campaign.plan.model import BootPlan, GroupPlan, RoundPlan
from campaign.redact import REDACTOR
from campaign.session.cell import asked, show_loading
from campaign.session.context import SessionContext, together
from campaign.session.request import Measured, boot_id, cell_name
from campaign.store.base import CellWriter
from campaign.store.layout import flat


def shares_gpus(round_: RoundPlan) -> bool:
    """Whether two boots of a round are on one GPU."""
    all_gpus = [g for boot in round_.boots for g in boot.gpus]
    return len(all_gpus) > len(set(all_gpus))


class Boots:
    """Boots of one round, by arm."""

    def __init__(self, ctx: SessionContext, group: GroupPlan, round_: RoundPlan, attempt: int) -> None:
        self._ctx, self._group, self._round, self._attempt = ctx, group, round_, attempt
        self.at_work: dict[str, Measured] = {}
        self.writers: dict[str, CellWriter] = {}
        """Arm -> the journal of its requests."""
        self._settled: dict[str, dict[str, Any] | None] = {}
        """Arm -> how its server was drained and its cache reset after warm-up."""

    async def start(self) -> None:
        """Boot every engine of the round. Raises EngineError, or Stopped where a stop came first."""
        # Engines with GPUs of their own load side by side; on shared cores they would slow each other.
        if shares_gpus(self._round):
            await self._boot_shared()
        elif all(boot.gpus for boot in self._round.boots):
            await together(map(self._boot, self._round.boots))
        else:
            for boot in self._round.boots:
                self._ctx.check()
                await self._boot(boot)

    async def _boot_shared(self) -> None:
        """In order of places: each start finds the memory that those before it have left."""
        stagger = getattr(self._ctx.spec.nodes[self._ctx.plan.node], "boot_stagger", None)
        if stagger is None:
            for boot in self._round.boots:
                self._ctx.check()
                await self._boot(boot)
            return

        async def late(index: int, boot: BootPlan) -> None:
            pause = asyncio.ensure_future(self._ctx.clock.sleep(index * stagger.total_seconds()))
            try:
                await self._ctx.stopped_before(pause)
            finally:
                pause.cancel()
            self._ctx.check()
            await self._boot(boot)

        await together(late(i, boot) for i, boot in enumerate(self._round.boots))

    async def _boot(self, boot: BootPlan) -> None:
        ctx = self._ctx
        arm = ctx.plan.arms[boot.arm]
        name = boot_id(ctx.who.session, self._round, boot, self._attempt)
        ctx.progress.state, ctx.progress.cell = "booting", cell_name(self._group, boot)
        ctx.emit("boot_started", boot_id=name, arm=arm.name, arm_hash=arm.hash, place=boot.place, port=None)
        order = BootOrder(
            boot_id=name,
            arm=arm.name,
            arm_hash=arm.hash,
            config=arm.config,
            models=dict(ctx.spec.models),
            place=boot.place,
            gpus=boot.gpus,
            # Two engines at work at once must not share the cores that one is pinned to.
            cpus=() if self._group.design == "duet" else ctx.cpus,
            log_path=str(ctx.run_dir.logs / f"{flat(name)}.log"),
            boot_timeout_s=ctx.spec.gates.boot_timeout.total_seconds(),
            runtime=ctx.spec.runtimes.get(arm.config.runtime or ""),
            shared=shares_gpus(self._round),
        )
        try:
            record = await self._unless_stopped(order)
        except EngineError as error:
            ctx.emit(
                "boot_failed", boot_id=name, kind=error.kind, error=str(error), log_tail=_tail(order.log_path)
            )
            raise
        self._ready(boot, name, record)

    async def _unless_stopped(self, order: BootOrder) -> BootRecord:
        # A boot may take ten minutes at $50 an hour: a stop does not wait for it.
        ctx = self._ctx
        boot = asyncio.ensure_future(ctx.ports.host.boot(order))
        shown = asyncio.ensure_future(show_loading(ctx.ports.host, order.boot_id, ctx.clock, ctx.progress))
        try:
            if await ctx.stopped_before(boot):
                boot.cancel()
                await ctx.ports.host.stop(order.boot_id)
                ctx.emit("boot_stopped", boot_id=order.boot_id)
                ctx.check()
            return await boot
        finally:
            shown.cancel()
            boot.cancel()

    def _ready(self, boot: BootPlan, name: str, record: BootRecord) -> None:
        ctx, arm = self._ctx, self._ctx.plan.arms[boot.arm]
        sealed = ctx.store.put_json(
            "provenance", name, {"boot_id": name, "arm": arm.name, **record.provenance}
        )
        ctx.emit("boot_ready", boot_id=name, boot_ns=record.boot_ns, provenance=asdict(sealed))
        cell = cell_name(self._group, boot)
        self.at_work[boot.arm] = Measured(boot, arm, record, self._attempt, cell)
        self.writers[boot.arm] = ctx.store.open_cell(ctx.who.session, cell, self._attempt)

    async def stop(self) -> None:
        """End every engine that was booted."""
        for boot in self.at_work.values():
            await self._ctx.ports.host.stop(boot.record.boot_id)
            self._ctx.progress.last_counters.pop(boot.record.boot_id, None)
            self._ctx.emit("boot_stopped", boot_id=boot.record.boot_id)

    async def settle(self) -> None:
        """No request of the warm-up runs on, and nothing of it is kept where the engine can forget it."""
        for arm, boot in self.at_work.items():
            name = boot.record.boot_id
            self._settled[arm] = await asked(self._ctx.ports.host, "settle", name)
            self._ctx.progress.last_counters.pop(name, None)

    async def scraped(self, arm: str) -> Counters | None:
        """What the arm's server counts now."""
        return await self._ctx.ports.host.counters(self.at_work[arm].record.boot_id)

    async def unchanged(self, arm: str) -> dict[str, Any] | None:
        """The server's pages again; raises EngineError where what is in force is not what it was at boot."""
        boot = self.at_work[arm]
        found = await asked(self._ctx.ports.host, "recheck", boot.record.boot_id)
        if found is None:
            return None
        if found["effective"]:
            why = f"{boot.record.boot_id}: changed while it was measured: {'; '.join(found['effective'])}"
            raise EngineError("not_effective", why)
        return {"settled": self._settled.get(arm), "changed": found["pages"]}

    async def alone(self) -> None:
        """A stranger on the GPUs of a cell makes its times somebody else's: the round is void."""
        look = getattr(self._ctx.ports.host, "foreign", None)
        for boot in self.at_work.values():
            if look is None or not boot.plan.gpus:
                continue
            found = await look(boot.record.boot_id)
            if found:
                raise EngineError("died", f"{boot.record.boot_id}: another process is on its GPUs: {found}")


def _tail(path: str, lines: int = 5) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # the path crossed a process as text
            return REDACTOR.text("".join(file.readlines()[-lines:]))
    except OSError:
        return ""
