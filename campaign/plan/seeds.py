"""Sampling seeds: derived by hash, never drawn, and never the same one twice."""

import hashlib
from collections.abc import Mapping

SEED_BITS = 31
"""Fits a signed 32-bit integer, which every engine takes; llama.cpp reads 2^32 - 1 as `random`."""

Seeds = Mapping[tuple[int, int, int], int]
"""(slot, repeat, side) -> seed."""


def seed_table(
    workload_seed: int, workload: str, slots: int, repeats: int, sides: int = 1, warm: int = 1
) -> Seeds:
    """Seeds of every request of a group, those of the warm-up among them (`warm` slots from `slots` on).

    A repeat is one run of the slot set: the boot's index at concurrency 1, boot and wave above. Arms that are
    compared share a side, so they share seeds; the two sides of an A/A do not. Each seed is the head of
    SHA-256("WORKLOAD_SEED/WORKLOAD/SLOT/REPEAT/SIDE/TRY"); a try that hits a seed already given out is
    followed by the next, so all are distinct and none depends on later repeats.
    """
    used: set[int] = {0}  # an engine may read 0 as `not given`
    table: dict[tuple[int, int, int], int] = {}
    for repeat in range(repeats):
        for slot in range(slots + warm):
            for side in range(sides):
                seed, attempt = 0, 0
                while seed in used:
                    text = f"{workload_seed}/{workload}/{slot}/{repeat}/{side}/{attempt}"
                    digest = hashlib.sha256(text.encode()).digest()
                    seed, attempt = int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS), attempt + 1
                used.add(seed)
                table[slot, repeat, side] = seed
    return table
