"""What must not stay in a server's log, and what must."""

from pathlib import Path

from campaign.engines import logs
from campaign.redact import HIDDEN, REDACTOR

KEY = "canary-51b6f0c94d2e7a83"


def test_a_log_without_secrets_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.log"
    path.write_text("loading\nmax_tokens=8, token usage: 0.5\n")
    before = path.stat()
    logs.scrub(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    logs.scrub(tmp_path / "none.log")
    assert not (tmp_path / "none.log").exists()


def test_keys_go_and_lines_stay(tmp_path: Path, monkeypatch) -> None:
    REDACTOR.hide(KEY)
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----"
    text = f"start\nargs: --api-key {KEY} --port 1\nGET /x?api_key={KEY}\n{KEY} alone\n{key}\nend \xff\n"
    path = tmp_path / "b.log"
    for limit in (logs._SCRUB_WHOLE, 1):
        monkeypatch.setattr(logs, "_SCRUB_WHOLE", limit)
        path.write_bytes(text.encode("latin-1"))
        logs.scrub(path)
        found = path.read_text()
        assert KEY not in found
        assert f"--api-key {HIDDEN} --port 1" in found
        assert found.startswith("start\n")
        assert "end " in found
        # A key over several lines is looked for where the log is read whole.
        assert ("MIIEvQ" in found) == (limit == 1)
        assert [p.name for p in tmp_path.iterdir()] == ["b.log"]
