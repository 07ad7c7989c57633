"""8-bit numbers between hosts on GPUs: the kernel, compiled for this machine, and whole reductions on made-up hosts.

All ranks are in this process: what they enqueue runs late, and the stand-ins for their GPUs go on in turns.
"""

import ctypes
import re
import shutil
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpistrat.core.arithmetic import Reduction, Scale
from mpistrat.core.error_feedback import ErrorFeedback
from mpistrat.core.errors import EngineError
from mpistrat.core.quantised import BLOCK, FORMATS, Quantised
from mpistrat.core.request import ReduceOp
from mpistrat.core.topology import Topology
from mpistrat.core.tuning import HIERARCHICAL_ALLGATHER_BYTES
from mpistrat.gpu.copy.quantise import BLOCK_BYTES, THREADS, QuantisedSum, source
from mpistrat.gpu.nccl.data import NcclData
from mpistrat.gpu.nccl.quantised import QuantisedReduces
from mpistrat.gpu.nccl.types import AVERAGES_FROM
from tests.gpu import quantised_kernel
from tests.support import copy_model
from tests.support.gpu_stand_in import Communicator, Device
from tests.support.nvrtc import ptx_of

each_format = pytest.mark.parametrize("format_", FORMATS)


# -- the kernel -------------------------------------------------------------------------------------------------------

# One thread does the work of a warp, and the blocks come one after the other.
ON_HOST = """
#include <cmath>
#include <cstring>
#define __device__ static
#define __global__
struct Index { unsigned int x; };
static Index blockIdx, threadIdx = {0};
static float __uint_as_float(unsigned int bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned int __float_as_uint(float value) { unsigned int bits; memcpy(&bits, &value, 4); return bits; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int distance) { return value; }
"""
LAUNCH = """
extern "C" void launch(unsigned int blocks, const unsigned long long* a) {
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        quantised_sum(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[QuantisedSum], None]]:
    """The kernel of each format as a function of this machine."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    made: dict[str, Callable[[QuantisedSum], None]] = {}
    for format_ in FORMATS:
        path = tmp_path_factory.mktemp("kernel") / f"{format_}.cpp"
        warp = f"#define THREADS {THREADS}\n"
        assert warp in source(format_)
        body = source(format_).replace(warp, "#define THREADS 1\n").replace('extern "C" ', "")
        path.write_text(ON_HOST + body + LAUNCH)
        subprocess.run([compiler, "-w", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", str(path), "-o",
                        str(path.with_suffix(".so"))], check=True)
        library = ctypes.CDLL(str(path.with_suffix(".so")))

        def launch(job: QuantisedSum, library: ctypes.CDLL = library) -> None:
            library.launch(job.blocks, (ctypes.c_ulonglong * 10)(*job[2:]))

        made[format_] = launch
    return made


@each_format
@pytest.mark.parametrize("number", range(len(list(quantised_kernel.cases()))))
def test_the_kernel_has_the_bits_of_the_path_for_cpu_tensors(format_: str, number: int,
                                                             kernels: dict[str, Any]) -> None:
    case = list(quantised_kernel.cases())[number]
    quantised_kernel.check(quantised_kernel.HostMemory(kernels[format_]), format_, case)


@each_format
def test_the_cases_have_blocks_that_are_finite_and_others(format_: str) -> None:
    scales = [quantised_kernel.results(quantised_kernel.HostMemory(copy_model.quantised_sum), format_, case)[1]
              for case in quantised_kernel.cases()]
    assert 0.3 < np.isfinite(scales).mean() < 0.9


@each_format
@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_the_kernel_compiles_for_a_gpu(format_: str, architecture: str) -> None:
    ptx = ptx_of(source(format_), architecture)
    assert ".entry quantised_sum" in ptx and ".local" not in ptx
    assert not re.search(r"\.ftz|fma\.|mad\.rn\.f|\.approx", ptx), "the bits would differ"


# -- reductions -------------------------------------------------------------------------------------------------------

