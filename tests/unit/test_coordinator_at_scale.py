"""What a step costs each rank, in messages and bytes: the coordinators of up to 16,384 ranks are run."""

from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest

from mpistrat.core.tuning import FAN_OUT

from .test_coordinator import Job, allreduce

SIZES = [256, 1024, *(pytest.param(size, marks=pytest.mark.nightly) for size in (4096, 16_384))]
TENSORS = 2  # as many buckets


class Cost(NamedTuple):
    """The most that any rank sends in a step towards rank 0 and receives from below, and the bytes of the decisions."""

    sent: int
    sent_bytes: int
    received: int
    rank_lists: int
    decision_bytes: tuple[int, ...]


@cache
def costs(size: int) -> list[Cost]:
    """The cost of each of four steps of the same tensors."""
    job = Job(size)
    requests = [allreduce(f"gradient.{i}", 3) for i in range(TENSORS)]
    steps = []
    for _ in range(4):
        job.forget_messages()
        job.submit_all(*requests)
        job.settle()
        sent = Counter(rank for rank, _, _ in job.announcements)
        received = Counter(job.nodes[rank].parent for rank, _, _ in job.announcements)
        lists = sum(ranks is not None for _, message, _ in job.announcements for _, ranks in message.requests)
        steps.append(Cost(max(sent.values()), max(nbytes for _, _, nbytes in job.announcements), max(received.values()),
                          lists, tuple(nbytes for _, nbytes in job.decisions)))
    return steps


@pytest.mark.parametrize("size", SIZES)
def test_a_first_negotiation_costs_a_rank_one_message_and_no_list_of_ranks(size: int) -> None:
    first = costs(size)[0]
    assert (first.sent, first.received, first.rank_lists) == (1, FAN_OUT, 0)
    assert first.sent_bytes < 100 + 100 * TENSORS


@pytest.mark.parametrize("size", SIZES)
def test_a_step_seen_before_costs_a_rank_one_number_for_each_tensor(size: int) -> None:
    for step in costs(size)[2:]:
        assert step == Cost(sent=1, sent_bytes=8 + 8 * TENSORS, received=FAN_OUT, rank_lists=0,
                            decision_bytes=(8 + 8 * TENSORS,))


@pytest.mark.parametrize("size", SIZES[1:])
def test_no_rank_does_more_for_a_job_of_more_ranks(size: int) -> None:
    assert costs(256) == costs(size)
