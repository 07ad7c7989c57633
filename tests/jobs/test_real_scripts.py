"""Scripts as users write them, on two ranks: each ends with equal weights on all ranks, and only the chief prints."""

from pathlib import Path

import pytest

from ..support.jobs import ROOT, needs_mpirun, run_job
from ..support.scripts import Ran, endings

pytestmark = [needs_mpirun, pytest.mark.xdist_group("real scripts")]  # whose job is started once

DIRECTORY = ROOT / "tests" / "real_scripts"
# In the order in which one job runs them, so that none takes the time of a start. A script that comes twice goes on
# with the file that it has left. The first one forks.
SCRIPTS = ["processes", "callbacks", "transformer", "gan", "five_models", "weights", "generators", "tape_loop",
           "two_inputs", "transfer", "text_rnn", "accumulation", "resume", "resume", "autoencoder", "policy_gradient",
           "strategy_tabular"]
APART = """
import mpistrat.tensorflow as hvd
import tensorflow as tf

hvd.init()
same, other = tf.Variable(1.0), [tf.Variable(float(hvd.rank()))]
print("I am rank", hvd.rank())
"""
# A session is typed on every rank; what it shows goes to a file of the rank's own.
TYPED = 'file="$1/rank${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}" && shift && exec "$@" < "$0" > "$file" 2>&1'


@pytest.fixture(scope="module")
def all_ran(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Ran]]:
    """All scripts, one after the other, and at the end one whose ranks go apart."""
    directory = tmp_path_factory.mktemp("real_scripts")
    (directory / "apart.py").write_text(APART)
    scripts = [*(f"tests/real_scripts/{script}.py" for script in SCRIPTS), "apart.py"]
    finished = run_job(2, ["python", "tests/scripts/one_after_other.py", directory, *scripts], limit_s=600)
    print(finished.output)
    return [(Path(words).stem, ran) for words, ran in endings(finished, 2)]


@pytest.mark.nightly
@pytest.mark.parametrize("script", dict.fromkeys(SCRIPTS))
def test_it_trains_to_the_same_finite_weights_on_all_ranks_and_only_the_chief_prints(
        script: str, all_ran: list[tuple[str, Ran]]) -> None:
    runs = [ran for name, ran in all_ran if name == script]
    assert len(runs) == SCRIPTS.count(script)
    for ran in runs:
        assert ran.error == ran.output[1:] * 2 == ("", ""), ran
        for equal in ran.equal:
            assert equal.endswith(": equal") and ("model" in equal or "policy" in equal), ran


@pytest.mark.nightly
def test_ranks_that_go_apart_would_be_seen(all_ran: list[tuple[str, Ran]]) -> None:
    name, apart = all_ran[-1]
    assert name == "apart"
    assert apart.equal[0] == "same 1, other 1: unequal: ['other']"
    assert apart.output[1] == "I am rank 1\n"


@pytest.mark.nightly
def test_a_job_that_goes_on_counts_the_epochs_on(all_ran: list[tuple[str, Ran]]) -> None:
    first, second = (ran.output[0] for name, ran in all_ran if name == "resume")
    assert "Epoch 3/3" in first and "Epoch 4/6" in second


@pytest.mark.nightly
def test_all_of_them_are_run() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.py")} == set(SCRIPTS)


@pytest.mark.nightly
def test_interactive_python_goes_on_after_errors(tmp_path: Path) -> None:
    session = DIRECTORY / "interactive.txt"
    job = run_job(2, ["sh", "-c", TYPED, session, tmp_path, "python", "-i"])
    for rank in range(2):
        output = (tmp_path / f"rank{rank}").read_text()
        assert "AttributeError: 'Sequential' object has no attribute 'fti'" in output, output
        assert f"rank {rank} of 2 sees 1 model" in output, output
    assert job.code == 0, job.output
