#!/usr/bin/env bash
# What runs on a rented node: first of all the lease timer, then the environment, then the session agent.
#   node_boot.sh setup|run
# Everything lives in ~/.campaign/NODE of the account's real home: a job's HOME may be another one.
set -euo pipefail
home=$(getent passwd "$(id -un)" | cut -d: -f6)
folder=$home/.campaign/$CAMPAIGN_NODE
mkdir -p "$folder/control" "$folder/run"
chmod 700 "$folder"
files=$(cd ~/.campaign-node && pwd)
export HF_HOME=${HF_HOME:-$home/.cache/huggingface}
python=
for candidate in python3.12 python3.13 python3.11 /usr/bin/python3 python3; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then python=$candidate; break; fi
done

timer() { # One timer a lease, in a session of its own: it outlives the job that started it.
  [ -n "$python" ] || { echo "node_boot: no Python for the lease timer" >&2; exit 1; }
  (
    flock -n 9 || exit 0
    unset ${CAMPAIGN_NAMED:-}
    rm -f "$folder/timer.json" # of a timer that is gone
    setsid nohup "$python" -S -E "$files/node_timer.py" "$folder" > "$folder/timer.log" 2>&1 < /dev/null 9>&9 &
  ) 9> "$folder/timer.lock"
  for _ in $(seq 1 50); do [ -s "$folder/timer.json" ] && return; sleep 0.1; done
  echo "node_boot: the lease timer did not start" >&2
  exit 1
}

hub() { # Weights that need a token are brought here, with it; whatever starts later finds them and has no token.
  local ref uv
  uv=$(command -v uv || command -v uv-real || true)
  for ref in ${CAMPAIGN_HUB:-}; do
    if [ -z "$uv" ]; then
      [ -x "$folder/hub/bin/hf" ] || { "$folder/venv/bin/python" -m venv "$folder/hub" && "$folder/hub/bin/pip" install --quiet huggingface_hub; }
      "$folder/hub/bin/hf" download "${ref%@*}" --revision "${ref##*@}" --quiet
    else "$uv" tool run --quiet --from huggingface_hub hf download "${ref%@*}" --revision "${ref##*@}" --quiet; fi
  done
}

shared() { [ -n "${SLURM_JOB_ID:-}" ]; } # a machine with other people's work on it

unwanted() { # Credential files of yours that SkyPilot sends to every node: gone before anything else runs here.
  # Under Slurm a job's HOME is a folder of SkyPilot's own; where it is your account's home, that is left alone.
  ! shared || [ "$(readlink -f ~)" != "$(readlink -f "$home")" ] || return 0
  local name file staged
  for name in $CAMPAIGN_UNWANTED; do
    name=${name#"~/"}
    for file in ~/"$name" ~/.sky/file_mounts/"$name"; do
      [ -e "$file" ] || [ -L "$file" ] || continue
      for staged in ~/.sky/.runtime_files/*; do # SkyPilot leaves there what it has copied from
        ! diff -rq -- "$staged" "$file" > /dev/null 2>&1 || rm -rf -- "$staged"
      done
      rm -rf -- "$(readlink -f -- "$file")" "$file" && echo "node_boot: removed ~/$name"
    done
  done
}

case $1 in
setup)
  timer
  unwanted
  # SkyPilot keeps copies of this job's secrets in its folder under a shared one, for all to read.
  if shared && [ "$(readlink -f ~)" != "$(readlink -f "$home")" ]; then chmod go-rwx ~; fi
  # The cache is the account's: the next lease on this node, or on this shared home, finds it.
  export UV_CACHE_DIR=${UV_CACHE_DIR:-$home/.cache/campaign-uv}
  bash "$files/node_setup.sh" "$folder/venv" "${CAMPAIGN_REQUIREMENT/@FILES@/$files}" "$files/constraints.txt"
  for extra in $CAMPAIGN_NO_DEPS; do
    uv=$(command -v uv || command -v uv-real || true)
    if [ -n "$uv" ]; then "$uv" pip install --quiet --no-deps --python "$folder/venv/bin/python" "$extra"
    else "$folder/venv/bin/python" -m pip install --quiet --no-deps "$extra"; fi
  done
  hub
  ;;
run)
  timer
  cd "$folder"
  # Not SkyPilot's Ray, Python path or credentials: this environment is the project's own.
  unset PYTHONPATH RAY_ADDRESS RAY_RUNTIME_ENV CAMPAIGN_KEY ${CAMPAIGN_NAMED:-} CAMPAIGN_NAMED
  unset PYTHONDONTWRITEBYTECODE
  until [ -f order.json ]; do sleep 1; done
  setsid "$folder/venv/bin/python" -m campaign.fleet.node_agent "$folder" > "$folder/agent.log" 2>&1 < /dev/null &
  agent=$!
  echo "$agent" > agent.pid
  code=0
  wait "$agent" || code=$?
  echo "$code" > exit.tmp
  mv exit.tmp exit
  tail -n 20 agent.log
  # The node stays until it is taken down or its lease is over: rows are still to be fetched.
  sleep infinity
  ;;
esac
