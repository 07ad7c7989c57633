"""Which ranks run a callback that writes files, and files of a model that are whole or absent. In one process."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import mpistrat

keras = pytest.importorskip("keras")

from mpistrat.keras import DistributedOptimizer  # noqa: E402
from mpistrat.keras.fit.written_once import Entry, Role, role_of  # noqa: E402
from mpistrat.tensorflow.files import writes_too  # noqa: E402

ALONE, LEADS, FOLLOWS, IDLE = Role(True, False), Role(True, True), Role(False, True), Role(False, False)
LOG, OWN_LOG, OTHER = Entry("CSVLogger", "/log.csv"), Entry("CSVLogger", "/1.csv"), Entry("script.Own")
BACKUP, KERAS = Entry("BackupAndRestore", "/backup"), Entry("")
HERE, THERE = Entry("ModelCheckpoint", "/m.keras", ("/", 1)), Entry("ModelCheckpoint", "/m.keras", ("/", 2))


@pytest.mark.parametrize(("entries", "hosts", "expected"), [
    ([[LOG], [LOG], [LOG]], "aab", [LEADS, FOLLOWS, FOLLOWS]),
    ([[LOG, OTHER], [OTHER]], "aa", [ALONE, ALONE, ALONE]),
    ([[OTHER], [LOG], [LOG]], "aaa", [ALONE, ALONE, IDLE]),
    ([[LOG], [OWN_LOG]], "aa", [ALONE, ALONE]),
    ([[OTHER, LOG], [LOG], [LOG, OTHER]], "aaa", [ALONE, LEADS, FOLLOWS, FOLLOWS, ALONE]),
    ([[OTHER, LOG], [LOG, OTHER]], "aa", [ALONE, ALONE, IDLE, ALONE]),
    ([[KERAS, LOG], [LOG, KERAS]], "aa", [ALONE, LEADS, FOLLOWS, ALONE]),
    ([[OTHER, LOG, OTHER], [LOG, OTHER]], "aa", [ALONE, LEADS, ALONE, FOLLOWS, ALONE]),
    ([[HERE], [HERE], [HERE]], "abb", [LEADS, FOLLOWS, FOLLOWS]),
    ([[HERE], [THERE], [THERE]], "abb", [LEADS, LEADS, FOLLOWS]),
    ([[HERE], [THERE]], "aa", [LEADS, FOLLOWS]),  # The directory has changed in between.
    ([[BACKUP], [BACKUP]], "ab", [LEADS, FOLLOWS]),
    ([[BACKUP], [BACKUP], [OTHER]], "aaa", [ALONE, ALONE, ALONE]),
], ids=["all", "the chief's", "two ranks'", "paths of their own", "another beside it", "other orders",
        "orders of Keras'", "one more", "hosts share", "hosts do not share", "one host", "a backup",
        "a backup of some"])
def test_one_rank_runs_what_ranks_share(entries: list, hosts: str, expected: list[Role]) -> None:
    assert [role_of(entry, rank, entries, hosts)
            for rank, of_rank in enumerate(entries) for entry in of_rank] == expected


def test_ranks_with_a_backup_have_one_order() -> None:
    with pytest.raises(mpistrat.MismatchError, match="callbacks in different orders, but a BackupAndRestore"):
        role_of(BACKUP, 0, [[BACKUP, OTHER], [OTHER, BACKUP]], "aa")


# -- whole files ------------------------------------------------------------------------------------------------------


def new_model() -> Any:
    mpistrat.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    return model


def test_an_error_of_the_cleaning_up_does_not_hide_that_of_keras(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fails = new_model(), Mock(side_effect=OSError(30, "Read-only"))
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors=False: (
        ignore_errors or ".saving-" not in str(path) or fails()))
    with pytest.raises(OSError, match="No space left"):
        model.save(tmp_path / "model.keras")


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "model.weights.h5"])
def test_a_save_that_fails_in_the_middle_leaves_the_file_of_before(name: str, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    save = model.save_weights if "weights" in name else model.save
    save(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    monkeypatch.setattr(keras.layers.Dense, "get_config" if name == "model.h5" else "save_own_variables",
                        Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("double", [False, True])
def test_a_backup_that_fails_in_the_middle_leaves_the_epoch_of_before(double: bool, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    backup.double_checkpoint = double
    if not hasattr(backup, "_training_metadata_path"):
        pytest.skip("this Keras saves no epoch")
    backup.set_model(new_model())
    for epoch in range(2):
        backup.on_epoch_end(epoch)
    monkeypatch.setattr(json, "dumps", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backup.on_epoch_end(2)
    found = {path.name: path for path in tmp_path.iterdir() if "json" in path.name}
    assert json.loads(found["training_metadata.json"].read_text())["epoch"] == 2
    assert sorted(found) == ["training_metadata.json", "training_metadata.json.bkp"][:1 + double]


def test_a_link_stays_and_errors_name_the_path_of_the_user(tmp_path: Path) -> None:
    model = new_model()
    (tmp_path / "link.weights.h5").symlink_to("target.weights.h5")
    model.save_weights(tmp_path / "link.weights.h5")
    assert (tmp_path / "link.weights.h5").is_symlink() and (tmp_path / "target.weights.h5").stat().st_size > 0
    with pytest.raises(OSError, match=r"absent/model\.weights\.h5"):
        model.save_weights(tmp_path / "absent" / "model.weights.h5")


HOSTS = [(0, 1), (0, 1), (2, 3), (2, 3)]


@pytest.mark.parametrize(("paths", "sees_file", "expected"), [
    (["a", "a", "a", "a"], True, []),
    (["a", "a", "a", "a"], False, [2]),
    (["a", "b", "b", "b"], False, [1]),
    (["a", "a", "b", "a"], False, [2, 3]),
])
def test_who_writes_after_the_chief(paths: list[str], sees_file: bool, expected: list[int]) -> None:
    assert [rank for rank in range(4) if writes_too(rank, paths, HOSTS[rank], sees_file)] == expected
