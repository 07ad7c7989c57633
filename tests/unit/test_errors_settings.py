"""The exception tree, and Settings: read from the environment, compared among ranks, shown in a table."""

import dataclasses
import logging

import pytest

from mpistrat.core import errors
from mpistrat.core.settings import _OF_OTHERS, PREFIX, Settings, differing, horovod_warning

ALL_ERRORS = [value for value in vars(errors).values()
              if isinstance(value, type) and issubclass(value, errors.MpistratError)]


def read(**values: str) -> Settings:
    """Settings from variables that are given without their prefix."""
    return Settings.from_env({PREFIX + name: value for name, value in values.items()})


@pytest.mark.parametrize(("name", "builtin"), [
    ("NotInitializedError", ValueError), ("SettingsError", ValueError), ("MissingDependencyError", ImportError),
    ("InvalidRequestError", ValueError), ("LaunchError", ValueError), ("CollectiveError", RuntimeError),
    ("MismatchError", ValueError), ("EngineError", RuntimeError)])
def test_an_error_is_also_the_builtin_one_that_a_script_would_catch(name: str, builtin: type) -> None:
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda e: e.__name__)
def test_every_error_stands_in_the_drawn_tree(error: type) -> None:
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_a_mismatch_is_not_the_end_of_the_engine() -> None:
    assert not issubclass(errors.MismatchError, errors.EngineError)


def test_without_variables_the_defaults_hold() -> None:
    assert Settings.from_env({"PATH": "/bin", "HOME": "/"}) == Settings()


@pytest.mark.parametrize(("name", "text", "field", "value"), [
    ("FUSION_THRESHOLD", "0", "fusion_bytes", 0),
    ("FUSION_THRESHOLD", " 65536 ", "fusion_bytes", 65536),
    ("CACHE_CAPACITY", "16777216", "cache_capacity", 2**24),
    ("STALL_CHECK_TIME_SECONDS", "0.1", "stall_warning_s", 0.1),
    ("STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_abort_s", 0.0),
    ("STALL_SHUTDOWN_TIME_SECONDS", "1e3", "stall_abort_s", 1000.0),
    ("CPU_OPERATIONS", "MPI", "cpu_operations", "mpi"),
    ("LOG_LEVEL", "Debug", "log_level", "debug"), ("DISABLE", "XLA, fast_path,xla", "disable", "fast_path,xla")])
def test_a_variable_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    settings = read(**{name: text})
    assert getattr(settings, field) == value
    assert type(getattr(settings, field)) is type(value)
    assert dataclasses.replace(settings, **{field: getattr(Settings(), field)}) == Settings()


def test_hosts_are_probed_five_times_within_the_limit_and_no_more_than_once_a_second() -> None:
    assert [read(LOST_AFTER_S=text).probe_s for text in ("2", "5", "60")] == [1.0, 1.0, 12.0]


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("true", True), ("False", False)])
def test_a_switch_is_0_or_1(text: str, value: bool) -> None:
    assert read(STALL_CHECK_DISABLE=text).stall_check_disable is value


@pytest.mark.parametrize("text", ["", "2", "-1", "yes", "no"])
def test_a_switch_is_nothing_but_0_or_1(text: str) -> None:
    with pytest.raises(errors.SettingsError, match=r"MPISTRAT_STALL_CHECK_DISABLE='.*': expected 0 or 1\."):
        read(STALL_CHECK_DISABLE=text)


@pytest.mark.parametrize("text", ["", "1.5", "1e6", "nan", "64MB", "0x10"])
def test_a_whole_number_is_asked_for_where_one_is_needed(text: str) -> None:
    with pytest.raises(errors.SettingsError, match=r"MPISTRAT_FUSION_THRESHOLD='.*': expected a whole number\."):
        read(FUSION_THRESHOLD=text)


def test_a_number_is_asked_for_where_one_is_needed() -> None:
    with pytest.raises(errors.SettingsError, match=r"MPISTRAT_STALL_CHECK_TIME_SECONDS='1 min': expected a number\."):
        read(STALL_CHECK_TIME_SECONDS="1 min")


@pytest.mark.parametrize(("name", "text"), [
    ("FUSION_THRESHOLD", "-1"), ("FUSION_THRESHOLD", str(2**40 + 1)), ("FUSION_THRESHOLD", "1" + 400 * "0"),
    ("CACHE_CAPACITY", "-1"), ("CACHE_CAPACITY", str(2**24 + 1)),
    ("STALL_CHECK_TIME_SECONDS", "0"), ("STALL_CHECK_TIME_SECONDS", "1e8"), ("STALL_CHECK_TIME_SECONDS", "inf"),
    ("STALL_CHECK_TIME_SECONDS", "nan"), ("STALL_SHUTDOWN_TIME_SECONDS", "-1")])
