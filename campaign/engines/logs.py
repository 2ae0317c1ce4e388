"""A server's log: its progress while it boots, its last words, and what must not stay in it."""

import contextlib
import os
import re
from pathlib import Path

from campaign.redact import REDACTOR

_OWN_PROBES = re.compile(r"/(?:health|v1/models|v1/completions|metrics|props|slots)\b")
_SCRUB_WHOLE = 16 * 1024 * 1024


class LogTail:
    """Follows a growing log: its progress, its last part, and its text from here on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = path.stat().st_size if path.exists() else 0
        self._read = self.start
        self.lines = 0
        """Lines so far that our own probes did not cause."""

    def grown(self) -> int:
        """Count new lines; access-log lines of our own probes are not progress."""
        with contextlib.suppress(OSError), self.path.open("rb") as f:
            f.seek(self._read)
            new = f.read()
            self._read += len(new)
            text = new.decode("utf-8", "replace")
            self.lines += sum(1 for line in text.splitlines() if not _OWN_PROBES.search(line))
        return self.lines

    def text(self, limit: int | None = None) -> str:
        """What this boot wrote, or its last `limit` bytes."""
        try:
            with self.path.open("rb") as f:
                size = f.seek(0, os.SEEK_END)
                f.seek(max(self.start, size - limit) if limit else self.start)
                return f.read().decode("utf-8", "replace")
        except OSError:
            return ""


def scrub(path: Path) -> None:
    """Rewrite a log without secrets. Left alone where there is none, or where it cannot be read."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > _SCRUB_WHOLE:
            # A log of this size goes line by line: a private key over several lines is not looked for.
            clean = None
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
            clean = REDACTOR.text(text)
            if clean == text:
                return
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as out:
            if clean is not None:
                out.write(clean)
            else:
                with path.open(encoding="utf-8", errors="replace") as lines:
                    out.writelines(REDACTOR.text(line) for line in lines)
        temporary.replace(path)


def last_lines(text: str, n: int = 12) -> str:
    """The last `n` lines."""
    return "\n".join(text.splitlines()[-n:])
