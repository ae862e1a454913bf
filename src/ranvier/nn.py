"""``ranvier.nn``: see :mod:`ranvier.tensor.nn`."""

from __future__ import annotations

import sys

from ranvier.tensor.nn import *  # noqa: F403
from ranvier.tensor.nn import functional, init, utils

# so that ``import ranvier.nn.functional as F`` works; there is one module, under two names
sys.modules[f"{__name__}.functional"] = functional
sys.modules[f"{__name__}.init"] = init
sys.modules[f"{__name__}.utils"] = utils
_OF_TENSORS = True