def test_a_value_out_of_range_is_an_error_that_names_the_range(name: str, text: str) -> None:
    with pytest.raises(errors.SettingsError, match=rf"^MPISTRAT_{name}='{text}': expected a value from .+ to .+\.$"):
        read(**{name: text})


@pytest.mark.parametrize(("name", "choices"), [("CPU_OPERATIONS", "auto, shared_memory, mpi"),
                                               ("LOG_LEVEL", "debug, info, warning, error")])
def test_an_unknown_choice_is_an_error_that_lists_the_known_ones(name: str, choices: str) -> None:
    with pytest.raises(errors.SettingsError, match=rf"MPISTRAT_{name}='best': expected one of {choices}\."):
        read(**{name: "best"})


def test_fast_ways_are_used_unless_the_list_names_them() -> None:
    for text, used in (("none", [True, True]), ("xla", [True, False]), ("xla,fast_path", [False, False])):
        assert [read(DISABLE=text).uses("fast_path"), read(DISABLE=text).uses("xla")] == used


@pytest.mark.parametrize(("text", "unknown"), [("xla,votes", "'votes'"), ("none,xla", "'none'"), ("", "''")])
def test_a_word_that_is_no_fast_way_is_an_error_that_lists_them(text: str, unknown: str) -> None:
    with pytest.raises(errors.SettingsError, match=f"^MPISTRAT_DISABLE='{text}': expected none, or some of fast_path, "
                                                   r"fixed_input, shadow, small_buckets, stream_order, xla, "
                                                   rf"separated by commas\. Unknown: {unknown}\.$"):
        read(DISABLE=text)


@pytest.mark.parametrize("name", ["hierarchical", "mpi"])
def test_a_way_for_gpu_tensors_that_was_removed_is_an_error_that_lists_the_others(name: str) -> None:
    with pytest.raises(errors.SettingsError, match=rf"^MPISTRAT_GPU_OPERATIONS='{name}': expected one of auto, nccl, "
                                                   r"staged, host\.$"):
        read(GPU_OPERATIONS=name)


@pytest.mark.parametrize(("name", "near"), [
    ("FUSION_TRESHOLD", "MPISTRAT_FUSION_THRESHOLD"),
    ("TIMELINE_DIR", "MPISTRAT_TIMELINE or MPISTRAT_TIMELINE_STEPS or MPISTRAT_TIMELINE_MARK_CYCLES"),
    ("STALL_CHECK", "MPISTRAT_STALL_CHECK_DISABLE or MPISTRAT_STALL_CHECK_TIME_SECONDS")])
