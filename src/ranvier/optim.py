"""``ranvier.optim``: see :mod:`ranvier.tensor.optim`."""

from __future__ import annotations

import sys

from ranvier.tensor.optim import *  # noqa: F403
from ranvier.tensor.optim import lr_scheduler

# so that ``from ranvier.optim.lr_scheduler import …`` works; there is one module, under two names
sys.modules[f"{__name__}.lr_scheduler"] = lr_scheduler
_OF_TENSORS = True
