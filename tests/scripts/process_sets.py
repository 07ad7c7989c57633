"""Process sets that overlap, on the ranks of two hosts that are made up: any order of asynchronous collectives.

usage: mpirun -np 4 python process_sets.py
"""

import numpy as np

import mpistrat
from tests.support.pretended_hosts import pretend_hosts

pretend_hosts(2)
mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
sets = [mpistrat.add_process_set(ranks) for ranks in ([0, 1, 2], [1, 3], [0, 2, 3], [2])]
own = [each for each in sets if each.included()]
for turn in range(12):
    values = np.full(1000 * turn * turn + 1, rank, np.float32)
    pending = [(each, mpistrat.allreduce_async(values, op=mpistrat.Sum, name=f"turn{turn}", process_set=each))
               for each in (own if rank % 2 else own[::-1])]
    assert mpistrat.allreduce(np.array([rank]), op=mpistrat.Sum)[0] == size * (size - 1) // 2
    for each, result in pending[::-1]:
        assert set(result.wait().tolist()) == {float(sum(each.ranks))}
    for each in own:  # Waiting calls: in the same order on all ranks.
        ranks, place, count = each.ranks, each.rank(), each.size()
        sent = mpistrat.alltoall(np.arange(count * 3) + 100 * rank, process_set=each)
        assert sent.tolist() == [100 * other + 3 * place + i for other in ranks for i in range(3)]
        scattered = mpistrat.reducescatter(np.arange(count * 2.0) + rank, op=mpistrat.Sum, process_set=each)
        assert scattered.tolist() == [(2 * place + i) * count + sum(ranks) for i in range(2)]
        combined = mpistrat.allreduce(np.random.default_rng(rank).normal(size=50), op=mpistrat.Adasum, process_set=each)
        assert len(set(mpistrat.allgather_object(combined.tobytes(), process_set=each))) == 1
for each in sets[::-1]:
    assert mpistrat.remove_process_set(each)
mpistrat.shutdown()
print(f"rank {rank}: all sets were right", flush=True)
