#!/bin/bash
# One session of a spec on this GPU machine: `bench/gpu/session.sh SESSION [--set KEY=VALUE...]`, run in the repository.
#   CARRY    what prepare.sh made (default .carry)        WORK   where it is unpacked (default /tmp/campaign-gpu), once
#   SITE     where the engine's packages go (default /tmp/site: carried kernels name the headers they were built from)
#   OUT      where the archive goes (default results)     SPEC   default examples/h200-sglang.yaml
#   LIMIT_S  the run is interrupted after so long, tears down and settles (default 550)
# Brings back OUT/run-SESSION.tar.xz (the run folder, with server logs and telemetry), OUT/SESSION.log, and, where the
# first boot compiled kernels that were not carried, OUT/kernels.tgz.
set -uo pipefail
session=$1; shift
began=$(date +%s)
CARRY=${CARRY:-.carry} WORK=${WORK:-/tmp/campaign-gpu} SITE=${SITE:-/tmp/site} OUT=${OUT:-results} SPEC=${SPEC:-examples/h200-sglang.yaml} LIMIT_S=${LIMIT_S:-550}
py=${PYTHON:-python3}
say() { echo "[$(($(date +%s) - began)) s] $*"; }

if [ ! -f "$WORK/ready" ]; then
  mkdir -p "$WORK"
  # The engine has a venv of its own: the carried packages first, then those of the image.
  "$py" -m venv --without-pip "$WORK/venv" || exit 1
  own=$("$WORK/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$SITE"
  tar xJf "$CARRY/site.tar.xz" -C "$SITE" || exit 1
  "$py" -c 'import sys, sysconfig; print("import site; site.addsitedir(%r); site.addsitedir(%r)" % (sys.argv[1], sysconfig.get_paths()["purelib"]))' "$SITE" > "$own/carried.pth"
  mkdir -p "$WORK/product"
  "$py" - "$CARRY"/wheels "$WORK/product" <<'PY' || exit 1
import pathlib, sys, zipfile
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(sys.argv[2])
PY
  [ ! -f "$CARRY/kernels.tgz" ] || tar xzf "$CARRY/kernels.tgz" -C "$HOME"
  "$py" bench/gpu/make_model.py "$WORK/model" || exit 1
  # An import of SGLang reads 3,000 modules; compiled beforehand, by all cores, the first boot does not wait for it.
  timeout 40 "$WORK/venv/bin/python" -m compileall -q -j 0 "$SITE/sglang" "$SITE/transformers" "$SITE/flashinfer" > /dev/null 2>&1
  touch "$WORK/ready"
  say "unpacked"
fi
env | cut -d= -f1 | grep -E '^[A-Z_]+$' | sort | tr '\n' ' '; echo  # names alone: what this image exports
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,power.draw --format=csv,noheader 2>&1
"$WORK/venv/bin/python" -c 'import torch, sglang, transformers; print("torch", torch.__version__, "cuda", torch.cuda.is_available(), "sglang", sglang.__version__, "transformers", transformers.__version__)' 2>&1 | tail -1
say "engine imports"

export PYTHONPATH="$WORK/product:$PWD" CAMPAIGN_GPU="$WORK" PYTHONUNBUFFERED=1 COLUMNS=150
mkdir -p "$OUT" "$WORK/results"
touch "$WORK/start-$session"
timeout -s INT -k 25 "$LIMIT_S" "$py" -m campaign run "$SPEC" --only "$session" --set store="$WORK/results/" "$@" 2>&1 | tee "$OUT/$session.log"
rc=${PIPESTATUS[0]}
say "campaign: exit $rc"
run=$(ls -td "$WORK"/results/*/ 2>/dev/null | head -1)
if [ -n "$run" ] && [ "$run" -nt "$WORK/start-$session" ]; then
  tar cJf "$OUT/run-$session.tar.xz" --exclude ballast -C "$WORK/results" "$(basename "$run")"
  if [ "$rc" -ne 0 ]; then for log in $(ls -t "$run"logs/*.log 2>/dev/null | head -2); do echo "== $log"; tail -25 "$log" | cut -c1-400; done; fi
fi
if find "$HOME/.cache/flashinfer" "$HOME/.cache/tvm-ffi" "$HOME/.triton" -name '*.so' -newer "$WORK/ready" 2>/dev/null | grep -q .; then
  (cd "$HOME" && tar czf "$OUT/kernels.tgz" $(ls -d .cache/flashinfer .cache/tvm-ffi .triton 2>/dev/null))
fi
say "done"; ls -la "$OUT"
exit "$rc"
