"""ElasticSampler: each row once in an epoch, also when training goes on from a commit."""

import pytest

import mpistrat
from mpistrat.api.elastic import ElasticSampler, ObjectState


def dealt_out(sampler: ElasticSampler) -> list[list[int]]:
    return mpistrat.allgather_object(list(sampler))


@pytest.mark.horovod("elastic-sampler")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 11, 12])
def test_every_row_is_dealt_out_and_all_ranks_get_as_many(rows: int, shuffle: bool, size: int) -> None:
    sampler = ElasticSampler(range(rows), shuffle=shuffle, seed=3)
    parts = dealt_out(sampler)
    assert {len(part) for part in parts} == {len(sampler)} == {-(-rows // size)}
    everything = [part[i] for i in range(len(sampler)) for part in parts]
    assert set(everything) == set(range(rows))
    assert len(everything) - rows < size  # Only what fills up the last round comes twice.
    if not shuffle:
        assert everything[:rows] == list(range(rows))


@pytest.mark.horovod("elastic-sampler")
def test_each_epoch_has_another_order_and_the_same_seed_the_same_one(rank: int) -> None:
    sampler = ElasticSampler([0] * 100, seed=1)
    first = list(sampler)
    sampler.record_batch(0, 30)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sampler.processed_indices == set()
    assert list(ElasticSampler([0] * 100, seed=1)) == first
    assert list(ElasticSampler([0] * 100, seed=2)) != first


@pytest.mark.horovod("elastic-sampler")
def test_after_sync_the_rest_is_dealt_out(rank: int, size: int) -> None:
    sampler = ElasticSampler(range(6 * size), seed=5)
    state = ObjectState(sampler=sampler, step=rank)
    done = sampler.get_indices(0, 2) if rank == 0 else sampler.get_indices(0, 4)
    sampler.record_batch(0, 2 if rank == 0 else 4)
    state.step = 7 if rank == 0 else 0
    state.sync()
    assert state.sampler is sampler
    assert state.step == 7
    processed = set().union(*map(set, mpistrat.allgather_object(done)))
    rest = dealt_out(sampler)
    assert {row for part in rest for row in part} == set(range(6 * size)) - processed
    assert len({len(part) for part in rest}) == 1


@pytest.mark.horovod("elastic-sampler")
def test_restore_takes_back_what_was_recorded_after_the_commit(rank: int) -> None:
    sampler = ElasticSampler(range(50))
    state = ObjectState(sampler=sampler)
    sampler.record_batch(0, 5)
    state.commit()
    committed = sampler.state_dict()
    sampler.record_batch(1, 5)
    sampler.set_epoch(4)
    state.restore()
    assert sampler.state_dict() == committed
    assert not set(sampler) & committed["processed_indices"]


def test_without_a_job_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.api import runtime
    monkeypatch.setattr(runtime, "is_initialized", lambda: False)
    assert sorted(ElasticSampler("abc")) == [0, 1, 2]
