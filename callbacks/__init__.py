"""Keras callbacks for training on several processes.

Imported as ``hvd_keras.callbacks``. Their order in ``fit`` matters: first
``BroadcastGlobalVariablesCallback``, then ``MetricAverageCallback``, then callbacks that read
metrics.
"""

from hvd_keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvd_keras.callbacks.checkpoint import Checkpoint
from hvd_keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvd_keras.callbacks.metric_average import MetricAverageCallback
from hvd_keras.callbacks.model_checkpoint import ModelCheckpoint
from hvd_keras.callbacks.progress_logger import ProgressLogger
from hvd_keras.callbacks.stats_logger import StatsLogger
from hvd_keras.callbacks.verify_weights import VerifyWeights

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
    "ProgressLogger",
    "StatsLogger",
    "VerifyWeights",
]
