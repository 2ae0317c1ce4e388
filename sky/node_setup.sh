#!/usr/bin/env bash
# Give a rented node an environment of its own for `campaign`, apart from SkyPilot's.
#   node_setup.sh FOLDER REQUIREMENT [CONSTRAINTS]
# FOLDER is the virtual environment to make; REQUIREMENT a wheel or a pinned requirement; CONSTRAINTS a file of pins.
# Prints the interpreter that was used: Python 3.12 where it can be had, else any from 3.11.
set -euo pipefail
folder=$1 requirement=$2 constraints=${3:-}

python=
for candidate in python3.12 python3.13 python3.11 /usr/bin/python3 python3; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
uv=$(command -v uv || command -v uv-real || true)

if [ -n "$uv" ]; then
  "$uv" venv --quiet --python "${python:-3.12}" "$folder"
  "$uv" pip install --quiet --python "$folder/bin/python" ${constraints:+-c "$constraints"} "$requirement"
elif [ -n "$python" ]; then
  "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet ${constraints:+-c "$constraints"} "$requirement"
else
  echo "node_setup: neither uv nor a Python from 3.11 on this node" >&2
  exit 1
fi
"$folder/bin/python" -c 'import sys, campaign; print(f"campaign {campaign.__version__} on Python {sys.version.split()[0]}")'
