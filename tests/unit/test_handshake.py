"""What the ranks exchange in init()."""

import dataclasses
import json
import sys

import pytest

from mpistrat.api.runtime import RankInfo, differences, from_texts, problems, script_digest, to_text, without_cupy
from mpistrat.core.errors import SettingsError
from mpistrat.core.install import pip_extra
from mpistrat.core.settings import Settings

FIRST = RankInfo("a host", 0, Settings(stall_warning_s=0.1 + 0.2), "",
                     {"Python": "3.11", "keras": "none"}, "0" * 64, [0, 1], [4711, 12, 1, 4711])
OTHER = dataclasses.replace(FIRST, host="another", memory_group=2**31 - 1, settings=None, problem="MPISTRAT_X: ä",
                            versions={"Python": "3.12", "keras": "none"}, cpus=[], process=None)


@pytest.mark.parametrize("info", [FIRST, OTHER], ids=lambda info: info.host)
def test_a_rank_info_is_decoded_from_its_text(info: RankInfo) -> None:
    assert from_texts([to_text(info)]) == [info]


@pytest.mark.parametrize("of", ["info", "settings"])
def test_a_version_with_other_fields_is_named(of: str) -> None:
    sent = json.loads(to_text(dataclasses.replace(FIRST, versions={"mpistrat": "0.1"})))
    newer = json.loads(to_text(dataclasses.replace(FIRST, versions={"mpistrat": "0.2"})))
    (newer if of == "info" else newer["settings"])["new"] = 1
    with pytest.raises(SettingsError, match=r"cannot run together: 0\.1 on ranks \[0, 2\]; 0\.2 on ranks \[1\]\. Inst"):
        from_texts([json.dumps(each) for each in (sent, newer, sent)])
    del (sent if of == "info" else sent["settings"])["script" if of == "info" else "disable"]
    with pytest.raises(SettingsError, match="different versions of mpistrat"):
        from_texts([to_text(FIRST), json.dumps(sent)])


def test_another_version_with_the_same_fields_is_an_error_too() -> None:
    texts = [to_text(dataclasses.replace(FIRST, versions={"mpistrat": version})) for version in ("0.1", "0.2")]
    with pytest.raises(SettingsError, match=r"cannot run together: 0\.1 on ranks \[0\]; 0\.2 on ranks \[1\]\."):
        from_texts(texts)


def test_differences_are_listed_with_the_ranks() -> None:
    assert differences([FIRST, FIRST]) == []
    assert differences([FIRST, OTHER, FIRST]) == [
        "The ranks differ in the version of Python: 3.11 on ranks [0, 2]; 3.12 on ranks [1]"]


def test_a_program_that_names_no_script_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert script_digest() == "no file"


def test_a_problem_is_named_once_for_all_ranks_that_have_it() -> None:
    assert problems([FIRST, FIRST]) == ""
    assert problems([OTHER] * 64) == "all ranks: MPISTRAT_X: ä"
    another = dataclasses.replace(OTHER, problem="MPISTRAT_Y: expected 0 or 1.")
    assert problems([FIRST, another, OTHER, another]) == (
        "ranks [1, 3]: MPISTRAT_Y: expected 0 or 1. ranks [2]: MPISTRAT_X: ä")


def test_where_only_some_ranks_have_cupy_no_rank_keeps_tensors_on_the_gpu() -> None:
    with_cupy, without = (dataclasses.replace(FIRST, versions={"cupy": version}) for version in ("14.2.0", "none"))
    assert without_cupy([with_cupy, without, without]).startswith(f"Ranks [1, 2] have no cupy ({pip_extra('gpu')}), ")
    assert without_cupy([with_cupy] * 2) == without_cupy([without] * 2) == ""
