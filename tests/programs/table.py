"""Every program, on how many ranks it runs, and what must come out. To add a program, add a row."""

from dataclasses import dataclass, replace

import pytest

from ..support.scripts import Line

HERE = "tests/programs"


@dataclass(frozen=True)
class Program(Line):
    """A row: a script with its arguments, on so many ranks, and what it must do on each of them."""

    # A regular expression for some of what the chief prints. What is in its groups are numbers, and `least` or more.
    says: str = ""
    least: float = 0.0
    all_say: bool = False  # All ranks print, and `says` holds for each. Otherwise no other rank prints anything.
    error: str = ""  # A regular expression for the beginning of what each rank gives to sys.exit; "": it ends well.
    # A global name that has variables. Whatever has any must have the same bits on all ranks. None: it need not.
    equal: str | None = ""
    needs: str = ""  # A module without which it is skipped.

    def __str__(self) -> str:
        return super().__str__().replace(f"{HERE}/", "")


def example(ranks: int, words: str, says: str = "", **more: object) -> Program:
    """A file of examples/, with its arguments; {ranks} in what it says is their number."""
    name, _, arguments = words.partition(" ")
    return Program(ranks, f"examples/{name}.py {arguments}".rstrip(), says.replace("{ranks}", str(ranks)), **more)


def script(name: str) -> Program:
    """One of scripts/, on two ranks."""
    return Program(2, f"{HERE}/scripts/{name}.py", equal="policy" if name == "policy_gradient" else "model")


def then(before: Program, arguments: str, says: str, least: float = 0.0) -> Program:
    """The same script once more, with other arguments, which goes on with the files of the first time."""
    return replace(before, words=f"{before.words.split()[0]} {arguments}".rstrip(), says=says, least=least, error="",
                   after=before)


def resnet50(ranks: int, arguments: str, **more: object) -> Program:
    """examples/resnet50.py on tiny images."""
    return example(ranks, "resnet50 --image-size 32 --batch-size 2 --epochs 2 --warmup-epochs 2 --steps-per-epoch 2 "
                   f"--validation-steps 1 --classes 3 {arguments}", **more)


def by_name(ranks: int, name: str, says: str = r"^rank \d: returned (\d\.\d{5}) (\d\.\d{5})$") -> Program:
    """The same training under the strategy of a name."""
    return Program(ranks, f"{HERE}/strategy_by_name.py {name}", says, all_say=True)


def features(part: str) -> Program:
    """What each feature of a module of features/, or each that is named, does with MPIStrategy, on two ranks."""
    return Program(2, f"{HERE}/features/__main__.py --try mpi {part}", r"^ends \w+ works$[\s\S]*\Z", all_say=True)


ONE_THREAD = "TF_NUM_INTEROP_THREADS=1 TF_NUM_INTRAOP_THREADS=1"


def collectives(ranks: int, way: str, count: int, words: str = "") -> Program:
    """Random programs of collectives on tensors in graphs and on arrays, against numpy."""
    compiled = "COMPILED=1 " if "compiled" in words else ""
    return Program(ranks, f"{compiled}{HERE}/random_collectives/__main__.py {way} {count} {words}",
                   rf"^rank \d: {count} programs are right", all_say=True, start=ONE_THREAD)


def scripts(ranks: int, count: int, words: str) -> Program:
    """Random training scripts, against one process, and in two legs or ways."""
    return Program(ranks, f"{HERE}/random_scripts.py {count} {words}", f"^{count} of {count} scripts are right",
                   all_say=True, start=ONE_THREAD)


def orders(ranks: int, words: str, says: str) -> Program:
    """Ranks that build their collectives in other orders, or wait for them in other ways."""
    return Program(ranks, f"tests/scripts/{words}", rf"^rank \d: {says}", all_say=True, start=ONE_THREAD)


SAME = r"^test accuracy (\S+), .*weights \w+, the same on all ranks \({ranks}\)$"
OF_STRATEGY = r"^test accuracy (\S+), norm of the weights (\S+), {ranks} ranks$"
ADASUM = r"^test accuracy (\S+) with \w+, weights \w+, the same on all ranks \({ranks}\)$"


def digits(name: str, ranks: int) -> Program:
    """An example that trains on the digits, with a checkpoint of which each rank has another path."""
    return example(ranks, f"{name} --checkpoint {name}.{ranks}.{{rank}}.keras", SAME, least=0.97)


def advanced(ranks: int) -> Program:
    """An example that goes on after two epochs."""
    arguments = "--directory advanced --warmup-epochs 2"
    return then(example(ranks, f"keras_digits_advanced {arguments} --epochs 2"), f"{arguments} --epochs 5",
                rf"\AEpoch 3/5\n[\s\S]*{SAME}".replace("{ranks}", str(ranks)), least=0.6)


def resumed(ranks: int) -> Program:
    """An example under the strategy that was interrupted, and goes on."""
    arguments = "--directory resume --epochs 4"
    return then(example(ranks, f"strategy_resume {arguments} --interrupt-after 2", error="interrupted after epoch 2"),
                arguments, rf"\AEpoch 3/4\n[\s\S]*{OF_STRATEGY}".replace("{ranks}", str(ranks)), least=0.8)


