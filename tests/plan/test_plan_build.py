import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.errors import BudgetRefused, SpecError
from campaign.money import MicroUsd, micro
from campaign.plan.admit import admit, require_admitted
from campaign.plan.cost import Lease, Price, declared_prices
from campaign.plan.outline import Outline, outline
from campaign.plan.power import Prior, default_prior, resolvable, session_boot_df
from campaign.spec.load import load
from campaign.spec.models import Ladder

METRICS = ("step_ms", "accept_len", "decode_tok_s", "ttft_ms")


def group(plan, name):
    return next(g for s in plan.sessions for g in s.groups if g.name == name)


# --- the quickstart


def test_the_quickstart_plan(quickstart, planned):
    plan = planned(quickstart())
    (main,) = plan.sessions
    assert [g.name for g in main.groups] == [
        "anchor.first",
        "pair.aa",
        "anchor.between1",
        "pair.kv",
        "anchor.between2",
        "ladder.depth",
        "anchor.last",
    ]
    # 4 anchors x 2 boots; two pairs x 2 arms x 4 boots; a ladder of 4 arms x 4 boots.
    assert main.boots == 4 * 2 + 2 * 2 * 4 + 4 * 4 == 40
    # A warm-up each boot; 4 slots in an anchor boot, 8 elsewhere.
    assert main.requests == 40 + 4 * 2 * 4 + 32 * 8 == 328
    assert [c.pair for c in main.comparisons][:2] == ["aa", "kv"]
    assert len(main.comparisons) == 2 + 5
    assert sorted(main.arms) == sorted(["plain", "plain#2", "kv.b", "depth=3", "depth=5", "depth=8"])
    assert {g.design for g in main.groups if g.kind != "anchor"} == {"alternated"}
    assert plan.admitted == ("main",)
    assert plan.cut == ()
    assert 5 * 60 < main.seconds < 15 * 60
    assert main.usd_expected == pytest.approx(600_000 * (main.seconds + 1) / 3600, abs=200)


def test_every_round_holds_all_arms_of_its_group_and_rounds_are_the_boots(quickstart, planned):
    for g in planned(quickstart()).sessions[0].groups:
        if g.kind == "anchor":
            assert [len(r.boots) for r in g.rounds] == [1, 1]
        else:
            assert len(g.rounds) == 4
            assert all({b.arm for b in r.boots} == set(g.arms) for r in g.rounds)


def test_the_same_spec_gives_the_same_plan(quickstart, planned):
    assert planned(quickstart()) == planned(quickstart())


def test_anchors_repeat_their_slots_and_seeds(quickstart, planned):
    """The drift of step time is read on the same requests, first and last."""
    plan = planned(quickstart())
    sequences = [
        [r.sequence for r in group(plan, f"anchor.{p}").rounds] for p in ("first", "between1", "last")
    ]
    assert sequences[0] == sequences[1] == sequences[2]


def test_no_anchor_between_where_it_is_not_wanted_or_not_cheap(quickstart, planned):
    for sets in (("anchor.between=false",), ("arms.plain.estimate={boot_s: 11}",)):
        names = [g.name for g in planned(quickstart(*sets)).sessions[0].groups]
        assert names == ["anchor.first", "pair.aa", "pair.kv", "ladder.depth", "anchor.last"]


def test_the_shipped_quickstart_plans_within_its_cap_and_without_a_warning(planned):
    spec = load(Path(__file__).parents[2] / "experiments.yaml", env={}).spec
    plan = planned(spec)
    (main,) = plan.sessions
    assert plan.admitted == ("main",)
    assert plan.warnings == ()
    assert {g.design for g in main.groups if g.kind != "anchor"} == {"alternated"}
    groups = [*spec.pairs.values(), *spec.ladders.values()]
    measured = [g.boots * (len(g.values) + 1 if isinstance(g, Ladder) else 2) for g in groups]
    assert main.boots == sum(measured) + (len(groups) + 1) * spec.anchor.boots == 40
    slots = sum(m * spec.workloads[g.workload].n for m, g in zip(measured, groups, strict=True))
    anchors = (len(groups) + 1) * spec.anchor.boots * spec.workloads[spec.anchor.workload].n
    assert main.requests == main.boots + slots + anchors
    assert len(main.comparisons) == len(spec.pairs) + 2 * len(spec.ladders["depth"].values) - 1
    assert 4 * 60 < main.seconds < 12 * 60