class Post:
    """What the ranks of this process have sent each other, in place of a communicator of MPI."""

    def __init__(self, size: int):
        self.boxes: defaultdict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self.sent = np.zeros((size, size), np.int64)  # Bytes, by sender and receiver.

    def of(self, rank: int) -> Any:
        """The communicator of a rank, as far as the stand-in uses it."""
        def send(memory: np.ndarray, peer: int) -> Any:
            self.boxes[rank, peer].append(memory.copy())
            self.sent[rank, peer] += memory.nbytes
            return SimpleNamespace(Test=lambda: True)

        def receive(memory: np.ndarray, peer: int) -> Any:
            def test() -> bool:
                if not self.boxes[peer, rank]:
                    return False
                memory[:] = self.boxes[peer, rank].popleft()  # Another size would not fit.
                return True
            return SimpleNamespace(Test=test)

        return SimpleNamespace(Get_rank=lambda: rank, Isend=send, Irecv=receive)


class Job:
    """A rank for each letter of `hosts`, the name of its host. `members`: Their ranks in the job."""

    def __init__(self, hosts: str, buffer_bytes: int = 2**22, free_bytes: int = 2**40, members: tuple[int, ...] = (),
                 streams: int = 1):
        self.size = size = len(hosts)
        self.post = Post(size)
        self.devices = [Device(seed=rank) for rank in range(size)]
        self.nccl, self.feedback, self.reduces = [], [], []
        for rank, device in enumerate(self.devices):
            communicators = [Communicator(device, 1) for _ in range(streams)]
            for communicator in communicators:
                communicator._comm = self.post.of(rank)
            buffers: Any = [[device.scratch(buffer_bytes) for _ in range(2)] for _ in range(streams)]
            device.free_bytes = free_bytes
            self.nccl.append(NcclData(device, rank, size, communicators, buffers, buffer_bytes, AVERAGES_FROM))
            topology = Topology(rank, tuple(hosts), members)
            # As if all ranks had the memory that this one has.
            plane: Any = SimpleNamespace(allgather=lambda own, gathered, counts: gathered.fill(own[0]))
            self.feedback.append(ErrorFeedback(plane, topology))
            self.reduces.append(QuantisedReduces(device, self.nccl[-1], topology, lambda own: [own] * size,
                                                 self.feedback[-1], 10.0))

    def arrays(self, values: Sequence[Sequence[np.ndarray]]) -> list[list[Any]]:
        """The values of each rank on its GPU."""
        made = [[device.seen(device.tensor(value)) for value in own]
                for device, own in zip(self.devices, values, strict=True)]
        for device in self.devices:
            device.synchronize()
        return made

    def enqueue(self, sources: Sequence[Sequence[Any]], targets: Sequence[Sequence[Any]],
                reduction: Reduction) -> None:
        """Enqueue the reduction of the arrays of each rank."""
        for rank, (read, written) in enumerate(zip(sources, targets, strict=True)):
            reduce = self.reduces[rank].reducer(read, reduction)
            self.nccl[rank].wait_for([])
            reduce([each.address for each in read], [each.address for each in written])
            self.nccl[rank].finish()

    def run(self) -> None:
        """Let all GPUs go on until nothing is left."""
        for _ in range(100_000):
            if not any(stream.work for device in self.devices for stream in device._streams):
                return
            for device in self.devices:
                device.run_a_little()
        raise AssertionError("the GPUs wait for each other")

    def reduce(self, values: Sequence[Sequence[np.ndarray]], reduction: Reduction) -> list[np.ndarray]:
        """The results, which all ranks have with the same bits."""
        sources, targets = self.arrays(values), self.arrays(values)
        self.enqueue(sources, targets, reduction)
        self.run()
        ranks = [[array.owner.view().copy() for array in arrays] for arrays in targets]
        for other in ranks[1:]:
            assert [each.tobytes() for each in other] == [each.tobytes() for each in ranks[0]]
        return ranks[0]

    def errors(self) -> list[np.ndarray]:
        """What each rank has rounded off the only bucket."""
        return [feedback.own()["bucket"] for feedback in self.feedback]


def quantised(format_: str = "int8", divisor: int = 1, name: str = "bucket", labels: tuple[str, ...] = ()) -> Reduction:
    return Reduction(ReduceOp.SUM, 1.0, Scale(1.0, divisor), Quantised(format_, name, None, labels))


