"""Reading a run: `campaign.open_run(path).requests()`."""


class Run:
    """A run folder, read-only."""


def open_run(path: str) -> Run:
    """Open a run folder; also while the run goes on."""
    raise FileNotFoundError(path)
