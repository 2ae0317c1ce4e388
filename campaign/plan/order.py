"""The order of boots and requests: who runs when, where, with which seed.

What makes two arms comparable is decided here. A drift of the machine during a group must hit every arm
alike, so orders are reversed and rotated until each arm has the same mean position, and places on the node
are rotated until each arm has been in each. Counterbalancing after Cochran and Cox, Experimental Designs
(1957), ch. 4; a magic rectangle where the number of orders is odd (Harmuth, 1881).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from campaign.plan.arrivals import load_plan, offsets_ns
from campaign.plan.model import BootPlan, PlannedDesign, RequestPlan, RoundPlan
from campaign.plan.seeds import Seeds, seed_table
from campaign.spec.models import Load

MIN_WAVES = 6
"""Waves per arm above concurrency 1: requests of one wave share steps, so the wave is the block."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything an order depends on."""

    group: str
    arms: tuple[str, ...]
    gpus: tuple[int, ...]
    """GPU indexes of the node that may be used."""
    needs: tuple[int, ...]
    """GPUs each arm needs, in the order of `arms`; 0 on CPU."""
    slots: int
    boots: int
    concurrency: int
    workload: str
    workload_seed: int
    sides: tuple[int, ...]
    """Seed side of each arm: all 0, or 0 and 1 in an A/A."""
    load: Load | None = None

    @property
    def warm(self) -> int:
        """Warm-up requests of a boot: as many as will be in flight together."""
        return min(self.concurrency, self.slots)

    @property
    def waves(self) -> int:
        """Times the slot set is run per boot, ramp and tail included."""
        plan = load_plan(self.load, self.concurrency, self.slots)
        if plan is not None and self.load is not None and plan.shape == "schedule":
            return math.ceil(len(self.load.at_s) / self.slots)
        return waves(self.boots, self.concurrency) + (2 * plan.cut_sets if plan is not None else 0)


def waves(boots: int, concurrency: int) -> int:
    """Times the slot set is run per boot: once, or enough for 6 waves an arm, in whole ABBA quads."""
    if concurrency == 1:
        return 1
    return 2 * math.ceil(MIN_WAVES / boots / 2)


def build_rounds(design: PlannedDesign, layout: Layout) -> tuple[RoundPlan, ...]:
    """All rounds of a group.

    - `alternated`: every round holds all arms; one arm is busy at a time; slot i runs them in the round's
      order and slot i + 1 in reverse. Above concurrency 1 the same with waves in place of slots.
    - `duet`: every round holds all arms and all are busy at once; requests of equal `order` start together.
    - `blocks`: one boot a round, all its slots; boots follow A B B A.
    - `bracketed`: A B, once.
    - `anchor`: one boot a round.
    """
    seeds = seed_table(
        layout.workload_seed,
        layout.workload,
        layout.slots,
        layout.boots * layout.waves,
        max(layout.sides) + 1,
        layout.warm,
    )
    if design in {"alternated", "duet"}:
        return tuple(_resident_round(layout, design, r, seeds) for r in range(layout.boots))
    boots = [
        (arm, index) for index, order in enumerate(orders(len(layout.arms), layout.boots)) for arm in order
    ]
    return tuple(_single_round(layout, i, arm, index, seeds) for i, (arm, index) in enumerate(boots))


