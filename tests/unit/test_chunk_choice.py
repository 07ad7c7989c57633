"""The choice of the bytes of a chunk, by times that the tests make up."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from mpistrat.core.tuning import CHUNK_EARLIER, CHUNK_KEPT_LEAST, CHUNK_KEPT_MOST, CHUNK_SPEED_TIMES, CHUNK_TRIES
from mpistrat.transport.shm.two_shot import ChunkChoice

SMALL, MIDDLE, LARGE = 2**19, 2**21, 2**22
NEAR = {SMALL: 3e-10, MIDDLE: 4.7e-10, LARGE: 3.8e-10}
FAR = {SMALL: 4.4e-10, MIDDLE: 4.7e-10, LARGE: 3.6e-10}
TRIAL = 3 * (CHUNK_TRIES + 1) + 1


class Job:
    """All-reduces of one kind, each with the chunk that was announced with the one before."""

    def __init__(self) -> None:
        self.choice, self.chunk = ChunkChoice((SMALL, MIDDLE, LARGE)), SMALL
        self.used: Counter[int] = Counter()
        self.told = 0

    def reduce(self, s_per_byte: Callable[[int], float], times: int) -> Counter[int]:
        """So many all-reduces. Returns how many of them had chunks of each size."""
        self.used.clear()
        for _ in range(times):
            upcoming = self.choice.upcoming()
            self.used[self.chunk] += 1
            self.told += self.choice.took(self.chunk, s_per_byte(self.chunk))
            self.chunk = upcoming
        return self.used


def noisy(speeds: dict[int, float], seed: int = 0) -> Callable[[int], float]:
    """Times of which most are a few percent more than the least, and some twice as much."""
    chance = random.Random(seed)
    return lambda chunk: speeds[chunk] * (1 + 0.04 * chance.random()) * (2 if chance.random() < 0.1 else 1)


@pytest.mark.parametrize(("speeds", "best"), [(NEAR, SMALL), (FAR, LARGE)], ids=["near", "far"])
def test_all_sizes_are_tried_and_the_fastest_is_kept(speeds: dict[int, float], best: int) -> None:
    job = Job()
    assert set(job.reduce(noisy(speeds), TRIAL)) == {SMALL, MIDDLE, LARGE}
    assert job.reduce(noisy(speeds), 3)[best] >= 1
    assert job.choice.chunk == best
    assert job.told == 1
    assert job.reduce(noisy(speeds), 20) == {best: 20}


def test_the_first_time_of_a_size_does_not_count() -> None:
    job, seen = Job(), Counter[int]()

    def first_is_fast(chunk: int) -> float:
        seen[chunk] += 1
        return 1e-12 if chunk == MIDDLE and seen[chunk] == 1 else NEAR[chunk]

    job.reduce(first_is_fast, TRIAL + 3)
    assert job.choice.chunk == SMALL


def test_a_size_that_is_hardly_faster_is_not_chosen() -> None:
    job = Job()
    job.reduce(lambda chunk: 3e-10 if chunk == SMALL else 2.9e-10, TRIAL + 3)
    assert job.choice.chunk == SMALL


def test_cores_that_move_apart_are_seen_by_the_speed() -> None:
    job = Job()
    job.reduce(lambda chunk: NEAR[chunk], TRIAL + 20)
    job.reduce(lambda chunk: FAR[chunk], CHUNK_KEPT_LEAST // CHUNK_EARLIER + 2 * CHUNK_SPEED_TIMES)
    assert job.choice.chunk == LARGE


def test_cores_that_come_near_each_other_are_seen_in_the_next_trial() -> None:
    job = Job()
    job.reduce(lambda chunk: FAR[chunk], TRIAL + 20)
    job.reduce(lambda chunk: NEAR[chunk], CHUNK_KEPT_LEAST // 2)
    assert job.choice.chunk == LARGE  # It takes as long as before.
    job.reduce(lambda chunk: NEAR[chunk], CHUNK_KEPT_LEAST)
    assert job.choice.chunk == SMALL
    assert job.told == 2


def test_trials_become_rare_where_nothing_changes() -> None:
    job = Job()
    job.reduce(lambda chunk: NEAR[chunk], 10 * CHUNK_KEPT_MOST)
    used = job.reduce(lambda chunk: NEAR[chunk], 10 * CHUNK_KEPT_MOST)
    assert used[MIDDLE] == used[LARGE] <= 10 * CHUNK_TRIES
    assert job.told == 1


def test_a_machine_that_is_busy_now_and_then_costs_few_trials() -> None:
    job, times = Job(), 4000
    busy = random.Random(0)
    load = [1.0]

    def s_per_byte(chunk: int) -> float:
        if busy.random() < 0.02:
            load[0] = busy.choice([1.0, 2.0, 4.0])
        return load[0] * NEAR[chunk]

    used = job.reduce(s_per_byte, times)
    assert used[SMALL] > 0.9 * times


def test_the_choice_in_words() -> None:
    choice = ChunkChoice((SMALL, LARGE))
    assert str(choice) == "512 KiB"
    for _ in range(2 * (CHUNK_TRIES + 1)):
        choice.took(choice.upcoming(), 1e-10)
    assert str(choice) == "512 KiB (us per MiB: 512 KiB 105, 4 MiB 105)"