# --- designs


def test_gpu_arms_alternate_on_lists_of_their_own_where_they_fit(rented, planned):
    small = group(planned(rented()), "pair.small@c1")
    assert small.design == "alternated"
    for rnd in small.rounds:
        used = [g for b in rnd.boots for g in b.gpus]
        assert sorted(len(b.gpus) for b in rnd.boots) == [1, 2]
        assert len(used) == len(set(used))


def test_arms_that_do_not_fit_together_take_blocks_or_bracket(rented, planned):
    plan = planned(rented())
    big, once = group(plan, "pair.big"), group(plan, "pair.once")
    assert (big.design, once.design) == ("blocks", "bracketed")
    assert "".join(r.boots[0].arm[-1] for r in big.rounds) == "2442"
    assert "6 GPUs together and the node has 4" in big.why
    assert any("pairs.once: one boot" in w for w in plan.warnings)


def test_why_prices_the_alternatives(rented, planned):
    why = group(planned(rented()), "pair.small@c1").why
    for design in ("duet", "blocks", "bracketed"):
        assert re.search(rf"{design} [\d.]+ (s|min|h) and \$[\d.]+", why)
    assert "alternated" not in group(planned(rented()), "pair.big").why  # not feasible, not offered


def test_a_design_asked_for_is_taken(rented, quickstart, planned):
    both = group(planned(rented()), "pair.both")
    assert both.design == "duet"
    assert "asked for" in both.why
    kv = group(planned(quickstart("pairs.kv.design=blocks")), "pair.kv")
    assert [len(r.boots) for r in kv.rounds] == [1] * 8


def test_blocks_take_two_boots_whatever_was_asked(quickstart, planned):
    plan = planned(quickstart("pairs.kv.design=blocks", "pairs.kv.boots=1"))
    assert len(group(plan, "pair.kv").rounds) == 4
    assert any("blocks takes 2 boots" in w for w in plan.warnings)


def test_bracketed_boots_each_arm_once(quickstart, planned):
    plan = planned(quickstart("pairs.kv.design=bracketed"))
    assert [r.boots[0].arm for r in group(plan, "pair.kv").rounds] == ["plain", "kv.b"]
    assert any("bracketed boots each arm once, not boots: 4" in w for w in plan.warnings)


def test_alternated_on_too_few_gpus_shares_them_and_says_so(rented, planned):
    plan = planned(rented("pairs.big.design=alternated", "arms.tp1.memory_fraction=0.4"))
    big = group(plan, "pair.big")
    assert {b.gpus for r in big.rounds for b in r.boots} == {(0, 1), (0, 1, 2, 3)}
    # Places are swapped in the second round, and boots stand in the order of places.
    assert [[(b.arm, b.place) for b in r.boots] for r in big.rounds] == [
        [("tp2", "p0"), ("tp4", "p1")],
        [("tp4", "p0"), ("tp2", "p1")],
    ]
    assert any(
        "pairs.big: 2 arms share the node's first GPUs, 0.8 of their memory" in w for w in plan.warnings
    )