def orders(arms: int, count: int) -> list[tuple[int, ...]]:
    """`count` orders of `arms` arms in which every arm has the same mean position, or as nearly as can be.

    An order is followed by its reverse, which balances exactly. An odd number of three or more begins with
    three orders whose position sums are equal (odd `arms`) or differ by at most 1 (even `arms`). Later
    pairs start one arm further on where there are more than two, so that neighbours and ends change too.
    """
    identity = tuple(range(arms))
    result: list[tuple[int, ...]] = []
    if count % 2:
        result = [identity] if count == 1 else _triple(arms)
    for pair in range((count - len(result)) // 2):
        shift = pair % arms if arms > 2 else 0
        order = identity[shift:] + identity[:shift]
        result += [order, order[::-1]]
    return result


def _triple(arms: int) -> list[tuple[int, ...]]:
    """Three orders whose sums of positions are as equal as can be: a 3 x `arms` magic rectangle."""
    m = arms // 2
    second = [(arms - 1) // 2 - i // 2 if i % 2 == 0 else arms - 1 - i // 2 for i in range(arms)]
    if arms % 2:
        third = [3 * m - i - p for i, p in enumerate(second)]
    else:
        third = [3 * m - 2 + i % 2 - i - p for i, p in enumerate(second)]
    return [tuple(range(arms)), _inverse(third), _inverse(second)]


def _inverse(positions: Sequence[int]) -> tuple[int, ...]:
    """Positions by arm -> arms by position."""
    return tuple(sorted(range(len(positions)), key=positions.__getitem__))


def place_shift(arms: int, index: int) -> int:
    """How far places are rotated in a round: each arm is in each place equally often.

    With an even number of arms every cycle is shifted once more, since order and place would otherwise
    change in step, and the first in order would always be in the same place.
    """
    return (index + (index // arms if arms % 2 == 0 else 0)) % arms


def place_gpus(gpus: tuple[int, ...], needs: Sequence[int]) -> list[tuple[int, ...]]:
    """Disjoint GPU lists for engines placed one after the other.

    Where the node has too few for all, they share its first GPUs (asked for by name only).
    """
    if sum(needs) > len(gpus):
        return [gpus[:need] for need in needs]
    starts = [sum(needs[:i]) for i in range(len(needs))]
    return [gpus[start : start + need] for start, need in zip(starts, needs, strict=True)]


def _resident_round(layout: Layout, design: PlannedDesign, index: int, seeds: Seeds) -> RoundPlan:
    arms = len(layout.arms)
    order = orders(arms, layout.boots)[index]
    shift = place_shift(arms, index)
    # Place p holds arm (p - shift) mod arms; GPU lists are dealt out by place.
    placed = [(p - shift) % arms for p in range(arms)]
    lists = place_gpus(layout.gpus, [layout.needs[arm] for arm in placed])
    where = {arm: (f"p{p}", gpus) for p, (arm, gpus) in enumerate(zip(placed, lists, strict=True))}
    # Booted in place order: what the second start on a node suffers belongs to the place.
    boots = tuple(BootPlan(layout.arms[arm], index, *where[arm]) for arm in placed)
    warmup = tuple(q for i, arm in enumerate(order) for q in _warmup(layout, arm, index, seeds, i))
    return RoundPlan(
        f"{layout.group}/r{index}", index, boots, warmup, _sequence(layout, design, index, order, seeds)
    )


def _sequence(
    layout: Layout, design: PlannedDesign, index: int, order: tuple[int, ...], seeds: Seeds
) -> tuple[RequestPlan, ...]:
    """Requests of a resident round."""

    def request(arm: int, slot: int, wave: int, position: int, number: int) -> RequestPlan:
        seed = seeds[slot, index * layout.waves + wave, layout.sides[arm]]
        return RequestPlan(layout.arms[arm], slot, seed, position, number)

    def turn(i: int) -> tuple[int, ...]:
        return order if i % 2 == 0 else order[::-1]

    slots, one = layout.slots, layout.concurrency == 1
    if load_plan(layout.load, layout.concurrency, slots) is not None:
        # One arm's whole run after the other's: each has a ramp and a tail of its own.
        runs = [q for arm in order for q in _run(layout, arm, index, seeds)]
        return tuple(replace(q, order=i) for i, q in enumerate(runs))
    if design == "duet":
        starts = [(wave * slots + slot, wave, slot) for wave in range(layout.waves) for slot in range(slots)]
        return tuple(
            request(arm, slot, wave, position, position if one else wave)
            for position, wave, slot in starts
            for arm in turn(slot)
        )
    if one:
        turns = [(arm, slot, 0) for slot in range(slots) for arm in turn(slot)]
    else:
        turns = [(arm, slot, w) for w in range(layout.waves) for arm in turn(w) for slot in range(slots)]
    return tuple(request(arm, slot, wave, i, wave) for i, (arm, slot, wave) in enumerate(turns))


def _single_round(layout: Layout, index: int, arm: int, boot: int, seeds: Seeds) -> RoundPlan:
    name = layout.arms[arm]
    gpus = layout.gpus[: layout.needs[arm]]
    sequence = tuple(_run(layout, arm, boot, seeds))
    return RoundPlan(
        f"{layout.group}/r{index}",
        index,
        (BootPlan(name, boot, "p0", gpus),),
        _warmup(layout, arm, boot, seeds, 0),
        sequence,
    )


def _run(layout: Layout, arm: int, boot: int, seeds: Seeds) -> list[RequestPlan]:
    """All requests of one arm in one boot, slot set after slot set, with the times and cuts of its load."""
    name, side = layout.arms[arm], layout.sides[arm]
    plain = [
        RequestPlan(
            name,
            slot,
            seeds[slot, boot * layout.waves + wave, side],
            wave * layout.slots + slot,
            wave,
        )
        for wave in range(layout.waves)
        for slot in range(layout.slots)
    ]
    plan = load_plan(layout.load, layout.concurrency, layout.slots)
    if plan is None or layout.load is None:
        return plain
    times = offsets_ns(layout.load, len(plain), f"{layout.workload_seed}/{layout.group}/{boot}")
    return [
        replace(q, at_ns=at, cut=not plan.cut_sets <= q.wave < layout.waves - plan.cut_sets)
        for q, at in zip(plain, times, strict=False)
    ]


def _warmup(layout: Layout, arm: int, boot: int, seeds: Seeds, order: int) -> tuple[RequestPlan, ...]:
    """One request per boot, a wave of them above concurrency 1, on the slot after the last, sampled like the rest.

    Each has a seed of its own. One request would leave the batch sizes that are measured cold.
    """
    repeat, side = boot * layout.waves, layout.sides[arm]
    return tuple(
        RequestPlan(layout.arms[arm], layout.slots, seeds[layout.slots + i, repeat, side], order, 0)
        for i in range(layout.warm)
    )
