"""What a session's weights take: disk, and the minutes in which a fresh node fetches them. Part of set-up."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from campaign.spec.models import Arm, SkyNode, Spec
from campaign.spec.storage import FETCH_GB_S, fetch_s, fetched, models_of

if TYPE_CHECKING:
    from campaign.plan.outline import Outline

_GIB = 2**30 / 1e9


def load_s(spec: Spec, node: str, arms: Iterable[Arm]) -> float:
    """Seconds of set-up that fetching weights takes; none where the node is yours and may hold them."""
    return fetch_s(models_of(arms), spec.models) if isinstance(spec.nodes[node], SkyNode) else 0.0


def weights_line(spec: Spec, outlined: "Outline") -> str | None:
    """`session S: weights A 554.1 GiB, ...`; None where no model says its size."""
    arms = [arm.config for _, choice in outlined.groups for arm in choice.draft.arms]
    names = [n for n in models_of(arms) if n in spec.models]
    if not any(spec.models[n].gb for n in names):
        return None
    parts = []
    for name in names:
        model = spec.models[name]
        size = "unknown size" if model.gb is None else f"{model.gb / _GIB:.1f} GiB"
        seconds = (model.gb or 0.0) / FETCH_GB_S
        how = (
            f"fetched in {seconds / 60:.1f} min"
            if fetched(model)
            else f"from {model.cache or model.path or model.package}"
        )
        parts.append(f"{name} {size} ({how})")
    total = sum(spec.models[n].gb or 0.0 for n in names) / _GIB
    node = spec.nodes[outlined.node]
    disk = getattr(node, "disk_gb", None)
    room = "" if disk is None else f" of a disk of {disk / _GIB:.0f} GiB"
    fetch = load_s(spec, outlined.node, arms)
    minutes = f", {fetch / 60:.1f} min of set-up at {FETCH_GB_S:g} GB/s" if fetch else ""
    return f"session {outlined.name}: weights {', '.join(parts)}: {total:.1f} GiB{room}{minutes}"
