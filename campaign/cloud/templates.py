"""Where the files of `sky/` are: in the installed package, or in the checkout."""

from importlib.resources import files
from pathlib import Path


def path(name: str) -> Path:
    """A template as a file. Raises FileNotFoundError where the installation is broken."""
    for folder in (Path(str(files("campaign"))) / "_templates", Path(__file__).parents[2] / "sky"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"template {name} is not part of this installation")


def checkout() -> Path | None:
    """The folder this package is run from, where that is a checkout."""
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "sky").is_dir() else None