@pytest.mark.parametrize(
    ("fraction", "why"),
    [
        ("null", r"arms\.tp2\.memory_fraction = null: pairs\.big puts 2 arms on one GPU"),
        ("0.5", r"pairs\.big\.design = alternated: .* ask for 0\.5 \(tp2\) \+ 0\.5 \(tp4\) = 1 of"),
    ],
)
def test_arms_that_share_gpus_must_say_that_their_memory_fits(rented, planned, fraction, why):
    with pytest.raises(SpecError, match=why):
        planned(rented("pairs.big.design=alternated", f"arms.tp1.memory_fraction={fraction}"))


def test_sglang_arms_with_capped_pools_fit_by_their_caps(rented, planned):
    plan = planned(
        rented(
            "pairs.big.design=alternated",
            "arms.tp1.memory_fraction=0.85",
            "arms.tp1.extra_args=[--max-total-tokens, '4096']",
        )
    )
    assert any("KV pools are capped at 4096 tokens" in w for w in plan.warnings)


def test_an_arm_wider_than_its_node_is_refused(rented, planned):
    spec = rented()
    wide = spec.arms["tp4"].model_copy(update={"tp": 8})
    with pytest.raises(SpecError, match=r"arms\.tp4\.tp = 8: node four has 4 GPUs"):
        planned(spec.model_copy(update={"arms": {**spec.arms, "tp4": wide}}))


def test_gpu_engines_on_a_node_that_lists_no_gpus_are_not_taken_to_fit_together(quickstart, planned):
    plan = planned(
        quickstart("arms.plain.engine=vllm", "arms.plain.threads=null", "arms.ngram.speculation.ngram_size=3")
    )
    assert group(plan, "pair.kv").design == "blocks"


# --- money


def test_session_dollars_are_its_groups_plus_setup_and_teardown(quickstart, rented, planned):
    for plan in (planned(quickstart()), planned(rented()), planned(quickstart("nodes.here.max_hours=0.05"))):
        for session in plan.sessions:
            rest = session.usd_expected - sum(g.usd_expected for g in session.groups)
            assert rest >= 0
            assert session.usd_worst >= session.usd_expected
            amounts = [session.usd_expected, session.usd_worst, *(g.usd_expected for g in session.groups)]
            assert all(type(a) is int and a >= 0 for a in amounts)
        shown = plan.to_json()
        assert shown["usd_worst"] == pytest.approx(sum(s["usd_worst"] for s in shown["sessions"]))


def test_a_short_lease_says_what_will_not_run(quickstart, planned):
    plan = planned(quickstart("nodes.here.max_hours=0.1"))
    (main,) = plan.sessions
    assert main.worst_seconds == main.seconds == 360
    (warning,) = [w for w in plan.warnings if "max_hours" in w]
    assert "ladder.depth, anchor.last will not finish" in warning
    assert "pair.kv" not in warning
    assert group(plan, "anchor.last").usd_expected == 0


def test_a_plan_that_does_not_fit_is_refused_with_what_to_cut(quickstart, planned):
    plan = planned(quickstart("budget.cap_usd=0.001"))
    assert plan.admitted == ()
    with pytest.raises(BudgetRefused) as refused:
        require_admitted(plan)
    text = str(refused.value)
    assert refused.value.exit_code == 3
    for part in (
        "session main",
        "cap_usd $0.001",
        "raise budget.cap_usd",
        "cut ladder depth",
        "cut pair kv",
        "boots 4 -> 2",
    ):
        assert part in text


def test_raising_the_cap_as_advised_is_enough(quickstart, planned):
    advised = re.search(r"at least ([\d.]+)", planned(quickstart("budget.cap_usd=0.001")).cut[0])
    assert advised is not None
    assert planned(quickstart(f"budget.cap_usd={advised[1]}")).admitted == ("main",)
    less = float(advised[1]) - 0.01
    assert planned(quickstart(f"budget.cap_usd={less:.2f}")).admitted == ()


