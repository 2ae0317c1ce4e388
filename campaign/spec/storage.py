"""Weights of a session: which models, how large, and whether a fresh node has to fetch them."""

from collections.abc import Iterable, Mapping
from typing import Final

from campaign.spec.models import Arm, Model

FETCH_GB_S: Final = 0.5
"""Stated, not measured here: published campaigns loaded 595 GB in 1,540 s from cold and 490 s from a warm disk."""
KEEP_GB: Final = 60.0
"""Disk that system, engines, kernel caches and logs take beside the weights."""


def models_of(arms: Iterable[Arm]) -> tuple[str, ...]:
    """Entries of `models` that these arms load, draft heads included, each once, in order of first use."""
    names: dict[str, None] = {}
    for arm in arms:
        drafts = arm.speculation.draft_model if arm.speculation is not None else None
        names |= dict.fromkeys(n for n in (arm.model, drafts) if n is not None)
    return tuple(names)


def fetched(model: Model) -> bool:
    """Whether a fresh node must download it: from the hub or a bucket, and not from a folder that is there."""
    if model.cache is not None:
        return "://" in model.cache
    return model.hub is not None


def disk_gb(names: Iterable[str], models: Mapping[str, Model]) -> float | None:
    """GB of disk that fetching these models takes, system included; None where nothing is fetched or a size is unknown."""
    there = [models[n] for n in names if n in models and fetched(models[n])]
    if not there or any(m.gb is None for m in there):
        return None
    return KEEP_GB + sum(m.gb or 0.0 for m in there)


def fetch_s(names: Iterable[str], models: Mapping[str, Model]) -> float:
    """Seconds that a fresh node needs to fetch these models; 0 for those of unknown size."""
    return sum((models[n].gb or 0.0) / FETCH_GB_S for n in names if n in models and fetched(models[n]))
