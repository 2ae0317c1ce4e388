"""Rows and plans to judge: small, explicit, and of the real types."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from campaign.money import MicroUsd
from campaign.plan.model import (
    ArmPlan,
    BootPlan,
    CampaignPlan,
    Comparison,
    GroupPlan,
    RequestPlan,
    RoundPlan,
    SessionPlan,
)
from campaign.spec.models import Anchor, Arm, Speculation
from campaign.store.row import RequestRow

NODE = 1_000_000


@dataclass(frozen=True)
class Effects:
    """Truth behind simulated rows; standard deviations on the log scale."""

    step_ms: float = 10.0
    accept_len: float = 1.0
    slot_sd: float = 0.02
    boot_sd: float = 0.002
    residual_sd: float = 0.004
    shift: float = 0.0


class Factory:
    """Builds plans, and rows that a session would have written for them."""

    def arm(self, name, depth=None):
        speculation = None if depth is None else Speculation(method="ngram", depth=depth)
        return ArmPlan(name, f"{name[:8]:0<16}", Arm(engine="llamacpp", speculation=speculation))

    def row(self, **fields):
        base = {
            "run": "run",
            "campaign": "test",
            "session": "main",
            "lease": "l0",
            "node": "n0",
            "gpu_set": "cpu",
            "boot_id": "b",
            "boot_index": 0,
            "boot_attempt": 0,
            "arm": "a",
            "arm_hash": "0" * 16,
            "group": "pair.p",
            "cell": "c",
            "phase": "measure",
            "workload": "w",
            "concurrency": 1,
            "block": "s0",
            "round": 0,
            "order": 0,
            "half": "p0",
            "slot": 0,
            "seed": 1,
            "attempt": 0,
            "sent_ns": 0,
            "sent_utc_ns": 0,
            "state": "ok",
            "completion_tokens": 97,
            "prompt_tokens": 100,
            "cached_tokens": 0,
            "rate_definition": "all-but-one",
            "ttft_ms": 50.0,
        }
        return RequestRow(**{**base, **fields})

    def rounds(self, group, arms, *, boots, slots, design, waves=1):
        resident = design in {"alternated", "duet"}
        out = []
        turns = (
            [(k, arms) for k in range(boots)] if resident else [(k, (a,)) for k in range(boots) for a in arms]
        )
        for i, (k, held) in enumerate(turns):
            sequence = tuple(
                RequestPlan(arm, slot, 1000 * k + 100 * wave + slot, order, wave)
                for order, (wave, slot, arm) in enumerate(
                    (w, s, a) for w in range(waves) for s in range(slots) for a in held
                )
            )
            booted = tuple(BootPlan(a, k, f"p{j}", ()) for j, a in enumerate(held))
            out.append(RoundPlan(f"{group}/r{i}", i, booted, (), sequence))
        return tuple(out)

    def group(self, name, kind, arms, *, boots=2, slots=8, design="alternated", concurrency=1, waves=1):
        return GroupPlan(
            name=name,
            kind=kind,
            design=design,
            why="test",
            arms=tuple(arms),
            workload="w",
            concurrency=concurrency,
            rounds=self.rounds(name, tuple(arms), boots=boots, slots=slots, design=design, waves=waves),
            seconds=1.0,
            usd_expected=MicroUsd(0),
        )

    def anchor_group(self, position, *, boots=2, slots=8):
        return self.group(f"anchor.{position}", "anchor", ("a",), boots=boots, slots=slots, design="anchor")

    def comparison(self, group, a, b, **fields):
        base = {
            "pair": group.name.split(".", 1)[1],
            "kind": "pair",
            "family": group.name.split(".", 1)[1],
            "group": group.name,
            "a": a,
            "b": b,
            "workload": "w",
            "concurrency": group.concurrency,
            "primary": "step_ms",
            "margin": 0.02,
        }
        return Comparison(**{**base, **fields})

    def plan(self, groups, comparisons, depths=None):
        arms = {n for g in groups for n in g.arms}
        session = SessionPlan(
            name="main",
            node="here",
            priority=1,
            arms={n: self.arm(n, (depths or {}).get(n)) for n in sorted(arms)},
            groups=tuple(groups),
            comparisons=tuple(comparisons),
            boots=0,
            requests=0,
            seconds=1.0,
            usd_per_hour=MicroUsd(NODE),
            price_source="declared",
            usd_expected=MicroUsd(0),
            usd_worst=MicroUsd(0),
            worst_seconds=1.0,
        )
        return CampaignPlan("test", MicroUsd(NODE), (session,), ("main",), (), (), ())

    def rows_of(self, group, effects, seed=0, tokens=97):
        """One row per planned request. effects: arm -> Effects."""
        rng = np.random.default_rng([seed, *group.name.encode()])
        prompt = {}
        rows = []
        for round_ in group.rounds:
            shock = {b.arm: rng.normal() for b in round_.boots}
            index = {b.arm: b for b in round_.boots}
            for q in round_.sequence:
                e = effects[q.arm]
                common = prompt.setdefault(q.slot, rng.normal())
                step = e.step_ms * math.exp(
                    e.shift + e.slot_sd * common + e.boot_sd * shock[q.arm] + e.residual_sd * rng.normal()
                )
                window_tokens = tokens - 1
                steps = round(window_tokens / e.accept_len)
                rows.append(
                    self.row(
                        group=group.name,
                        arm=q.arm,
                        boot_index=index[q.arm].index,
                        boot_id=f"{group.name}/{q.arm}{index[q.arm].index}",
                        cell=f"{group.name}/{q.arm}/b{index[q.arm].index}",
                        phase="anchor" if group.kind == "anchor" else "measure",
                        round=round_.index,
                        order=q.order,
                        half=index[q.arm].place,
                        slot=q.slot,
                        seed=q.seed,
                        block=f"s{q.slot}" if group.concurrency == 1 else f"w{q.wave}",
                        concurrency=group.concurrency,
                        completion_tokens=tokens,
                        tokens_in_window=window_tokens,
                        steps=steps,
                        window_ms=step * steps,
                        step_ms=step,
                        accept_len=window_tokens / steps,
                        decode_tok_s=1000 * window_tokens / (step * steps),
                        ttft_ms=50 * math.exp(0.01 * rng.normal()),
                    )
                )
        return rows

    def anchor(self, **fields):
        return Anchor(
            **{"arm": "a", "workload": "w", "reference": "establish", "drift_delta": 0.05, **fields}
        )

    effects = Effects
    replace = staticmethod(replace)


@pytest.fixture
def make():
    return Factory()
