"""Which of the user's credentials SkyPilot would send to a node, and how they are kept off it.

SkyPilot 0.14.1 uploads the credential files of every cloud to every node (`backend_utils.write_cluster_config`,
`check.get_cloud_credential_file_mounts`), also to a node of another cloud. A cloud whose configuration knows
`remote_identity` is told NO_UPLOAD, or SERVICE_ACCOUNT where its own dead-man needs an identity; the others
(Lambda, RunPod, ...) cannot be told, so the node removes their files before anything else runs there.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Final

from campaign.cloud import deadmen

SERVICE_ACCOUNT: Final = frozenset({"aws", "gcp"})
"""Clouds whose autodown works with a role of the machine itself, and that may be launched on."""
ALWAYS: Final = ("~/.cloudflare/r2.credentials", "~/.cloudflare/accountid", "~/.coreweave/cw.config",
                 "~/.coreweave/cw.credentials", "~/.vastdata/vastdata.config", "~/.vastdata/vastdata.credentials")  # fmt: skip
"""Stores whose keys SkyPilot uploads whatever the configuration says."""


def configured(config: Any, candidates: frozenset[str]) -> Any:
    """SkyPilot's configuration for one launch: a copy of the user's, in which no cloud sends its files.

    What the user has set for a cloud stays as it is. `candidates`: clouds the node may be on, in lower case.
    """
    from sky.utils import config_utils, registry, schemas

    schema: Any = schemas.get_config_schema  # SkyPilot does not type it
    known = schema()["properties"]
    told = config_utils.Config(copy.deepcopy(dict(config)))
    for name in registry.CLOUD_REGISTRY:
        cloud = str(name).lower()
        fits = "remote_identity" in known.get(cloud, {}).get("properties", {})
        if fits and told.get_nested((cloud, "remote_identity"), None) is None:
            # SkyPilot keeps files back from another cloud's node for NO_UPLOAD alone.
            value = "SERVICE_ACCOUNT" if cloud in SERVICE_ACCOUNT & candidates else "NO_UPLOAD"
            told.set_nested((cloud, "remote_identity"), value)
    return told


@contextlib.contextmanager
def without_credentials(candidates: frozenset[str]) -> Iterator[None]:
    """Requests made inside carry that configuration: it is the client's that a server follows."""
    from sky import skypilot_config

    with skypilot_config.replace_skypilot_config_in_process(
        configured(skypilot_config.to_dict(), candidates)
    ):
        yield


def unwanted() -> list[str]:
    """Credential files, as paths on a node, that may arrive there all the same and are removed first of all.

    Not those of a cloud for which the user's own configuration asks for them.
    """
    from sky.utils import registry

    from sky import skypilot_config

    config = skypilot_config.to_dict()
    found = set(ALWAYS)
    for name, cloud in registry.CLOUD_REGISTRY.items():
        asked = config.get_nested((str(name).lower(), "remote_identity"), None)
        if asked == "LOCAL_CREDENTIALS":
            continue
        with contextlib.suppress(Exception):  # a cloud whose own SDK is not installed has no files to send
            found |= set(cloud.get_credential_file_mounts())
    return sorted(p for p in found if p.startswith("~/") and " " not in p and ".." not in p)


def launchable(cloud: str) -> bool:
    """Whether enough dead-men end the bill there."""
    return len(deadmen.row(cloud).effective()) >= deadmen.NEEDED
