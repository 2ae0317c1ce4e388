"""Regenerate the shipped tables: `python -m campaign.engines.flags FOLDER`.

FOLDER holds the four wheels (`pip download --no-deps sglang==0.5.14 sglang==0.5.23 vllm==0.24.0 vllm==0.33.0`,
one call each). A shipped table whose wheel is not there is left as it is; one whose digest is another is told.
"""

import sys
from pathlib import Path

from campaign.engines.flags import table as tables
from campaign.engines.flags.source import open_source


def main(folder: Path) -> int:
    """Write every table whose wheel lies in the folder; 1 where none did."""
    target = Path(__file__).parent / "tables"
    written = 0
    for engine, version in tables.SHIPPED:
        for wheel in sorted(folder.glob(f"{engine}-{version}-*.whl")):
            table = tables.read(open_source(str(wheel), tables.PACKAGES[engine]), engine)
            (target / f"{engine}-{version}.json").write_text(tables.dumps(table), encoding="utf-8")
            sys.stdout.write(
                f"{wheel.name}: {len(table.flags)} flags, {len(table.env)} variables, sha256 {table.sha256}\n"
            )
            written += 1
    return 0 if written else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m campaign.engines.flags FOLDER_WITH_WHEELS")
    sys.exit(main(Path(sys.argv[1])))
