"""The names of mpistrat.keras.callbacks under Horovod's: `from mpistrat.tensorflow.keras.callbacks import ...`."""

from ...api import absent
from ...keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback",
           "LearningRateWarmupCallback", "MetricAverageCallback"]

__getattr__ = absent.explain(__name__)