def compiled(name: str) -> Program:
    """An example whose steps XLA compiles, though it does not say so."""
    return Program(2, f"COMPILED=all examples/{name}.py --epochs 3", SAME.replace("{ranks}", "2"), least=0.8)


def of_data(name: str) -> tuple[Program, ...]:
    """An example with data in files, of which some are no good."""
    return (
        # Half of the test labels are wrong, and the others easy.
        example(2, f"{name} --data mnist.npz --epochs 8 --batch-size 10", r"^test accuracy 0\.500,"),
        example(2, f"{name} --data nowhere.npz", error=r"--data nowhere\.npz cannot be read as an \.npz file"),
        example(1, f"{name} --data other.npz", error=r".*layout of Keras' mnist: 'x_train is not a file in the"),
        example(1, f"{name} --data few.npz", error="0 training images are too few for 1 ranks"))


def central(ranks: int, *arguments: str) -> tuple[Program, ...]:
    return tuple(example(ranks, f"central_storage {each}", r"^test accuracy (\S+), norm", least=0.4)
                 for each in arguments)


def benchmark(ranks: int) -> Program:
    return example(ranks, "synthetic_benchmark --model MobileNet --image-size 32 --batch-size 2 --warmup-steps 1 "
                   "--steps 2 --measurements 2 --compression fp16", r"images/s in total on {ranks} ranks$", equal=None)


# -- rows that a test beside those of the table looks at again --------------------------------------------------------

DIGITS = tuple(digits(name, 2) for name in ("keras_digits", "custom_loop_digits"))
BENCHMARK = benchmark(2)
OPERATIONS = tuple(example(2, f"adasum_digits --op {op} --epochs 1", ADASUM) for op in ("adasum", "average"))
AS_ONE = tuple(tuple(example(ranks, words, OF_STRATEGY, least=0.8) for ranks in (2, 1)) for words in (
    "strategy_fit", "strategy_custom_loop", "strategy_fit --input dataset"))
TRAINED = [tuple(Program(each, f"{HERE}/strategy_trains.py trained.{each}") for each in (1, ranks)) for ranks in (2, 3)]
NAMED = [(by_name(ranks, name), by_name(1, "one_device")) for ranks, name in (
    (1, "mirrored"), (1, "central_storage"), (1, "default"), (2, "multi_worker_mirrored"), (2, "central_storage"),
    (3, "central_storage"))]
CENTRAL = [central(ranks, "--epochs 2", "--epochs 2 --strategy mirrored") for ranks in (2, 3)]
DATA_SERVICE = example(2, "data_service_digits", r"^test accuracy (\S+), weights \w+, of {ranks} ranks$", least=0.8)

# Of a module whole, or those of its features that no other test of the first level shows. All are of the nightly level.
SOME = {
    "keras_callbacks": "early_stopping terminate_on_nan csv_logger model_checkpoint backup_and_restore",
    "keras_data": "fit_uneven fit_generator fit_from_function fit_endless fit_validation_split fit_class_weights "
                  "fit_strings evaluate predict predict_several on_batch",
    "keras_files": "keras_file keras_file_of_one_process h5_file read_without_strategy cloned",
    "keras_layers": "batch_normalization statistics_are_means batch_normalization_without_rows training_with_dropout "
                    "adapted attention random_layers_repeat",
    "keras_models": "built_by_data nested_model set_weights two_models",
    "keras_optimizers": "weight_decay global_clipnorm clipvalue ema gradient_accumulation_clipped "
                        "learning_rate_schedule mixed_precision overflow no_gradient",
    "keras_steps": "steps_per_execution run_eagerly own_train_step own_compute_loss added_loss regularizers own_metric "
                   "wide_metrics frozen_in_between lora_in_between"}
FEATURES = [*map(features, ("input", *SOME.values(), "loops", "replica", "variables")),
            *(pytest.param(features(part), marks=pytest.mark.nightly) for part in SOME)]

# -- the table --------------------------------------------------------------------------------------------------------