def values_of(size: int, counts: Sequence[int], seed: int = 0) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[random.standard_normal(count).astype(np.float32) for count in counts] for _ in range(size)]


# One rank on each host; several, in order and not; as many hosts as make two hops, and hosts with fewer ranks.
PLACEMENTS = ["AB", "ABC", "ABCDE", "AABB", "ABAB", "AAABBB", "AABBCC", "AAB", "ABCBB", "AABBBCCC"]
LEVELS = {"int8": 127, "fp8": 16}
COUNTS = (5_000, 1, 0, 70_001, 300)


@each_format
@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("buffer_bytes", [2**22, 2**17], ids=["one piece", "many pieces"])
def test_the_sum_of_many_steps_is_right_to_one_rounding(hosts: str, buffer_bytes: int, format_: str) -> None:
    job, size = Job(hosts, buffer_bytes), len(hosts)
    assert all(reduces.why_not(format_) == "" for reduces in job.reduces)
    total = exact = np.zeros(sum(COUNTS))
    for step in range(4):
        values = values_of(size, COUNTS, step)
        total = total + np.concatenate(job.reduce(values, quantised(format_, size)))
        exact = exact + np.sum([np.concatenate(each).astype(np.float64) for each in values], axis=0) / size
    assert 1e-4 < np.abs(total - exact).max() < 4 * 4 / LEVELS[format_]
    kept = job.errors()
    np.testing.assert_allclose(total + np.sum(kept, axis=0) / size, exact, atol=1e-4)
    for host in set(hosts):  # Of each value, one rank of a host keeps the error.
        on_host = [kept[rank] != 0 for rank in range(size) if hosts[rank] == host]
        assert np.sum(on_host, axis=0).max() == 1


@pytest.mark.parametrize("hosts, hops", [("AB", 1), ("AABB", 1), ("ABCDE", 2), ("AABBCC", 2)])
def test_hosts_send_each_other_a_quarter_of_the_bytes(hosts: str, hops: int) -> None:
    count, number = 300_000, len(set(hosts))
    job = Job(hosts)
    job.reduce(values_of(len(hosts), [count]), quantised())
    between = sum(job.post.sent[a, b] for a, b in np.ndindex(job.post.sent.shape) if hosts[a] != hosts[b])
    least = number * hops * (number - 1) / (1 if hops == 1 else number) * count
    assert least < between < 1.03 * least
    within = job.post.sent.sum() - between
    local = len(hosts) // number  # As a reduce-scatter and an all-gather of floats.
    assert within <= number * 2 * (local - 1) * 4 * count * 1.01


def test_a_small_part_goes_to_all_hosts_at_once() -> None:
    job, count = Job("ABC"), HIERARCHICAL_ALLGATHER_BYTES // 3 // BLOCK_BYTES * BLOCK
    job.reduce(values_of(3, [count]), quantised())
    assert job.post.sent[0, 1] == count // BLOCK * BLOCK_BYTES
    assert [entry[0] for entry in job.devices[0].log].count("group") == 1