def test_each_cut_saves_what_it_says(quickstart, planned):
    plan = planned(quickstart("budget.cap_usd=0.001"))
    before = plan.sessions[0].usd_worst
    saved = {c.partition(" (")[0]: float(c.partition("($")[2].split()[0]) for c in plan.cut[1:]}
    tried = {
        "cut ladder depth": ("sessions.main={node: here, pairs: [aa, kv]}",),
        "cut pair aa": ("sessions.main={node: here, pairs: [kv], ladders: [depth]}",),
        "boots 4 -> 2": ("ladders.depth.boots=2", "pairs.kv.boots=2", "pairs.aa.boots=2"),
        "gates.boot_timeout 300s -> 60s": ("gates={boot_timeout: 60s}",),
    }
    for cut, sets in tried.items():
        after = planned(quickstart(*sets)).sessions[0].usd_worst
        assert saved[cut] == pytest.approx((before - after) / 1e6, rel=0.02), cut


def test_a_plan_that_fits_is_not_refused(quickstart, planned):
    require_admitted(planned(quickstart()))


# --- admission


def asking(name, worst, expected):
    price = Price(MicroUsd(1), 1, "declared", 0, 0)
    return Outline(name, "n", price, 0.0, (), Lease(1, 1, 1, MicroUsd(expected), MicroUsd(worst)))


@given(
    asks=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8),
    cap=st.integers(1, 100),
)
def test_the_admitted_never_pass_the_cap_together(asks, cap):
    sessions = [asking(f"s{i}", max(pair), min(pair)) for i, pair in enumerate(asks)]
    admitted, warnings = admit(sessions, MicroUsd(cap))
    worst = {s.name: s.lease.usd_worst for s in sessions}
    assert sum(worst[n] for n in admitted) <= cap
    possible = [s.name for s in sessions if worst[s.name] <= cap]
    assert list(admitted) == possible[: len(admitted)]  # by priority, none overtaken
    assert bool(admitted) == bool(possible)
    assert len(warnings) == len(sessions) - len(admitted)
    if len(admitted) < len(possible):
        assert sum(worst[n] for n in possible[: len(admitted) + 1]) > cap


def test_a_later_session_waits_for_money_and_does_not_overtake():
    admitted, warnings = admit(
        [asking("a", 60, 20), asking("b", 70, 20), asking("c", 5, 5), asking("d", 500, 1)], MicroUsd(100)
    )
    assert admitted == ("a",)
    assert "session b" in warnings[0]
    assert "has settled" in warnings[0]
    assert "session c" in warnings[1]
    assert "will not run" in warnings[2]


def test_sessions_stand_by_priority_then_by_name_order_of_the_file(rented, planned):
    assert [s.name for s in planned(rented()).sessions] == ["main", "rest"]
    assert [s.name for s in planned(rented("sessions.rest.priority=1")).sessions] == ["rest", "main"]


# --- power and warnings


def test_power_rows_are_what_power_says(quickstart, planned):
    plan = planned(quickstart())
    (main,) = plan.sessions
    df = session_boot_df(main.groups, resident=True)
    expected = resolvable("step_ms", 8, 4, default_prior("cpu"), "alternated", df_boot=df)
    rows = {(p.pair, p.metric): p for p in plan.power}
    kv = rows["kv", "step_ms"]
    assert kv.resolvable_pct == round(100 * expected, 2)
    assert (kv.n, kv.boots, kv.rule_pct, kv.source) == (8, 4, 10.0, "default")
    assert Counter(m for _, m in rows) == {"step_ms": 7, "decode_tok_s": 7}


def test_a_margin_finer_than_what_resolves_warns_and_does_not_refuse(quickstart, planned):
    plan = planned(quickstart("pairs.kv.margin=0.03"))
    (warning,) = [w for w in plan.warnings if w.startswith("kv:")]
    assert "the margin asks for 3 %" in warning
    assert re.search(r"about \d+ boots would", warning)
    assert plan.admitted == ("main",)