# The first forks, and comes before there are many threads.
PROGRAMS = [
    *map(script, ("processes", "callbacks", "gan", "weights", "generators", "tape_loop",
                  "policy_gradient", "strategy_tabular")),
    Program(2, f"{HERE}/tutorials/multi_worker_with_keras.py with_keras/",
            r"^2 workers, accuracy (\S+), restored (\S+), losses .*, 3 epochs with backups, kept .*ckpt.*model\.keras",
            least=0.6),
    then(Program(2, f"{HERE}/tutorials/multi_worker_loop.py loop/ 2"), "loop/ 4",
         r"^epochs 2 to 4, loss \S+, accuracy (\S+), 2 workers$", least=0.85),
    *DIGITS, digits("keras_digits", 1), advanced(2), resumed(2), BENCHMARK,
    example(2, "process_sets", r"^test accuracy (\S+) and (\S+) of the models on 1 and 1 ranks, (\S+) together$",
            least=0.9, equal=None),
    example(2, "join_digits", r"^epoch 3: steps of the ranks \[29, 28\], loss \S+$", equal="model"),
    example(1, "process_sets", error="Two models need two ranks or more: mpirun -np 2"),
    example(1, "strategy_dataset_fn", r"^weights \[1\.0, -2\.0, 0\.5\], 1 ranks$"),
    *central(1, "--epochs 4"),
    resnet50(2, "--data few", error="few has 1 files train-.*, which are too few for 2 ranks"),
    *(example(1, f"{name}_digits", SAME, least=0.95, needs=name) for name in ("torch", "jax")),
    *(Program(1, f"{HERE}/without.py {name} {library}", error=rf".*pip install {library}") for name, library in (
        ("examples/keras_digits.py", "scikit-learn"), ("examples/custom_loop_digits.py", "scikit-learn"),
        ("examples/torch_digits.py", "torch"), ("examples/jax_digits.py", "jax"))),
    # Without mpistrat's own check of the first steps, which comes before that of the example.
    *(Program(2, f"MPISTRAT_CHECK_ACTION=off {name}_alone.py --epochs 1",
              error="The ranks have ended with different weights") for name in ("keras_digits", "custom_loop_digits")),
    *of_data("keras_digits"),
    orders(2, "shuffled_order.py 100 50", "100 steps of 50 tensors are right, 0 errors"),
    orders(2, "shuffled_order.py 50 30 caught", "50 steps of 30 tensors are right, 10 errors"),
    orders(2, "waits_of_all_kinds.py 100 3", "100 steps in one thread, and in 3"),
    collectives(2, "functions", 10, "eager"), collectives(2, "functions", 4), collectives(2, "sessions", 2),
    collectives(2, "strategy", 2, "gradients"), collectives(2, "strategy", 2, "1000 compiled"), scripts(2, 3, "7"),
    by_name(2, "parameter_server", r"^rank \d: InvalidRequestError: strategy\(.parameter_server.\) needs a "
            r"coordinator, a worker and a parameter server\. Start 3 or more ranks .*\. Received: 2 ranks$"),
    by_name(2, "parameter_server chief=1 worker=2 ps=1", r"^rank \d: ClusterError: .*need 4 ranks, but there are 2"),
]
# What repeats a row, or another test, with other ranks, seeds, sizes or options.
NIGHTLY = [
    resnet50(2, "--data colours", says=r"^training loss (\S+), validation accuracy \S+, learning rate \S+, 2 ranks$"),
    *map(script, ("five_models", "transformer", "two_inputs", "transfer", "text_rnn", "autoencoder")),
    example(2, "strategy_mobilenet --epochs 3 --batch-size 32", OF_STRATEGY, least=0.7),
    *of_data("custom_loop_digits"),
    resnet50(2, "--synthetic --mixed-precision bfloat16 --learning-rate 0.64",
             says=r"^training loss (\S+), validation accuracy \S+, learning rate 0\.01000, 2 ranks$"),
    compiled("keras_digits"), compiled("custom_loop_digits"), digits("custom_loop_digits", 1),
    digits("custom_loop_digits", 3), benchmark(1), advanced(1), resumed(1),
    *(example(ranks, "adasum_digits", ADASUM, least=0.93) for ranks in (1, 2, 3)),
    example(3, "process_sets", r"^test accuracy (\S+) and (\S+) of the models on 1 and 2 ranks, (\S+) together$",
            least=0.9, equal=None),
    example(2, "strategy_resnet56 --depth 8 --images 512 --batch-size 16", OF_STRATEGY, least=0.7),
    example(2, "strategy_resnet56 --images 16 --batch-size 16 --epochs 1", OF_STRATEGY),
    example(3, "strategy_dataset_fn", r"^weights \[1\.0, -2\.0, 0\.5\], 3 ranks$"),
    *(example(ranks, f"{name}_digits", SAME, least=0.95, needs=name) for name in ("torch", "jax") for ranks in (2, 3)),
    orders(3, "waits_of_all_kinds.py 300 3", "300 steps in one thread, and in 3"),
    collectives(3, "functions", 20, "1000 eager"), collectives(4, "functions", 10, "2000 eager hosts"),
    collectives(3, "functions", 12), collectives(3, "strategy", 12), collectives(3, "strategy", 5, "gradients"),
    collectives(2, "strategy", 5, "gradients gpu"), collectives(2, "strategy", 3, "3000 gradients compiled"),
    collectives(2, "strategy", 4, "1002 compiled"), collectives(2, "strategy", 6, "6000 compiled gpu"),
    collectives(3, "sessions", 12, "1000"), collectives(2, "sessions", 12, "2000 gpu"),
    scripts(2, 7, "0"), scripts(2, 20, "10"), scripts(3, 10, "200"), scripts(3, 6, "400 local"),
]
ALL = [*PROGRAMS, *(pytest.param(row, marks=pytest.mark.nightly) for row in NIGHTLY)]
