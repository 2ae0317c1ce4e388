"""What SkyPilot is told about credentials, against its own schema and registry; nothing is launched."""

from typing import Any

import pytest

from campaign.cloud import sky_calls, sky_identity, sky_sdk
from campaign.errors import ProviderError
from campaign.spec.models import SkyNode

pytestmark = pytest.mark.filterwarnings("ignore")
"""SkyPilot's own modules warn of their dependencies while they are imported."""


@pytest.fixture
def config() -> Any:
    sky_sdk.load()
    from sky.utils import config_utils

    return config_utils.Config({"azure": {"remote_identity": "LOCAL_CREDENTIALS"}, "gcp": {"vpc_name": "v"}})


def test_no_cloud_sends_its_files_but_those_the_user_has_asked_for(config: Any) -> None:
    from sky.utils import common_utils, schemas

    told = sky_identity.configured(config, frozenset({"aws", "slurm"}))
    assert told.get_nested(("aws", "remote_identity"), None) == "SERVICE_ACCOUNT"
    assert told["gcp"] == {"vpc_name": "v", "remote_identity": "NO_UPLOAD"}
    assert told.get_nested(("kubernetes", "remote_identity"), None) == "NO_UPLOAD"
    assert told.get_nested(("nebius", "remote_identity"), None) == "NO_UPLOAD"
    assert told.get_nested(("azure", "remote_identity"), None) == "LOCAL_CREDENTIALS"
    assert "remote_identity" not in config["gcp"]  # the user's own is left as it is
    validate: Any = common_utils.validate_schema
    schema: Any = schemas.get_config_schema
    validate(dict(told), schema(), "refused: ")


def test_a_launch_carries_it_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sky_sdk.load()
    from sky.server.requests import payloads
    from sky.utils import annotations

    monkeypatch.setattr(annotations, "is_on_api_server", False)  # as in every call of the SDK

    def sent() -> Any:
        return dict(payloads.get_override_skypilot_config_from_client()).get("nebius")

    before = sent()
    with sky_identity.without_credentials(frozenset({"slurm"})):
        assert sent() == {"remote_identity": "NO_UPLOAD"}
    assert sent() == before


def test_files_that_cannot_be_kept_back_are_named_for_removal() -> None:
    sky_sdk.load()
    unwanted = sky_identity.unwanted()
    assert {"~/.lambda_cloud/lambda_keys", "~/.cloudflare/r2.credentials"} <= set(unwanted)
    assert not [p for p in unwanted if ".." in p or " " in p]


def node(**more: Any) -> SkyNode:
    base = {"provider": "sky", "accelerators": "B200:8", "max_usd_per_hour": 60, "max_hours": 1}
    return SkyNode.model_validate(base | more)


def test_cloud_with_one_dead_man_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    sky_sdk.load()
    both = sky_calls.resources_of(node(any_of=[{"infra": "lambda"}, {"infra": "aws"}]), None)
    assert str(both.cloud) == "AWS"
    with pytest.raises(ProviderError, match="fewer than two dead-men end the bill on lambda") as caught:
        sky_calls.resources_of(node(infra="lambda"), None)
    assert caught.value.kind == "refused"
    monkeypatch.setattr(sky_calls, "_enabled", lambda: ["aws", "gcp", "lambda"])
    assert {str(r.cloud) for r in sky_calls.resources_of(node(), None)} == {"AWS", "GCP"}


def test_nothing_here_stops_an_api_server() -> None:
    """What we did not start is not ours to stop, and we start none."""
    from pathlib import Path

    import campaign

    source = [p.read_text() for p in Path(campaign.__file__).parent.rglob("*.py")]
    assert not [text for text in source if "api_stop" in text or "purge=True" in text or "purge =" in text]