def test_a_prior_from_earlier_rows_is_used_and_named(quickstart, planned):
    quiet = Prior(**{k: dict.fromkeys(METRICS, 0.001) for k in ("slot_sd", "boot_sd", "residual_sd")})
    loud, still = planned(quickstart()), planned(quickstart(), prior=quiet)
    assert {p.source for p in still.power} == {"prior"}
    assert all(s.resolvable_pct < p.resolvable_pct for s, p in zip(still.power, loud.power, strict=True))


def test_gpu_nodes_take_the_gpu_components(rented, planned):
    plan = planned(rented())
    (small,) = [p for p in plan.power if (p.pair, p.metric) == ("small@c1", "step_ms")]
    df = session_boot_df(plan.sessions[0].groups, resident=True)
    assert small.resolvable_pct == round(
        100 * resolvable("step_ms", 16, 2, default_prior("gpu"), "alternated", df_boot=df), 2
    )


def test_waves_are_the_blocks_above_concurrency_one(rented, planned):
    (c8,) = [p for p in planned(rented()).power if (p.pair, p.metric) == ("small@c8", "step_ms")]
    assert (c8.n, c8.boots) == (4, 2)


def test_one_boot_everywhere_warns_that_the_boot_deviation_is_unknown(quickstart, planned):
    ones = ("pairs.kv.boots=1", "pairs.aa.boots=1", "ladders.depth.boots=1")
    assert any("boot_sd_unknown" in w for w in planned(quickstart(*ones)).warnings)
    declared = (*ones, "statistics={boot_sd: {step_ms: 0.02}}")
    assert not any("boot_sd_unknown" in w for w in planned(quickstart(*declared)).warnings)


def test_one_prompt_cannot_be_judged(quickstart, planned):
    plan = planned(quickstart("workloads.copy.n=1"))
    assert plan.power == ()
    assert any("set n of workload copy" in w for w in plan.warnings)


def test_resident_arms_without_an_aa_warn(quickstart, planned):
    plan = planned(quickstart("sessions.main={node: here, pairs: [kv], ladders: [depth]}"))
    assert any("no A/A" in w for w in plan.warnings)
    assert not any("no A/A" in w for w in planned(quickstart()).warnings)


def test_half_a_quad_warns(quickstart, planned):
    odd = planned(quickstart("workloads.copy.n=7", "pairs.kv.boots=3"))
    assert any("pairs.kv: n 7 and boots 3 are both odd" in w for w in odd.warnings)
    assert not any("pairs.aa: n 7" in w for w in odd.warnings)


def test_more_concurrency_than_prompts_warns(rented, planned):
    plan = planned(rented("workloads.tool.n=6"))
    assert any("concurrency 8 with n 6" in w for w in plan.warnings)


# --- JSON


def test_the_json_contract(quickstart, planned):
    shown = planned(quickstart()).to_json()
    json.dumps(shown, allow_nan=False)
    assert set(shown) >= {
        "campaign", "cap_usd", "usd_expected", "usd_worst", "minutes", "admitted", "sessions", "power", "warnings"
    }  # fmt: skip
    assert set(shown["sessions"][0]) >= {
        "name", "node", "boots", "requests", "minutes", "usd_expected", "usd_worst"
    }  # fmt: skip
    assert set(shown["power"][0]) >= {"pair", "metric", "n", "resolvable_pct", "rule_pct"}
    assert shown["cap_usd"] == 0.5
    groups = shown["sessions"][0]["groups"]
    assert sum(g["boots"] for g in groups) == shown["sessions"][0]["boots"]
    assert sum(g["requests"] for g in groups) == shown["sessions"][0]["requests"]


def test_a_quoted_price_replaces_the_declared(quickstart):
    spec = quickstart()
    cheap = outline(spec, "main", declared_prices(spec)["here"])
    dear = outline(spec, "main", Price(micro(6), 60, "quoted", 150, 300))
    assert dear.lease.usd_expected > 9 * cheap.lease.usd_expected
