"""Names that say whose a node is, signed control records, the dead-man table."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.cloud import deadmen, naming
from campaign.cloud.control import Record, sign, verify
from campaign.fleet.supervisor import too_few_dead_men

KEY = "ab" * 32
INSTALL = "0123456789ab"
TIMES = st.integers(min_value=10**18, max_value=4 * 10**18)


@given(run=st.text(min_size=1), lease=st.text(min_size=1), deadline=TIMES)
def test_name_says_install_and_a_deadline_no_earlier_than_the_lease(
    run: str, lease: str, deadline: int
) -> None:
    said = naming.parse(naming.node_name(INSTALL, run, lease, deadline))
    assert said is not None
    assert said.install_id == INSTALL
    assert deadline <= said.deadline_utc_ns < deadline + 60 * 10**9


@pytest.mark.parametrize(
    "name",
    [
        "", "cmp", f"cmp-{INSTALL}", f"cmp-{INSTALL}x-00000000-000000", f"my-cmp-{INSTALL}-00000000-0000zz",
        f"cmp-{INSTALL}-00000000-0000zz-2", f"CMP-{INSTALL}-00000000-0000zz", f"cmp-{INSTALL}-0000000g-0000zz",
    ],
)  # fmt: skip
def test_look_alikes_are_not_ours(name: str) -> None:
    assert naming.parse(name) is None


def test_labels_are_of_characters_every_cloud_takes() -> None:
    found = naming.labels(INSTALL, "Ünïcode Campaign!", "run", "s.1", 10**18)
    for key, value in found.items():
        assert all(c.isascii() and (c.isalnum() or c in "-_") for c in key + value), (key, value)
        assert len(value) <= 63


@given(kind=st.sampled_from(["stop", "extend", "kill"]), why=st.text(), at=st.none() | TIMES)
def test_signed_record_comes_back_whole(kind: str, why: str, at: int | None) -> None:
    record = Record("s.1", 3, kind, why, None, at)  # type: ignore[arg-type]  # hypothesis gives str
    assert verify(sign(record, KEY), KEY, "s.1") == record


def test_altered_foreign_or_unsigned_records_are_not_obeyed() -> None:
    good = sign(Record("s.1", 1, "extend", deadline_utc_ns=10**18), KEY)
    altered = json.loads(good)
    altered["record"]["deadline_utc_ns"] += 1
    assert verify(json.dumps(altered).encode(), KEY, "s.1") is None
    assert verify(good, "cd" * 32, "s.1") is None
    assert verify(good, KEY, "s.2") is None
    for junk in (b"", b"{}", b"null", b"[1]", json.dumps({"record": altered["record"]}).encode()):
        assert verify(junk, KEY, "s.1") is None


def test_table_gives_each_cloud_its_effective_dead_men() -> None:
    assert deadmen.row("Slurm").effective() == ("autodown", "node_timer", "time_limit")
    assert deadmen.row("aws").effective() == ("autodown", "node_timer")
    assert deadmen.row("lambda").effective() == ("autodown",)
    assert deadmen.row("a-cloud-nobody-knows").effective() == ()
    for row in deadmen.TABLE.values():
        assert row.autodown_source
        assert row.shutdown_source


@pytest.mark.parametrize(("ours", "have", "refused"), [
    (True, ("autodown", "node_timer"), False), (True, ("autodown",), True), (True, (), True),
    (True, ("autodown", "autodown"), True), (False, (), False),
])  # fmt: skip
def test_fewer_than_two_effective_dead_men_refuse(ours: bool, have: tuple[str, ...], refused: bool) -> None:
    assert (too_few_dead_men(have, ours=ours) is not None) is refused
