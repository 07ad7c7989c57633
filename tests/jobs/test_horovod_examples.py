"""Those examples after Horovod's own that test_examples.py does not run, and some of the others by XLA."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import needs_mpirun
from ..support.scripts import Line, Ran

pytestmark = needs_mpirun


def benchmark(ranks: int) -> Line:
    return Line(ranks, "examples/synthetic_benchmark.py --model MobileNet --image-size 32 --batch-size 2 "
                       "--warmup-steps 1 --steps 2 --measurements 2 --compression fp16")


def compiled(ranks: int) -> tuple[Line, ...]:
    """Two examples whose steps XLA compiles: with `fit`, and with a loop of its own."""
    return tuple(Line(ranks, f"COMPILED=1 examples/{name}.py --epochs 3") for name in ("keras_digits",
                                                                                      "custom_loop_digits"))


def advanced(ranks: int) -> tuple[Line, ...]:
    """An example that begins to train, and then goes on."""
    return tuple(Line(ranks, f"examples/keras_digits_advanced.py --directory advanced --epochs {epochs} "
                             "--warmup-epochs 2") for epochs in (2, 5))


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [benchmark(1), benchmark(2)], ids=str)
def test_the_benchmark_prints_what_each_rank_and_all_together_do(needed: Line, ran: Callable[[Line], Ran]) -> None:
    output, ranks = ran(needed).well, needed.ranks
    assert len(re.findall(r"^measurement \d: \d+\.\d images/s on this rank$", output, re.MULTILINE)) == 2, output
    [each], [total] = (re.findall(rf"^(\d+\.\d) \+- \d+\.\d images/s {what}$", output, re.MULTILINE)
                       for what in ("per rank", f"in total on {ranks} ranks"))
    assert float(total) == pytest.approx(ranks * float(each), abs=0.06 * ranks)
    assert ran(needed).output[1:] == ("",) * (ranks - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [advanced(1), advanced(2)], ids=["1", "2"])
def test_the_others_learn_the_same_on_all_ranks_and_go_on_after_the_last_epoch(
        needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    outputs = [ran(line).well for line in needed]
    pattern = rf"^test accuracy (\d\.\d+), .* weights \w+, the same on all ranks \({needed[0].ranks}\)$"
    [begun], [resumed] = (re.findall(pattern, output, re.MULTILINE) for output in outputs)
    assert float(resumed) > max(float(begun), 0.6), outputs
    assert re.findall(r"^Epoch (\d)/[25]$", "".join(outputs), re.MULTILINE) == ["1", "2", "3", "4", "5"], outputs
    for line in needed:
        assert ran(line).output[1:] == ("",) * (line.ranks - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [compiled(2)], ids=["2"])
def test_examples_whose_steps_xla_compiles_learn_the_same_on_all_ranks(
        needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    pytest.importorskip("tensorflow")
    if pytest.importorskip("mpistrat.tensorflow.xla.ffi").api() is None:
        pytest.skip("this TensorFlow does not export XLA's FFI")
    for line in needed:
        [accuracy] = re.findall(r"^test accuracy (\d\.\d+), .* weights \w+, the same on all ranks \(2\)$",
                                ran(line).well, re.MULTILINE)
        assert float(accuracy) > 0.8, ran(line).output
