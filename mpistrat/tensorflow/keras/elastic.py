"""The names of mpistrat.keras.elastic under Horovod's: `mpistrat.tensorflow.keras.elastic`."""

from ...api import absent
from ...keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

__getattr__ = absent.explain(__name__)
