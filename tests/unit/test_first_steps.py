"""What the digests of the first reductions say: different weights, and the same data on all ranks."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from mpistrat.tensorflow.consistency import by_rank, describe_weights, differing, is_same_data

NOTHING = bytes(8)
A, B, C = (letter * 8 for letter in (b"a", b"b", b"c"))


@pytest.mark.parametrize(("digests", "expected"), [
    ([[A, B, C], [B, B, C]], []),  # The first digest is that of the gradients.
    ([[A, B, C], [A, B, A]], [1]),
    ([[A, B, C], [A, C, A], [A, B, C]], [0, 1]),
    ([[A], [A]], []),  # The weights were not read.
    ([[A, B], [A, B, C]], []),  # Another number of variables, which the reduction itself reports.
    ([], [])])
def test_variables_are_compared_by_their_digests(digests: list[list[bytes]], expected: list[int]) -> None:
    assert differing(digests) == expected


@pytest.mark.parametrize(("received", "expected"), [
    ([[[A, B], [A, B]], [[B], [B]]], True),
    ([[[A, B], [A, B]], [[B], [B]], [[C], [C]]], True),
    ([[[A, B], [A, B]], [[B], [B]], [[C], [A]]], False),
    ([[[A, B], [A, B]]], False),  # One step may be chance.
    ([[[A, B], [A, B]], []], False),
    ([[[NOTHING, B], [NOTHING, B]], [[A], [A]]], False),
    # Gradients of different weights say nothing of the data.
    ([[[A, B], [B, C]], [[A, B], [A, B]], [[C], [C]]], True),
    ([[[A, B], [A, C]], [[A, B], [A, B]]], False),
    ([], False)])
def test_equal_gradients_of_equal_weights_mean_equal_data(received: list[list[list[bytes]]], expected: bool) -> None:
    assert is_same_data(received) is expected


def test_gathered_rows_are_those_of_the_ranks_in_their_order() -> None:
    rows = [(1).to_bytes(4, "little") + A, (0).to_bytes(4, "little") + B, (1).to_bytes(4, "little") + C]
    assert by_rank(np.frombuffer(b"".join(rows), np.uint8).reshape(3, -1)) == [[B], [A, C]]


def test_the_error_names_the_first_variable_the_ranks_and_what_to_write() -> None:
    text = describe_weights(["kernel", "bias", "scale"], [[A, A, A, A], [A, A, B, A], [B, A, A, C]])
    assert text.startswith("the ranks train different weights: the values of bias differ between ranks [0, 2] and "
                           "[1]. So do 1 more of 3 variables. Broadcast them before training: ")
    assert "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks" in text
    assert "hvd.broadcast_variables(model.weights, root_rank=0)" in text


def test_the_error_of_many_ranks_is_not_long() -> None:
    text = describe_weights(["kernel"], [[A, rank.to_bytes(8, "little")] for rank in range(1000)])
    assert "differ between ranks [0], [1], [2], [3], [4], [5] and 994 more groups. Broadcast" in text
