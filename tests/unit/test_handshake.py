"""What the ranks exchange in init()."""

import dataclasses

import pytest

from mpistrat.api.handshake import RankInfo, differences, from_text, problems, to_text
from mpistrat.core.settings import Settings

FIRST = RankInfo("a host", 0, Settings(stall_warning_s=0.1 + 0.2), "",
                     {"Python": "3.11", "keras": "none"}, "0" * 64)
OTHER = dataclasses.replace(FIRST, host="another", memory_group=2**31 - 1, settings=None, problem="MPISTRAT_X: ä",
                            versions={"Python": "3.12", "keras": "none"})


@pytest.mark.parametrize("info", [FIRST, OTHER], ids=lambda info: info.host)
def test_a_rank_info_is_decoded_from_its_text(info: RankInfo) -> None:
    assert from_text(to_text(info)) == info


def test_differences_are_listed_with_the_ranks() -> None:
    assert differences([FIRST, FIRST]) == []
    assert differences([FIRST, OTHER, FIRST]) == [
        "The ranks differ in the version of Python: 3.11 on ranks [0, 2]; 3.12 on ranks [1]"]


def test_a_problem_is_named_once_for_all_ranks_that_have_it() -> None:
    assert problems([FIRST, FIRST]) == ""
    assert problems([OTHER] * 64) == "all ranks: MPISTRAT_X: ä"
    another = dataclasses.replace(OTHER, problem="MPISTRAT_Y: expected 0 or 1.")
    assert problems([FIRST, another, OTHER, another]) == (
        "ranks [1, 3]: MPISTRAT_Y: expected 0 or 1. ranks [2]: MPISTRAT_X: ä")
