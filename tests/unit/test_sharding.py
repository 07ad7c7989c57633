"""shard(): this rank's rows, as many as every other rank's."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.api import process_sets, sharding
from mpistrat.core.topology import Topology


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int, size: int) -> None:
        group = Mock(topology=Topology(rank, ("host",) * size))
        monkeypatch.setattr(process_sets.global_process_set, "_group", group)
    return become


@pytest.fixture
def on_each_rank(place: Any) -> Any:
    def call(size: int, *data: Any, **options: Any) -> list[Any]:
        results = []
        for rank in range(size):
            place(rank, size)
            results.append(mpistrat.shard(*data, **options))
        return results
    return call


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [5, 6, 7, 30, 31])
def test_all_ranks_have_the_same_number_of_rows(rows: int, size: int, on_each_rank: Any) -> None:
    dropped = on_each_rank(size, np.arange(rows))
    assert {len(part) for part in dropped} == {rows // size}
    assert sorted(np.concatenate(dropped)) == list(range(rows // size * size))
    padded = on_each_rank(size, np.arange(rows), uneven="pad")
    assert {len(part) for part in padded} == {-(-rows // size)}
    assert sorted(np.concatenate(padded)) == sorted([*range(rows), *range(-rows % size)])


def test_the_ranks_of_a_process_set_share_the_rows(place: Any) -> None:
    place(5, 8)
    own = mpistrat.ProcessSet([1, 5, 7])
    with pytest.raises(mpistrat.InvalidRequestError, match=r"shard\(\): Process set does not exist"):
        mpistrat.shard([1, 2, 3], process_set=own)
    own.bind(1, [1, 5, 7], Mock(topology=Topology(1, ("host",) * 3)))
    assert mpistrat.shard(list(range(8)), process_set=own) == [1, 4]
    assert mpistrat.shard(list(range(8)), process_set=own, uneven="pad") == [1, 4, 7]
    other = mpistrat.ProcessSet([0, 1])
    other.bind(2, [0, 1])
    with pytest.raises(mpistrat.InvalidRequestError, match=r"shard\(\): this rank is not a member .* \[0, 1\]"):
        mpistrat.shard([1, 2, 3], process_set=other)
    with pytest.raises(mpistrat.InvalidRequestError, match="process_set must be a ProcessSet"):
        mpistrat.shard([1, 2, 3], process_set=[0, 1])


def test_a_numpy_array_is_not_copied(on_each_rank: Any) -> None:
    x = np.zeros((10, 3, 2))
    assert all(np.shares_memory(part, x) and part.shape == (3, 3, 2) for part in on_each_rank(3, x))
    # With "pad" only ranks that repeat a row have a copy.
    assert [np.shares_memory(part, x) for part in on_each_rank(3, x, uneven="pad")] == [True, False, False]


def test_several_arrays_keep_their_rows_together(on_each_rank: Any) -> None:
    x, y = np.arange(14).reshape(7, 2), [str(2 * row) for row in range(7)]
    for uneven in ("drop", "pad"):
        for own_x, own_y in on_each_rank(2, x, y, uneven=uneven):
            assert own_y == [str(row[0]) for row in own_x]


def test_a_dict_of_arrays_is_one_argument(on_each_rank: Any) -> None:
    inputs = {"image": np.arange(4), "text": list("abcd")}
    assert [(part["image"].tolist(), part["text"]) for part, _ in on_each_rank(2, inputs, np.arange(4))] == [
        ([0, 2], ["a", "c"]), ([1, 3], ["b", "d"])]
    with pytest.raises(mpistrat.InvalidRequestError, match=r"4 in argument 1 of shard\(\), 'image'; 3 in .*'text'"):
        on_each_rank(2, {"image": np.arange(4), "text": list("abc")})


class Positional:
    """An object of pandas, in short: it slices by position with `iloc` only."""

    def __init__(self, values: list[int]):
        self.values, self.shape, self.iloc = values, (len(values), 1), self

    def __getitem__(self, key: Any) -> "Positional":
        return Positional(self.values[key] if isinstance(key, slice) else [self.values[row] for row in key])


def test_pandas_is_sliced_by_position(on_each_rank: Any) -> None:
    frame = Positional(list(range(5)))
    assert [part.values for part in on_each_rank(2, frame)] == [[0, 2], [1, 3]]
    assert [part.values for part in on_each_rank(2, frame, uneven="pad")] == [[0, 2, 4], [1, 3, 0]]


@pytest.mark.parametrize("library", ["torch", "jax.numpy", "cupy"])
def test_tensors_of_other_libraries(library: str, on_each_rank: Any) -> None:
    module = pytest.importorskip(library)
    tensor = module.arange(5)
    for part in on_each_rank(2, tensor, uneven="pad"):
        assert type(part) is type(tensor)
    assert [part.tolist() for part in on_each_rank(2, tensor, uneven="pad")] == [[0, 2, 4], [1, 3, 0]]


def test_a_dataset_in_a_file_is_read_in_slices(on_each_rank: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        rows = file.create_dataset("rows", data=np.arange(5))
        # It takes lists of rows in ascending order only.
        assert [part.tolist() for part in on_each_rank(2, rows, uneven="pad")] == [[0, 2, 4], [1, 3, 0]]


# -- errors -----------------------------------------------------------------------------------------------------------


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(("data", "message"), [
    ((), "at least one array"),
    ((np.arange(4), np.arange(5)), r"4 in argument 1 of shard\(\); 5 in argument 2"),
    ((np.arange(1),), "1 rows are too few for 2 ranks"),
    (((np.arange(4), np.arange(4)),), r"argument 1 of shard\(\) is a tuple\. Pass each array .*shard\(x, y\)"),
    ((np.arange(4), None), r"argument 2 of shard\(\) is None, which has no rows"),
    (("train.npz",), "is 'train.npz', which has no rows"),
    ((np.array(3.0),), r"argument 1 of shard\(\) \(ndarray\) has no known number of rows"),
    ((generator(),), r"\(generator\) has no known number of rows: .*shard\(\) takes arrays"),
    (({},), "an empty dict"),
    (({1, 2},), r"argument 1 of shard\(\) \(set\) cannot be sliced as array\[0:2:2\]"),
    ((SimpleNamespace(shape=(4,), iloc=[1, 2]),), r"\(SimpleNamespace\): array\[0:4:2\] has 1 rows instead of 2"),
], ids=["nothing", "unequal", "few", "tuple", "None", "name", "scalar", "generator", "dict", "set", "other"])
def test_what_has_no_rows_is_an_error_that_names_it(data: tuple[Any, ...], message: str, place: Any) -> None:
    place(0, 2)
    with pytest.raises(mpistrat.InvalidRequestError, match=message):
        mpistrat.shard(*data)


@pytest.mark.parametrize(("uneven", "text"), [
    ("drop", "2 rows are too few for 3 ranks"), ("pad", "2 rows are too few for 3 ranks"),
    ("repeat", r'uneven must be "drop" or "pad"\. Received: \'repeat\'')])
def test_fewer_rows_than_ranks_and_another_value_of_uneven_are_errors(uneven: str, text: str, place: Any) -> None:
    place(2, 3)
    with pytest.raises(mpistrat.InvalidRequestError, match=text):
        mpistrat.shard(np.arange(2), uneven=uneven)


def test_it_needs_init() -> None:
    mpistrat.shutdown()  # An earlier test may have left it initialised.
    with pytest.raises(mpistrat.NotInitializedError):
        mpistrat.shard(np.arange(2))


# -- TensorFlow -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tf() -> Any:
    return pytest.importorskip("tensorflow")


def test_tensors_stay_tensors(tf: Any, on_each_rank: Any) -> None:
    ragged = tf.ragged.constant([[0], [], [2, 2], [3], [4]])
    for uneven, rows in {"drop": [[0, 2], [1, 3]], "pad": [[0, 2, 4], [1, 3, 0]]}.items():
        for own, (part, of_variable, of_ragged) in zip(
                rows, on_each_rank(2, tf.range(5), tf.Variable(tf.range(5)), ragged, uneven=uneven), strict=True):
            assert part.numpy().tolist() == of_variable.numpy().tolist() == own
            assert tf.is_tensor(part)
            assert of_ragged.to_list() == [ragged[row].numpy().tolist() for row in own]


def in_order(dataset: Any) -> list[int]:
    return [int(element) for element in dataset]


@pytest.mark.parametrize("rows", [3, 6, 7, 8])
@pytest.mark.parametrize("known", [True, False])
def test_the_elements_of_a_dataset_are_dealt_out(rows: int, known: bool, tf: Any, on_each_rank: Any) -> None:
    dataset = tf.data.Dataset.range(rows)
    if not known:
        dataset = dataset.filter(lambda element: True)
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    for uneven in ("drop", "pad"):
        expected = [part.tolist() for part in on_each_rank(3, np.arange(rows), uneven=uneven)]
        parts = on_each_rank(3, dataset, uneven=uneven)
        assert [in_order(part) for part in parts] == expected
        assert [in_order(part) for part in parts] == expected, "the second epoch"
        assert not known or {int(part.cardinality()) for part in parts} == {len(expected[0])}


@pytest.mark.parametrize("kind", ["ragged", "sparse", "one in a tuple", "dict", "nested"])
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_elements_of_every_kind_can_be_grouped(kind: str, uneven: str, tf: Any, on_each_rank: Any) -> None:
    make = {"ragged": lambda row: tf.RaggedTensor.from_row_lengths(tf.range(row), [row]),
            "sparse": lambda row: tf.sparse.from_dense(tf.one_hot(row, 8)),
            "one in a tuple": lambda row: (row,),
            "dict": lambda row: {"row": row},
            "nested": lambda row: (row, {"text": tf.strings.as_string(row), "values": tf.ones([row])})}[kind]
    everything = [str(element) for element in tf.data.Dataset.range(5).map(make)]
    dataset = tf.data.Dataset.range(5).filter(lambda row: True).map(make)
    for part, own in zip(on_each_rank(2, dataset, uneven=uneven), on_each_rank(2, everything, uneven=uneven)):
        assert part.element_spec == dataset.element_spec
        assert [str(element) for element in part] == own


def test_an_endless_dataset_stays_endless(tf: Any, on_each_rank: Any) -> None:
    parts = on_each_rank(2, tf.data.Dataset.range(3).repeat())
    assert [in_order(part.take(4)) for part in parts] == [[0, 2, 1, 0], [1, 0, 2, 1]]


def test_an_order_of_each_ranks_own_is_an_error(tf: Any, place: Any, tmp_path: Any) -> None:
    tf.random.set_seed(None)  # Another test may have set it.
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    pattern, rows = str(tmp_path / "*.txt"), tf.data.Dataset.range(6)
    place(0, 2)
    shuffled = [tf.data.Dataset.list_files(pattern), rows.shuffle(6).map(lambda row: row + 1)]
    for dataset in shuffled:
        with pytest.raises(mpistrat.InvalidRequestError, match=r"argument 1 .* without a seed.*shuffle=False"):
            mpistrat.shard(dataset)
    ordered = [tf.data.Dataset.list_files(pattern, shuffle=False), rows.shuffle(6, seed=0), rows]
    for dataset in ordered:
        mpistrat.shard(dataset)
    assert [sharding.is_sharded_in_own_order(dataset.shard(2, 0).batch(1)) for dataset in shuffled + ordered] == [
        True, True, False, False, False]
    assert not sharding.is_sharded_in_own_order(rows.shard(2, 0).shuffle(3))
    assert not sharding.is_sharded_in_own_order(np.ones(3))
    place(0, 1)
    mpistrat.shard(shuffled[0])


def test_datasets_are_compared_with_arrays(tf: Any, place: Any) -> None:
    place(0, 2)
    with pytest.raises(mpistrat.InvalidRequestError, match=r"4 in argument 1 of shard\(\); 5 in argument 2"):
        mpistrat.shard(tf.data.Dataset.range(4), np.arange(5))
    with pytest.raises(mpistrat.InvalidRequestError, match="1 rows are too few for 2 ranks"):
        mpistrat.shard(tf.data.Dataset.range(1))


def test_none_among_elements_of_unknown_number_is_an_error(tf: Any, place: Any) -> None:
    place(0, 2)
    dataset = tf.data.Dataset.range(4).map(lambda row: (row, None))
    assert [int(row) for row, _ in mpistrat.shard(dataset)] == [0, 2]
    with pytest.raises(mpistrat.InvalidRequestError, match=r"contain None\. .*assert_cardinality\(n\)"):
        mpistrat.shard(dataset.filter(lambda row, nothing: True))
