"""``ranvier.training``: see :mod:`ranvier.tensor.training`."""

from __future__ import annotations

from ranvier.tensor.training.checkpoints import Checkpoints
from ranvier.tensor.training.data import Batches, Data, Stream
from ranvier.tensor.training.history import History
from ranvier.tensor.training.imported import Imported, trainable
from ranvier.tensor.training.loop import Trainer
from ranvier.tensor.training.memory import TrainingEstimate, estimate_training
from ranvier.tensor.training.metrics import F1, Accuracy, Mean, Metric
from ranvier.tensor.training.plots import LivePlot
from ranvier.tensor.training.stopping import EarlyStop
from ranvier.tensor.training.trackers import JsonLines, Tracker

__all__ = [
    "F1",
    "Accuracy",
    "Batches",
    "Checkpoints",
    "Data",
    "EarlyStop",
    "History",
    "Imported",
    "JsonLines",
    "LivePlot",
    "Mean",
    "Metric",
    "Stream",
    "Tracker",
    "Trainer",
    "TrainingEstimate",
    "estimate_training",
    "trainable",
]
_OF_TENSORS = True
