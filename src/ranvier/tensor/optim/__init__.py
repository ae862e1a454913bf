"""Optimizers, schedules, clipping, loss scaling and averages, with PyTorch's habits."""

from __future__ import annotations

from ranvier.tensor.optim import lr_scheduler
from ranvier.tensor.optim.algorithms import SGD, Adafactor, Adagrad, Adam, AdamW, Lion, RMSprop
from ranvier.tensor.optim.averaging import EMA, GradientAccumulation
from ranvier.tensor.optim.base import Optimizer
from ranvier.tensor.optim.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from ranvier.tensor.optim.groups import Group
from ranvier.tensor.optim.scaling import GradScaler

__all__ = [
    "EMA",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "GradScaler",
    "GradientAccumulation",
    "Group",
    "Lion",
    "Optimizer",
    "RMSprop",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "lr_scheduler",
]
_OF_TENSORS = True
