"""List prices of rented nodes from what SkyPilot keeps on this machine. Asks nobody: no server, no network.

Sources: `~/.sky/catalogs/VERSION/CLOUD/vms.csv`, as SkyPilot 0.14 downloads it (price per node-hour, region by region),
and `slurm.pricing` of `~/.sky/config.yaml`. A price here is a list price of the day of the file, not an offer.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from campaign.cloud import deadmen
from campaign.money import micro
from campaign.spec.models import Candidate, SkyNode


@dataclass(frozen=True, slots=True)
class Offer:
    """One candidate on one cloud."""

    what: str
    """Cloud, instance type and accelerators."""
    cloud: str
    usd_per_hour: float | None
    """Of the whole node; None where it is not known here."""
    source: str
    """`catalogue of DATE`, `slurm.pricing`, or why there is no price."""
    why_not: str
    """Why it would not be taken; empty where it would."""


def offers(node: SkyNode, home: Path | None = None) -> list[Offer]:
    """Every candidate of a node, on every cloud whose catalogue is here; cheapest first within a candidate."""
    root = (home or Path(os.path.expanduser("~"))) / ".sky"  # noqa: PTH111  # HOME may be set
    found: list[Offer] = []
    for candidate in node.any_of or node.ordered or (Candidate(),):
        found += _of(node, candidate, root)
    return found


def fits(offers_: list[Offer]) -> bool | None:
    """Whether something would be taken; None where no price is known here."""
    taken = [o for o in offers_ if not o.why_not]
    if any(o.usd_per_hour is not None for o in taken):
        return True
    return None if taken or not offers_ else False


def _of(node: SkyNode, candidate: Candidate, root: Path) -> list[Offer]:
    name, _, count = (candidate.accelerators or node.accelerators).partition(":")
    parts = (candidate.infra or node.infra or "").split("/")
    cloud, region = parts[0].lower(), parts[1] if len(parts) > 1 else None
    spot = node.use_spot if candidate.use_spot is None else candidate.use_spot
    files = sorted((root / "catalogs").glob(f"v*/{cloud or '*'}/vms.csv"))
    out = []
    for file in {f.parent.name: f for f in files}.values():
        rows = list(
            _rows(
                file,
                (name, float(count or 1), region, candidate.instance_type),
                "SpotPrice" if spot else "Price",
            )
        )
        day = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
        for price, kind, where in sorted(rows)[:1]:
            words = f"{file.parent.name}/{where} {kind} {name}:{count or 1}" + (" spot" if spot else "")
            out.append(_offer(node, words, file.parent.name, price, f"catalogue of {day}"))
        if not rows and cloud:
            words = f"{cloud} {name}:{count or 1}"
            out.append(Offer(words, cloud, None, f"catalogue of {day}", "not sold there in this size"))
    if cloud in {"", "slurm"}:
        price_, words = (
            _slurm(root / "config.yaml", name, region),
            f"slurm/{region or '*'} {name}:{count or 1}",
        )
        if price_ is not None:
            out.append(_offer(node, words, "slurm", price_ * float(count or 1), "slurm.pricing"))
        elif cloud:
            out.append(Offer(words, cloud, None, "no slurm.pricing for it", ""))
    elif not files:
        words = f"{cloud} {name}:{count or 1}"
        out.append(Offer(words, cloud, None, "no catalogue on this machine", _refused(cloud)))
    return sorted(out, key=lambda o: (o.usd_per_hour is None, o.usd_per_hour or 0.0, o.what))


def _rows(
    file: Path, wanted: tuple[str, float, str | None, str | None], column: str
) -> Iterator[tuple[float, str, str]]:
    """(price, instance type, region) of a catalogue's rows that match. What cannot be read is passed over."""
    name, count, region, kind = wanted
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                try:
                    same = (
                        row["AcceleratorName"].lower() == name.lower()
                        and float(row["AcceleratorCount"]) == count
                    )
                    price = float(row[column])
                except (KeyError, ValueError, TypeError, AttributeError):
                    continue
                if (
                    same
                    and region in {None, row.get("Region")}
                    and kind in {None, row.get("InstanceType")}
                    and price > 0
                ):
                    yield price, row.get("InstanceType") or "?", row.get("Region") or "?"
    except (OSError, UnicodeDecodeError, csv.Error):
        return


def _slurm(config: Path, name: str, cluster: str | None) -> float | None:
    """Dollars per accelerator-hour, or None. A price of a cluster goes before that of all."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        said: Any = YAML(typ="safe").load(config.read_text(encoding="utf-8"))["slurm"]
    except (OSError, ValueError, KeyError, TypeError, YAMLError):
        return None
    for place in (
        ((said.get("cluster_configs") or {}).get(cluster) or {}, said) if isinstance(said, dict) else ()
    ):
        try:
            price = float(place["pricing"]["accelerators"][name])
        except (KeyError, TypeError, ValueError):
            continue
        return price if price > 0 else None
    return None


def _offer(node: SkyNode, what: str, cloud: str, price: float, source: str) -> Offer:
    why = _refused(cloud)
    if not why and micro(f"{price:.6f}") > micro(node.max_usd_per_hour):
        why = f"dearer than max_usd_per_hour {node.max_usd_per_hour}"
    return Offer(what, cloud, price, source, why)


def _refused(cloud: str) -> str:
    have = deadmen.row(cloud).effective()
    return "" if len(have) >= deadmen.NEEDED else f"only {', '.join(have) or 'nothing'} would end it there"
