"""SyncBatchNormalization equals one BatchNormalization over the rows of all ranks."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd

from ..support.levels import sample


def rows_of(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Other rows on each rank, and more rows on later ranks."""
    return np.random.default_rng(rank).normal(100.0 * rank, 1.0 + rank, (2 + rank, *shape)).astype(dtype)


def outcome(layer: keras.layers.Layer, x: np.ndarray, weights: np.ndarray, mask: np.ndarray | None = None,
            graph: bool = True) -> dict[str, np.ndarray]:
    layer.build(x.shape)
    value = tf.Variable(x)

    def step() -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = layer(value, training=True, **({} if mask is None else {"mask": mask}))
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * weights)
        gradients = tape.gradient(loss, [value, layer.gamma.value, layer.beta.value])
        return dict(zip(("x", "gamma", "beta"), gradients)) | {"y": y}

    found = {name: each.numpy() for name, each in (tf.function(step) if graph else step)().items()}
    return found | {"mean": layer.moving_mean.numpy(), "variance": layer.moving_variance.numpy()}


@pytest.mark.horovod("sync-batch-norm")
@sample("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("shape, axis", [((3,), -1), ((4, 5, 3), -1), ((3, 4, 5), 1)])
def test_values_and_gradients_are_those_of_one_process(shape: tuple, axis: int, graph: bool, rank: int,
                                                       size: int) -> None:
    parts = [rows_of(r, shape) for r in range(size)]
    weights = [np.random.default_rng(50 + r).normal(size=part.shape).astype("float32") for r, part in enumerate(parts)]
    whole = outcome(keras.layers.BatchNormalization(axis=axis), np.concatenate(parts), np.concatenate(weights))
    own = outcome(hvd.SyncBatchNormalization(axis=axis), parts[rank], weights[rank], graph=graph)
    first = sum(len(part) for part in parts[:rank])
    for name in ("x", "y"):
        np.testing.assert_allclose(own[name], whole[name][first:first + len(parts[rank])], rtol=1e-3, atol=1e-4)
    for name in ("mean", "variance"):
        np.testing.assert_allclose(own[name], whole[name], rtol=1e-4)
    for name in ("gamma", "beta"):  # Those of a rank are of its own loss, as in a DistributedOptimizer.
        total = mpistrat.allreduce(own[name], op=mpistrat.Sum)
        np.testing.assert_allclose(total, whole[name], rtol=1e-3, atol=1e-3)


def test_a_mask_leaves_rows_out(rank: int, size: int) -> None:
    parts = [rows_of(r, (4, 3)) for r in range(size)]
    masks = [np.random.default_rng(9 + r).random(part.shape[:2]) < 0.6 for r, part in enumerate(parts)]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    outcome(layer, parts[rank], np.ones_like(parts[rank]), mask=masks[rank])
    kept = np.concatenate([part[mask] for part, mask in zip(parts, masks)])
    np.testing.assert_allclose(layer.moving_mean, kept.mean(0), rtol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, kept.var(0), rtol=1e-3)


def test_half_precision_is_computed_in_float32(rank: int, size: int) -> None:
    parts = [rows_of(r, (3,), "float16") for r in range(size)]
    layer = hvd.SyncBatchNormalization(momentum=0.0, dtype="mixed_float16")
    found = outcome(layer, parts[rank], np.ones_like(parts[rank]))
    assert found["y"].dtype == np.float16
    together = np.concatenate(parts).astype("float32")
    np.testing.assert_allclose(found["mean"], together.mean(0), rtol=1e-3)
    np.testing.assert_allclose(found["variance"], together.var(0), rtol=1e-2)


@pytest.mark.horovod("sync-batch-norm")
def test_ranks_of_a_process_set_count_together(rank: int, size: int) -> None:
    process_set = mpistrat.add_process_set(range(1, size))
    layer = hvd.SyncBatchNormalization(momentum=0.0, process_set=process_set)
    outcome(layer, rows_of(rank, (3,)), np.ones((2 + rank, 3), "float32"))
    counted = [rows_of(r, (3,)) for r in (range(1, size) if rank else [0])]
    np.testing.assert_allclose(layer.moving_mean, np.concatenate(counted).mean(0), rtol=1e-4, atol=1e-4)
    assert mpistrat.remove_process_set(process_set)


@pytest.mark.horovod("sync-batch-norm")
def test_a_model_trains_and_loads_as_batch_normalization(rank: int, size: int, shared_dir: str) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), hvd.SyncBatchNormalization(),
                              keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    rows = np.random.default_rng(rank).normal(size=(16, 3)).astype("float32")
    model.fit(rows, rows.sum(1), batch_size=4, epochs=2, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    weights = mpistrat.allgather_object([weight.tobytes() for weight in model.get_weights()])
    assert all(other == weights[0] for other in weights), "also the running statistics"
    path = Path(shared_dir) / f"{rank}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.layers[1]) is keras.layers.BatchNormalization
    np.testing.assert_array_equal(loaded.predict(rows, verbose=0), model.predict(rows, verbose=0))


def test_inference_does_not_communicate(rank: int) -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 2))
    if rank == 0:
        assert layer(np.ones((1, 2), "float32"), training=False).shape == (1, 2)


@pytest.mark.horovod("sync-batch-norm-fused")
@pytest.mark.parametrize("arguments", [{"fused": True}, {"fused": None}, {"renorm": True}, {"synchronized": True},
                                       {"process_set": [0]}], ids=str)
def test_what_is_not_supported_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"does not support|must be a ProcessSet"):
        hvd.SyncBatchNormalization(**arguments)
