"""A drafter whose every token is accepted."""

import pytest

from campaign.session.round import INERT_DRAFTS, inert


@pytest.mark.parametrize(
    ("drafts", "refused", "found"),
    [(INERT_DRAFTS, 0, True), (INERT_DRAFTS, 1, False), (INERT_DRAFTS - 1, 0, False), (0, 0, False)],
)
def test_only_hundreds_of_perfect_drafts_are_not_believed(drafts: int, refused: int, *, found: bool) -> None:
    assert inert(drafts, refused) is found
