"""Result memory: aligned, and used again only when nobody refers to it."""

import gc
import random
import weakref
from collections import deque

import numpy as np
import pytest

from mpistrat.core import memory
from mpistrat.core.memory import ALIGNMENT, ResultPool, block_size
from mpistrat.core.tuning import RESULT_LOOKS

F32, F64, U8 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint8)
SOME_TURNS = 200  # more than a size may be idle


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2), (1000,)])
@pytest.mark.parametrize("dtype", [U8, F32, F64, np.dtype(np.complex128), np.dtype(bool)])
def test_an_array_is_aligned_contiguous_and_writable(shape: tuple[int, ...], dtype: np.dtype) -> None:
    array = ResultPool().take(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert not array.size or array.ctypes.data % ALIGNMENT == 0
    assert array.flags.c_contiguous and array.flags.writeable


def test_hundreds_of_arrays_of_a_size_need_no_more_memory_in_later_rounds() -> None:
    pool = ResultPool()
    held, addresses = [pool.take((8,), F32) for _ in range(400)], set()
    for _ in range(5):
        held = [pool.take((8,), F32) for _ in range(400)]  # the last round's are in use until all of these are there
        addresses |= {array.ctypes.data for array in held}
    assert len(addresses) == 800


def test_results_that_are_kept_do_not_slow_down_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kept, rounds, looks = ResultPool(), [], 5000, 0
    is_free = memory._Block.is_free.fget

    def count_look(block: memory._Block) -> bool:
        nonlocal looks
        looks += 1
        return is_free(block)

    monkeypatch.setattr(memory._Block, "is_free", property(count_look))
    for _ in range(rounds):
        kept.append(pool.take((8,), F32))
        pool.end_round()
    for _ in range(rounds):
        pool.take((8,), F32)
        pool.end_round()
    assert looks < 2 * rounds * 2.5 * RESULT_LOOKS
    assert pool.nbytes < 1.2 * rounds * ALIGNMENT, "free memory is found in most cases"


def test_memory_is_handed_out_again_for_any_dtype_of_as_many_bytes() -> None:
    pool = ResultPool()
    address = pool.take((8,), F32).ctypes.data
    assert pool.take((2, 2), F64).ctypes.data == address


@pytest.mark.parametrize("view", [
    lambda a: a[2:3], lambda a: a.reshape(2, 4).T, lambda a: a.view(U8), memoryview, lambda a: np.frombuffer(a, F32),
    lambda a: memoryview(a)[1:], np.from_dlpack],
    ids=["slice", "transpose", "dtype", "memoryview", "frombuffer", "part of a memoryview", "dlpack"])
def test_a_view_of_any_kind_keeps_the_memory(view) -> None:  # type: ignore[no-untyped-def]
    pool = ResultPool()
    array = pool.take((8,), F32)
    array.fill(1)
    held = view(array)
    del array
    pool.take((8,), F32).fill(2)
    assert 2 not in np.asarray(held)
    address = np.asarray(held).ctypes.data
    del held
    assert abs(pool.take((8,), F32).ctypes.data - address) < 32


@pytest.mark.parametrize("seed", range(5))
def test_no_held_array_is_ever_overwritten(seed: int) -> None:
    source, pool = random.Random(seed), ResultPool()
    held: list[tuple[int, np.ndarray]] = []
    for poison in range(300):
        array = pool.take((source.choice([1, 4, 16]),), F32)
        array.fill(poison)
        # Some keep the array, some a part of it, some nothing.
        held += source.choice([[], [(poison, array)], [(poison, array[-1:])]])
        del array
        source.shuffle(held)
        del held[:source.randrange(3)]
        pool.end_round()
        assert all((kept == value).all() for value, kept in held)


def test_a_size_that_is_used_in_every_turn_keeps_its_memory() -> None:
    pool = ResultPool()
    first = weakref.ref(pool.take((8,), F32).base)
    for _ in range(SOME_TURNS):
        assert pool.take((8,), F32).base is first()
        pool.end_round()


def test_memory_outlives_idle_turns_while_it_is_in_use_and_is_released_after_many_more() -> None:
    pool = ResultPool()
    held = pool.take((8,), F32)
    held.fill(1)
    block = weakref.ref(held.base)
    for _ in range(SOME_TURNS):
        pool.end_round()
    pool.take((8,), F32).fill(2)
    assert set(held) == {1.0}
    del held
    pool.end_round()
    gc.collect()
    assert block() is not None
    for _ in range(SOME_TURNS):
        pool.end_round()
    gc.collect()
    assert block() is None


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 1000, 4096, 10**6, 2**30, 2**30 + 1, 3 * 2**31 + 5])
def test_a_block_is_at_most_an_eighth_or_64_bytes_larger_than_its_result(nbytes: int) -> None:
    assert nbytes <= block_size(nbytes) <= max(nbytes * 9 / 8, nbytes + 63)
    assert block_size(nbytes) % ALIGNMENT == 0
    assert block_size(block_size(nbytes)) == block_size(nbytes)


def test_ten_thousand_changing_sizes_need_no_more_memory_than_is_in_use_and_spare() -> None:
    source, pool, spare = random.Random(1), ResultPool(spare_bytes=2**16), 2**16
    held: deque[np.ndarray] = deque()
    largest_use = 0
    for _ in range(10_000):
        held.append(pool.take((source.randrange(1, 20_000),), U8))
        in_use = sum(block_size(array.nbytes) for array in held)
        if len(held) > 3:
            held.popleft()
        largest_use = max(largest_use, in_use)
        assert in_use <= pool.nbytes <= largest_use + 2 * max(largest_use, spare)
        pool.end_round()


def test_results_that_are_kept_do_not_count_against_what_is_free() -> None:
    pool = ResultPool(spare_bytes=1024)
    held = [pool.take((1024,), U8) for _ in range(100)]
    assert pool.nbytes == 100 * 1024
    for value, array in enumerate(held):
        array.fill(value)
    del array
    assert all((array == value).all() for value, array in enumerate(held))
    del held[1:]
    pool.take((1024,), U8)
    assert pool.nbytes == 100 * 1024  # Nothing new was needed.
    for _ in range(SOME_TURNS):
        pool.end_round()
    assert pool.nbytes == 1024
