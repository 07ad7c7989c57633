"""Horovod's functions and classes take Horovod's arguments: these names, in this order, before any others."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")

# By module and name: the arguments of Horovod 0.28.1.
SIGNATURES = {
    "mpistrat.tensorflow": {
        "init": "comm process_sets",
        "shutdown": "", "is_initialized": "", "size": "", "local_size": "", "cross_size": "", "rank": "",
        "local_rank": "", "cross_rank": "", "is_homogeneous": "",
        "size_op": "process_set_id name", "process_set_included_op": "process_set_id name", "rank_op": "name",
        "local_rank_op": "name", "local_size_op": "name",
        "mpi_threads_supported": "", "mpi_enabled": "", "mpi_built": "", "gloo_enabled": "", "gloo_built": "",
        "nccl_built": "", "ddl_built": "", "ccl_built": "", "cuda_built": "", "rocm_built": "",
        "gpu_available": "ext_base_name verbose",
        "ProcessSet": "ranks_or_comm", "add_process_set": "process_set", "remove_process_set": "process_set",
        "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name "
                     "process_set ignore_name_scope",
        "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor "
                             "postscale_factor process_set ignore_name_scope name",
        "allgather": "tensor name ignore_name_scope process_set",
        "grouped_allgather": "tensors name ignore_name_scope process_set",
        "broadcast": "tensor root_rank name ignore_name_scope process_set",
        "broadcast_": "variables root_rank name process_set",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
                         "postscale_factor",
        "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor postscale_factor",
        "broadcast_variables": "variables root_rank process_set inplace",
        "broadcast_global_variables": "root_rank", "BroadcastGlobalVariablesHook": "root_rank device",
        "broadcast_object": "obj root_rank session name process_set",
        "broadcast_object_fn": "root_rank session name process_set",
        "allgather_object": "obj session name process_set",
        "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op "
                                   "gradient_predivide_factor num_groups groups process_set scale_local_gradients",
        "PartialDistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op "
                                          "gradient_predivide_factor num_groups groups process_set local_layers "
                                          "scale_local_gradients"},
    "mpistrat.tensorflow.elastic": {"run": "func", "TensorFlowState": "variables session",
                                    "TensorFlowKerasState": "model optimizer backend"},
    "mpistrat.tensorflow.keras": {
        "DistributedOptimizer": "optimizer name device_dense device_sparse compression sparse_as_dense "
                                "gradient_predivide_factor op backward_passes_per_step average_aggregated_gradients "
                                "num_groups groups process_set scale_local_gradients"},
    "mpistrat.keras": {
        "PartialDistributedOptimizer": "optimizer name device_dense device_sparse compression sparse_as_dense "
                                       "gradient_predivide_factor op backward_passes_per_step "
                                       "average_aggregated_gradients groups process_set local_layers "
                                       "scale_local_gradients",
        "allreduce": "value name average prescale_factor postscale_factor op compression",
        "allgather": "value name", "broadcast": "value root_rank name", "reducescatter": "value name op",
        "broadcast_global_variables": "root_rank",
        "load_model": "filepath custom_optimizers custom_objects compression legacy_opts"},
    "mpistrat.keras.callbacks": {
        "BroadcastGlobalVariablesCallback": "root_rank device local_variables", "MetricAverageCallback": "device",
        "LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase momentum_correction "
                                        "steps_per_epoch",
        "LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose",
        "BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq"},
    "mpistrat.keras.elastic": {"KerasState": "model optimizer", "CommitStateCallback": "state batches_per_commit",
                               "UpdateBatchStateCallback": "state", "UpdateEpochStateCallback": "state"},
    "mpistrat": {"run": "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts "
                        "hostfile host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache "
                        "output_filename verbose use_gloo use_mpi mpi_args network_interface network_interfaces "
                        "executable np min_np max_np"},
}

OF_THE_OPTIMIZER = {
    "horovod.keras": "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor "
                     "op num_groups groups",
    "horovod.tensorflow.keras": SIGNATURES["mpistrat.tensorflow.keras"]["DistributedOptimizer"],
    "horovod.tensorflow": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
                          "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients "
                          "num_groups groups process_set scale_local_gradients",
}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values()
            if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


@pytest.mark.horovod("signatures")
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in SIGNATURES.items() for name in names])
def test_horovods_arguments_come_first_and_in_its_order(module: str, name: str) -> None:
    expected = SIGNATURES[module][name].split()
    found = parameters_of(getattr(importlib.import_module(module), name))
    assert [parameter.name for parameter in found[:len(expected)]] == expected
    assert all(parameter.default is not inspect.Parameter.empty for parameter in found[len(expected):])


@pytest.mark.horovod("signatures", "optimizer")
def test_the_optimizer_takes_the_arguments_of_all_of_horovods_modules() -> None:
    from mpistrat.tensorflow.sessions import DistributedOptimizer
    names = {parameter.name for parameter in parameters_of(DistributedOptimizer)}
    for module in ("horovod.keras", "horovod.tensorflow.keras", "horovod.tensorflow"):
        assert set(OF_THE_OPTIMIZER[module].split()) <= names, module
