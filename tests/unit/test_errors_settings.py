"""The exception tree, and Settings: read from the environment, compared among ranks, shown in a table."""

import dataclasses
import logging
import os

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


@pytest.mark.parametrize(("name", "text", "field", "value"), [
    ("FUSION_THRESHOLD", "0", "fusion_bytes", 0),
    ("FUSION_THRESHOLD", " 65536 ", "fusion_bytes", 65536),
    ("CACHE_CAPACITY", "16777216", "cache_capacity", 2**24),
    ("STALL_CHECK_TIME_SECONDS", "0.1", "stall_warning_s", 0.1),
    ("STALL_SHUTDOWN_TIME_SECONDS", "0", "stall_abort_s", 0.0),
    ("STALL_SHUTDOWN_TIME_SECONDS", "1e3", "stall_abort_s", 1000.0),
    ("CPU_OPERATIONS", "MPI", "cpu_operations", "mpi"),
    *(("STALL_CHECK_DISABLE", text, "stall_check_disable", text in "1 true") for text in ("1", "true", "0", "False")),
    ("CHUNK_BYTES", "0", "chunk_bytes", 0), ("CHUNK_BYTES", "4096", "chunk_bytes", 4096),
    ("TIMELINE", "~/t.json", "timeline", os.path.expanduser("~/t.json")),
    ("LOG_LEVEL", "Debug", "log_level", "debug"), ("DISABLE", "XLA, fast_path,xla", "disable", "fast_path,xla")])
def test_a_variable_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    settings = read(**{name: text})
    assert getattr(settings, field) == value
    assert type(getattr(settings, field)) is type(value)
    assert dataclasses.replace(settings, **{field: getattr(Settings(), field)}) == Settings()


def test_a_log_level_is_one_of_the_logging_module() -> None:
    for text in ("debug", "info", "warning", "error"):
        assert read(LOG_LEVEL=text).logging_level == getattr(logging, text.upper())


def test_hosts_are_probed_five_times_within_the_limit_and_no_more_than_once_a_second() -> None:
    assert [read(LOST_AFTER_S=text).probe_s for text in ("2", "5", "60")] == [1.0, 1.0, 12.0]


@pytest.mark.parametrize(("name", "texts", "expected"), [
    ("STALL_CHECK_DISABLE", ["", "2", "-1", "yes", "no"], "0 or 1"),
    ("FUSION_THRESHOLD", ["", "1.5", "1e6", "nan", "64MB", "0x10"], "a whole number"),
    ("FUSION_THRESHOLD", ["-1", str(2**40 + 1), "1" + 400 * "0"], "a value from 0 to 1.09951e+12"),
    ("CACHE_CAPACITY", ["-1", str(2**24 + 1)], "a value from 0 to 1.67772e+07"),
    ("STALL_CHECK_TIME_SECONDS", ["1 min"], "a number"),
    ("STALL_CHECK_TIME_SECONDS", ["0", "1e8", "inf", "nan"], "a value from 0.1 to 1e+07"),
    ("STALL_SHUTDOWN_TIME_SECONDS", ["-1"], "a value from 0 to 1e+07"),
    ("CPU_OPERATIONS", ["best"], "one of auto, shared_memory, mpi"),
    ("GPU_OPERATIONS", ["hierarchical", "mpi"], "one of auto, nccl, staged, host"),  # They were there once.
    ("LOG_LEVEL", ["best"], "one of debug, info, warning, error"),
    *(("DISABLE", [text], "'none', or one or more of fast_path, fixed_input, shadow, small_buckets, stream_order, xla, "
       f"separated by commas. Unknown: '{word}'")
      for text, word in (("xla,votes", "votes"), ("none,xla", "none"), ("", "")))])
def test_a_wrong_value_is_an_error_that_says_what_is_expected(name: str, texts: list[str], expected: str) -> None:
    for text in texts:
        with pytest.raises(errors.SettingsError) as caught:
            read(**{name: text})
        assert str(caught.value) == f"MPISTRAT_{name}='{text}': expected {expected}."


def test_fast_ways_are_used_unless_the_list_names_them() -> None:
    for text, used in (("none", [True, True]), ("xla", [True, False]), ("xla,fast_path", [False, False])):
        assert [read(DISABLE=text).uses("fast_path"), read(DISABLE=text).uses("xla")] == used


@pytest.mark.parametrize(("name", "near"), [
    ("FUSION_TRESHOLD", "Did you mean MPISTRAT_FUSION_THRESHOLD?"),
    ("TIMELINE_DIR", "Did you mean MPISTRAT_TIMELINE or MPISTRAT_TIMELINE_STEPS or MPISTRAT_TIMELINE_MARK_CYCLES?"),
    ("STALL_CHECK", "Did you mean MPISTRAT_STALL_CHECK_DISABLE or MPISTRAT_STALL_CHECK_TIME_SECONDS?"),
    ("FOO", "The page Settings of the documentation (docs/settings.md) has all settings.")])
def test_an_unknown_name_is_an_error_with_the_names_that_are_like_it(name: str, near: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        read(**{name: "1"})
    assert str(caught.value) == (f"MPISTRAT_{name} is not a setting of mpistrat. {near} If another program uses it: "
                                 f"unset MPISTRAT_{name}.")


@pytest.mark.parametrize("name", [
    "ROOT", "DIR", "HOME", "VERSION", "PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP",
    "PORT_80_TCP", "PORT_80_TCP_PROTO", "PORT_80_TCP_PORT", "PORT_80_TCP_ADDR", "TRAIN_SERVICE_HOST",
    "TRAIN_PORT_53_UDP"])
def test_names_that_modules_and_kubernetes_set_are_of_other_programs(name: str) -> None:
    assert read(**{name: "tcp://10.0.0.1:80"}) == Settings()


def test_no_setting_is_called_as_a_variable_of_other_programs() -> None:
    assert not [name for name, *_ in Settings.table() if _OF_OTHERS.fullmatch(name.removeprefix("MPISTRAT_"))]


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


@pytest.mark.horovod("mpirun")
def test_a_horovod_name_with_a_twin_is_told_the_twin() -> None:
    assert horovod_warning({"HOROVOD_FUSION_THRESHOLD": "1", "PATH": "", "HOROVOD_CYCLE_TIME": "1",
                            "MPISTRAT_LOG_LEVEL": "info"}) == [
        "HOROVOD_CYCLE_TIME is not read and has no counterpart. HOROVOD_FUSION_THRESHOLD is not read; use "
        "MPISTRAT_FUSION_THRESHOLD."]


def test_each_differing_setting_is_named_with_values_and_ranks() -> None:
    other = Settings(fusion_bytes=0, log_level="debug")
    assert differing([Settings()] * 3) == []
    assert differing([Settings(), other, Settings(), other]) == [
        "MPISTRAT_FUSION_THRESHOLD: the ranks disagree: 134217728 on ranks [0, 2]; 0 on ranks [1, 3].",
        "MPISTRAT_LOG_LEVEL: the ranks disagree: warning on ranks [0, 2]; debug on ranks [1, 3]."]


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
                                                   f"least 4096; the next power of two is {next_one}."):
        read(CHUNK_BYTES=text)