@pytest.mark.parametrize("hosts", ["AB", "AABBCC", "AAB"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_so_on_all_ranks_and_forgotten(hosts: str, value: float) -> None:
    job, size = Job(hosts), len(hosts)
    values = values_of(size, [100_000])
    values[-1][0][50_000] = value
    got, = job.reduce(values, quantised("fp8", size))
    assert not np.isfinite(got[50_000]) and 0 < (~np.isfinite(got)).sum() <= BLOCK
    assert all(np.isfinite(kept).all() for kept in job.errors())
    again = values_of(size, [100_000])
    np.testing.assert_allclose(job.reduce(again, quantised("fp8", size))[0], np.mean(again, axis=0)[0], atol=1.0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_are_added_up_in_float32(dtype: type) -> None:
    values = [[np.linspace(-1, 1, count).astype(dtype) for count in (100_000, 3)] for _ in range(4)]
    for got, value in zip(Job("AABB", 2**17).reduce(values, replace(quantised("int8", 4), prescale=2.0)), values[0]):
        assert got.dtype == value.dtype
        np.testing.assert_allclose(got.astype(np.float64), 2 * value.astype(np.float64), atol=0.03)


@pytest.mark.parametrize("hosts", ["AB", "AAB"])
def test_steps_that_are_enqueued_together_use_the_errors_in_their_order(hosts: str) -> None:
    steps = [values_of(len(hosts), COUNTS, seed) for seed in range(5)]
    one_by_one = Job(hosts)
    expected = [[each.tobytes() for each in one_by_one.reduce(values, quantised())] for values in steps]
    job = Job(hosts, streams=2)
    sources, targets = ([job.arrays(values) for values in steps] for _ in range(2))
    for read, written in zip(sources, targets, strict=True):
        job.enqueue(read, written, quantised())
    job.run()
    for written, results in zip(targets, expected, strict=True):
        assert [[each.owner.view().tobytes() for each in arrays] for arrays in written] == [results] * len(hosts)


def test_without_a_name_nothing_is_kept_and_the_same_values_have_the_same_bits() -> None:
    job, values = Job("AABB"), values_of(4, [20_000])
    first, second = (job.reduce(values, quantised(name=""))[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()
    assert all(feedback.own() == {} for feedback in job.feedback)


def test_other_tensors_of_the_same_name_begin_without_an_error() -> None:
    job, values = Job("AB"), values_of(2, [20_000])
    first, = job.reduce(values, quantised(labels=("x",)))
    with_errors, = job.reduce(values, quantised(labels=("x",)))
    other, = job.reduce(values, quantised(labels=("y",)))
    assert first.tobytes() == other.tobytes() != with_errors.tobytes()


@pytest.mark.parametrize("before, after", [("AABB", "ABC"), ("ABC", "AAABBB")])
def test_what_was_rounded_off_goes_on_with_other_ranks(before: str, after: str) -> None:
    job = Job(before)
    values = values_of(len(before), COUNTS)
    total = np.concatenate(job.reduce(values, quantised()))
    exact = np.sum([np.concatenate(each).astype(np.float64) for each in values], axis=0)
    errors = np.sum(job.errors(), axis=0)
    job = Job(after)
    for feedback in job.feedback:
        feedback.restore({"bucket": errors})
    total = total + np.concatenate(job.reduce([[np.zeros(count, np.float32) for count in COUNTS]] * len(after),
                                              quantised()))
    np.testing.assert_allclose(total + np.sum(job.errors(), axis=0), exact, atol=1e-5)


def test_results_are_nan_when_ranks_are_lost_meanwhile() -> None:
    job = Job("AB")
    for nccl in job.nccl:
        nccl.guard_results()
    arrays = job.arrays(values_of(2, [20_000, 5]))
    job.enqueue(arrays, arrays, quantised())
    for nccl in job.nccl:
        nccl.revoke()
    job.run()
    assert all(np.isnan(array.owner.view()).all() for own in arrays for array in own)
    for nccl in job.nccl:
        nccl.abandon()
    with pytest.raises(EngineError, match="communicators were aborted"):
        job.enqueue(arrays, arrays, quantised())


def test_a_gpu_without_memory_for_the_errors_says_what_to_take() -> None:
    job = Job("AB", free_bytes=1000, members=(3, 7))
    with pytest.raises(EngineError, match=r"bucket: ranks \[3, 7\] have no memory for the error feedback of "
                                          r"Compression\.int8, 80000 bytes\. Take Compression\.bf16"):
        job.reduce(values_of(2, [20_000]), quantised())


def test_a_kernel_that_a_rank_cannot_compile_and_a_small_buffer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Job("AB", 2**15).reduces[0].why_not("fp8") == "a fusion buffer of 32768 bytes is too small"
    job = Job("AB")

    def fails(format_: str) -> None:
        raise EngineError(f"no {format_}")

    monkeypatch.setattr(job.devices[1], "compile_sum", fails)
    job.reduces[1]._exchange = lambda own: ["", own]
    for _ in range(2):
        assert job.reduces[1].why_not("fp8") == "rank 1: EngineError: no fp8"