def test_an_unknown_name_is_an_error_with_the_names_that_are_like_it(name: str, near: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        read(**{name: "1"})
    assert str(caught.value) == (f"MPISTRAT_{name} is not a setting of mpistrat. Did you mean {near}? If it is of "
                                 f"another program: unset MPISTRAT_{name}.")


@pytest.mark.parametrize("name", [
    "ROOT", "DIR", "HOME", "VERSION", "PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP",
    "PORT_80_TCP", "PORT_80_TCP_PROTO", "PORT_80_TCP_PORT", "PORT_80_TCP_ADDR", "TRAIN_SERVICE_HOST",
    "TRAIN_PORT_53_UDP"])
def test_names_that_modules_and_kubernetes_set_are_of_other_programs(name: str) -> None:
    assert read(**{name: "tcp://10.0.0.1:80"}) == Settings()


def test_no_setting_is_called_as_a_variable_of_other_programs() -> None:
    assert not [name for name, *_ in Settings.table() if _OF_OTHERS.fullmatch(name.removeprefix("MPISTRAT_"))]


def test_a_tilde_in_the_path_of_a_setting_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read(TIMELINE="~/t.json").timeline == "/home/me/t.json"


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(errors.SettingsError) as caught:
        read(FOO="1")
    assert str(caught.value) == ("MPISTRAT_FOO is not a setting of mpistrat. The page Settings of the documentation "
                                 "(docs/settings.md) has all of them. If it is of another program: unset "
                                 "MPISTRAT_FOO.")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(errors.SettingsError) as caught:
        read(FUSION_THRESHOLD="-1", LOG_LEVEL="loud", COLOUR="red")
    assert all(name in str(caught.value) for name in ("FUSION_THRESHOLD='-1'", "LOG_LEVEL='loud'", "COLOUR is not"))


def test_a_stall_cannot_abort_before_it_is_reported() -> None:
    with pytest.raises(errors.SettingsError, match=r"MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS \(30\) must be 0 or at least "
                                                   r"MPISTRAT_STALL_CHECK_TIME_SECONDS \(60\)\."):
        read(STALL_SHUTDOWN_TIME_SECONDS="30")


@pytest.mark.parametrize(("warning", "abort"), [("30", "30"), ("60", "0"), ("1e6", "0")])
def test_a_stall_may_abort_when_it_is_reported_or_never(warning: str, abort: str) -> None:
    settings = read(STALL_CHECK_TIME_SECONDS=warning, STALL_SHUTDOWN_TIME_SECONDS=abort)
    assert (settings.stall_warning_s, settings.stall_abort_s) == (float(warning), float(abort))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().fusion_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(("text", "level"), [("debug", logging.DEBUG), ("info", logging.INFO),
                                             ("warning", logging.WARNING), ("error", logging.ERROR)])
def test_a_log_level_is_one_of_the_logging_module(text: str, level: int) -> None:
    assert read(LOG_LEVEL=text).logging_level == level


@pytest.mark.horovod("mpirun")
def test_a_horovod_name_with_a_twin_is_told_the_twin() -> None:
    assert horovod_warning({"HOROVOD_FUSION_THRESHOLD": "1", "PATH": ""}) == [
        "HOROVOD_FUSION_THRESHOLD is not read; use MPISTRAT_FUSION_THRESHOLD."]


def test_a_horovod_name_without_a_twin_is_told_so() -> None:
    assert horovod_warning({"HOROVOD_CYCLE_TIME": "1"}) == ["HOROVOD_CYCLE_TIME is not read and has no counterpart."]


def test_without_horovod_names_nothing_is_said() -> None:
    assert horovod_warning({"MPISTRAT_LOG_LEVEL": "info"}) == []


def test_equal_settings_do_not_differ() -> None:
    assert differing([Settings()] * 3) == []


def test_a_differing_setting_is_named_with_values_and_ranks() -> None:
    other = Settings(fusion_bytes=0)
    assert differing([Settings(), other, Settings(), other]) == [
        "MPISTRAT_FUSION_THRESHOLD: the ranks disagree: 134217728 on ranks [0, 2]; 0 on ranks [1, 3]."]


def test_each_differing_setting_gets_a_sentence() -> None:
    sentences = differing([Settings(log_level="info"), Settings(cache_capacity=0)])
    assert [sentence.split(":")[0] for sentence in sentences] == ["MPISTRAT_CACHE_CAPACITY", "MPISTRAT_LOG_LEVEL"]


def test_the_table_has_a_row_with_a_sentence_for_every_setting() -> None:
    table = Settings.table()
    assert len(table) == len(dataclasses.fields(Settings))
    assert all(name.startswith(PREFIX) and doc.endswith(".") for name, _, doc in table)
    assert all(default for _, default, _ in table)


def test_the_tables_defaults_are_read_back_as_the_defaults() -> None:
    assert Settings.from_env({name: default for name, default, _ in Settings.table()}) == Settings()


@pytest.mark.parametrize("settings, limit_s", [(Settings(), 600.0), (Settings(stall_abort_s=0.0), 0.0),
                                               (Settings(stall_check_disable=True), 0.0)])
def test_no_wait_has_a_limit_without_stall_checks(settings: Settings, limit_s: float) -> None:
    assert settings.limit_s == limit_s


@pytest.mark.parametrize(("text", "next_one"), [("1", 4096), ("4095", 4096), ("4097", 8192), ("3000000", 2**22)])
def test_the_bytes_of_a_chunk_are_a_power_of_two(text: str, next_one: int) -> None:
    with pytest.raises(errors.SettingsError, match=f"MPISTRAT_CHUNK_BYTES={text}: expected 0 or a power of two, at "
                                                   f"least 4096; the next one is {next_one}."):
        read(CHUNK_BYTES=text)


def test_the_bytes_of_a_chunk_may_be_chosen() -> None:
    assert [read(CHUNK_BYTES=text).chunk_bytes for text in ("0", "4096", "1048576")] == [0, 4096, 2**20]
