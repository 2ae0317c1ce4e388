"""A report made by hand: every kind of verdict, unknowns, a trip, an override, hostile names."""

import math
import random

import pytest

from campaign.analysis.model import AnchorResult, Speculation, Verdict, WidthCost
from campaign.report.model import (
    AnchorTime,
    BootFact,
    GateFact,
    LadderRung,
    NodeFact,
    PlanActual,
    Report,
    Source,
    SpendPoint,
    verdict_key,
)

T0 = 1_790_000_000_000_000_000
MIN = 60_000_000_000


def make_verdict(pair, a, b, metric, ratio, half, verdict, **kw):
    """A verdict with interval `ratio` +- `half` and blocks scattered around it."""
    rng = random.Random(f"{pair}{metric}")
    n = kw.pop("n", 12)
    base = {
        "kind": "pair",
        "family": pair,
        "session": "main",
        "workload": "chat",
        "concurrency": 1,
        "primary": metric == "step_ms",
        "ci_level": 0.95,
        "boots": 3,
        "df": 3.4,
        "boot_sd": 0.012,
        "boot_sd_source": "estimated",
        "differs": verdict in {"faster", "slower", "higher", "lower"},
        "equivalent": verdict == "equivalent",
        "margin": 0.02,
        "verdict_adjusted": None,
        "reasons": (),
        "usd": 0.0123,
        "design": "blocks",
        "p": 0.001,
        "p_tost": 0.2,
    } | kw
    known = ratio is not None
    return Verdict(
        pair=pair,
        a=a,
        b=b,
        metric=metric,
        ratio=ratio,
        lo=ratio - half if known and half else None,
        hi=ratio + half if known and half else None,
        lo_boots_only=ratio - half / 3 if known and half else None,
        hi_boots_only=ratio + half / 3 if known and half else None,
        lo90=ratio - half * 0.8 if known and half else None,
        hi90=ratio + half * 0.8 if known and half else None,
        n=n,
        verdict=verdict,
        blocks=tuple((f"s{i}", math.log(ratio) + rng.gauss(0, 0.03)) for i in range(n)) if known else (),
        **base,
    )


def ladder_verdicts():
    rungs = {3: (1.182, 1.21, 1.021), 5: (1.312, 1.28, 0.972), 8: (1.524, 1.31, 0.861)}
    out = []
    for depth, (step, accept, rate) in rungs.items():
        common = {"kind": "ladder", "family": "depth"}
        pair, b = f"depth:plain|depth={depth}", f"depth={depth}"
        out += [
            make_verdict(
                pair, "plain", b, "step_ms", step, 0.045, "slower", verdict_adjusted="slower", **common
            ),
            make_verdict(pair, "plain", b, "accept_len", accept, 0.09, "higher", **common),
            make_verdict(pair, "plain", b, "decode_tok_s", rate, 0.08, "unresolved", **common),
            make_verdict(pair, "plain", b, "ttft_ms", 1.004, 0.03, "unresolved", **common),
        ]
    out.append(
        make_verdict(
            "depth:depth=3|depth=5", "depth=3", "depth=5", "step_ms", 1.11, 0.05, "slower",
            kind="ladder", family="depth", verdict_adjusted="unresolved",
        )
    )  # fmt: skip
    return tuple(out)


