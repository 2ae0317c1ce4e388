"""List prices from what SkyPilot keeps on this machine; no SkyPilot, no network."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from campaign.cli.plan import command
from campaign.cloud.catalogue import fits, offers
from campaign.plan.design import node_gpus
from campaign.spec.models import SkyNode

LAMBDA = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cpu_4x_general,,,4.0,16.0,0.2,us-east-1,,
gpu_8x_b200_sxm6,B200,8.0,208.0,2900.0,53.52,us-east-1,,
gpu_2x_b200_sxm6,B200,2.0,52.0,720.0,13.78,us-east-1,,
"""
AWS = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region
p6-b200.48xlarge,B200,8.0,192.0,2048.0,113.93,45.5,us-west-2
p6-b200.48xlarge,B200,8.0,192.0,2048.0,129.0,,us-east-1
p6-b200.48xlarge,B200,eight,192.0,2048.0,1.0,,us-east-2
"""
"""Columns as in skypilot-catalog v8, in the order of each cloud; prices are those of these tests."""
FILE = Path(__file__).parents[1] / "skylab" / "rented.yaml"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for cloud, text in {"lambda": LAMBDA, "aws": AWS}.items():
        file = tmp_path / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / ".sky" / "config.yaml").write_text(
        "slurm: {pricing: {accelerators: {B200: 6.25}}, cluster_configs: {dear: {pricing: {accelerators: {B200: 9}}}}}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def node(**more: Any) -> SkyNode:
    base = {"provider": "sky", "accelerators": "B200:4", "max_usd_per_hour": 120, "max_hours": 1}
    return SkyNode.model_validate(base | more)


def test_each_candidate_is_priced_at_the_full_node(home: Path) -> None:
    eight = [{"infra": "aws", "accelerators": "B200:8"}, {"infra": "slurm/dear"}, {"infra": "slurm/other"}]
    found = offers(node(any_of=eight), home)
    assert [(o.cloud, o.usd_per_hour, o.why_not) for o in found] == [
        ("aws", 113.93, ""),
        ("slurm", 36.0, ""),
        ("slurm", 25.0, ""),
    ]
    assert fits(found)
    (spot,) = offers(
        node(any_of=[{"infra": "aws/us-west-2", "accelerators": "B200:8", "use_spot": True}]), home
    )
    assert (spot.usd_per_hour, spot.source[:12]) == (45.5, "catalogue of")


def test_what_would_not_be_taken_says_why(home: Path) -> None:
    dear = offers(node(max_usd_per_hour=20, infra="aws", accelerators="B200:8"), home)
    assert [o.why_not for o in dear] == ["dearer than max_usd_per_hour 20"]
    assert fits(dear) is False
    (four,) = offers(node(infra="aws"), home)  # sold in eights only
    assert four.usd_per_hour is None
    assert "not sold" in four.why_not
    (one_dead_man,) = offers(node(infra="lambda", accelerators="B200:8"), home)
    assert "would end it there" in one_dead_man.why_not


def test_no_price_here_is_unknown_and_not_a_refusal(home: Path, tmp_path: Path) -> None:
    (unknown,) = offers(node(infra="gcp"), home)
    assert (unknown.usd_per_hour, unknown.why_not) == (None, "")
    assert fits([unknown]) is None
    assert offers(node(), tmp_path / "empty") == []
    assert fits([]) is None
    (home / ".sky" / "catalogs" / "v8" / "aws" / "vms.csv").write_bytes(b"\xff\xfe\x00,\n")
    assert offers(node(infra="aws", accelerators="B200:8"), home)[0].usd_per_hour is None


def test_without_a_cloud_every_catalogue_is_looked_at(home: Path) -> None:
    assert [(o.cloud, o.usd_per_hour) for o in offers(node(accelerators="B200:8"), home)] == [
        ("slurm", 50.0),
        ("lambda", 53.52),
        ("aws", 113.93),
    ]


def test_plan_prints_prices_or_declared(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(command, [str(FILE)])
    assert done.exit_code == 0, done.output
    assert "slurm/fakeb200 B200:4: $25.00/h (slurm.pricing)" in done.output
    said = json.loads(CliRunner().invoke(command, [str(FILE), "--json"]).stdout)
    assert [o["usd_per_hour"] for o in said["quotes"]["rent"]] == [25.0]
    none = CliRunner().invoke(command, [str(FILE), "--set", "nodes.rent.max_usd_per_hour=20"])
    assert "none of these fits" in none.output
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    assert "declared: $30/h" in CliRunner().invoke(command, [str(FILE)]).output


def test_pair_of_four_gpu_arms_has_both_halves_where_every_candidate_has_eight() -> None:
    both = [{"infra": "aws", "accelerators": "B200:8"}, {"infra": "gcp", "accelerators": "B200:8"}]
    assert len(node_gpus(node(any_of=both))) == 8
    assert len(node_gpus(node(any_of=[*both, {"infra": "slurm"}]))) == 4
    assert len(node_gpus(node())) == 4