def make_report(**changes) -> Report:
    verdicts = (
        *ladder_verdicts(),
        make_verdict("kv", "plain", "kv.b", "step_ms", 0.941, 0.022, "faster"),
        make_verdict("kv", "plain", "kv.b", "decode_tok_s", 1.063, 0.025, "faster"),
        make_verdict("aa", "plain", "plain#2", "step_ms", 1.0031, 0.009, "equivalent", kind="aa"),
        make_verdict(
            "one", "plain", "other", "step_ms", 1.05, 0, "unresolved",
            boot_sd=None, boot_sd_source="unknown", reasons=("boot_sd_unknown",), boots=1, df=None,
        ),
        make_verdict("bad", "plain", "worse", "step_ms", None, 0, "invalid", reasons=("drift", "cache_hits"), n=0),
    )  # fmt: skip
    fields = {
        "run": "quick-20261201-093000",
        "campaign": "quick",
        "simulated": False,
        "partial": False,
        "status": "finished",
        "why_ended": "",
        "started_utc_ns": T0,
        "ended_utc_ns": T0 + 7 * MIN,
        "as_of_utc_ns": T0 + 7 * MIN,
        "path": "results/quick-20261201-093000",
        "head_hash": "ab12" * 16,
        "ledger_length": 214,
        "canonical_sha256": "cd34" * 16,
        "versions": {"campaign": "0.1.0", "xllamacpp": "2026.10"},
        "nodes": (
            NodeFact("main", "l1", "here", "local", "machine-1f", 0.4, "declared", ("p0 (cpu)",), "settled", T0, T0 + 7 * MIN),
        ),
        "boots": (
            BootFact("main/ladder.depth/r0/plain@0", "main", "plain", "p0", 1.13, "stopped", None),
            BootFact("main/ladder.depth/r0/depth=3@0", "main", "depth=3", "p0", None, "failed", "oom <b>dead</b>"),
        ),
        "anchors": (
            AnchorResult("main", "first", 8.11, None, None, None, None, None, 8, 2, ("established",)),
            AnchorResult("main", "between1", 8.2, 8.11, 0.011, -0.02, 0.043, True, 8, 2, ()),
            AnchorResult("main", "last", 8.6, 8.11, 0.06, -0.31, 0.44, None, 8, 2, ("drift_unproven",)),
        ),
        "anchor_times": tuple(
            AnchorTime("main", p, T0 + m * MIN) for p, m in (("first", 1), ("between1", 4), ("last", 7))
        ),
        "drift_delta": 0.25,
        "verdicts": verdicts,
        "speculation": (
            Speculation(
                "main", "depth", 8.1,
                tuple(
                    WidthCost(f"depth={d}", d, 0.8 * d + 1, v, v - 0.4, v + 0.4, al, 0.31, (0.5, 0.3, 0.1)[: min(d, 3)], v / 8.1, ())
                    for d, v, al in ((3, 10.1, 1.21), (5, 11.8, 1.28), (8, 13.6, 1.31))
                ),
                0.86, 0.71, 1.02, (),
            ),
        ),
        "ladders": {
            "depth": (
                LadderRung("depth", "plain", None),
                *(LadderRung("depth", f"depth={d}", float(d)) for d in (3, 5, 8)),
            )
        },
        "spend": {
            "cap_usd": 0.1,
            "committed_usd": 0.046,
            "settled_usd": 0.046,
            "spent_usd": 0.046,
            "final": True,
            "measured_share": 0.61,
            "phases": {"provision": 0.0, "setup": 0.002, "load": 0.008, "warmup": 0.003, "anchor": 0.004,
                       "measure": 0.028, "idle": 0.0005, "teardown": 0.0005, "lost": 0.0},
            "sessions": [{"session": "main", "settled_usd": 0.046}],
        },
        "spend_points": tuple(SpendPoint(T0 + i * MIN, 0.046 * i / 7) for i in range(8)),
        "risk_points": (
            SpendPoint(T0, 0.2), SpendPoint(T0 + MIN, 0.15), SpendPoint(T0 + 7 * MIN, 0.046),
        ),
        "plan_actual": (PlanActual("main", 6.2, 7.0, 22, 22, 264, 264, 12, 1, 0.041, 0.046),),
        "gates": (),
        "warnings": (),
        "labels": {"kv.b": "kv_dtype q8_0"},
        "sources": {verdict_key(v): Source(f"SELECT 1 -- {v.pair}", v.n, "blocks") for v in verdicts},
    }  # fmt: skip
    return Report(**(fields | changes))


@pytest.fixture
def report() -> Report:
    return make_report()


@pytest.fixture
def build():
    """`make_report`, to be called with changes."""
    return make_report


@pytest.fixture
def verdict():
    """`make_verdict`."""
    return make_verdict


@pytest.fixture
def trip() -> GateFact:
    return GateFact(T0, "main", "drift", "tripped", "0.31", "0.25", "between2", "agent")


@pytest.fixture
def override() -> GateFact:
    return GateFact(T0, None, "drift", "overridden", "", "", "the fan was off <script>", "me")


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Folder of a finished simulated run."""
    from campaign.testing.sample_run import sample_run

    return sample_run(tmp_path_factory.mktemp("results"), name="whole")


@pytest.fixture(scope="session")
def broken(tmp_path_factory):
    """Folder of one whose controller died in the middle of the ladder."""
    from campaign.testing.sample_run import sample_run

    return sample_run(tmp_path_factory.mktemp("results"), name="broken", rounds=15)


@pytest.fixture(scope="session")
def assembled(sample):
    from campaign.report.assemble import assemble
    from campaign.store.run import open_run

    return assemble(open_run(sample.root))
