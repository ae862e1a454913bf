"""Printed kernels against NumPy: interpreted, or compiled on a GPU where ``TRITON_INTERPRET=0``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ranvier.codegen.loops.ir import Nest
from ranvier.codegen.storage import Storage
from ranvier.codegen.triton.functions import INTERPRETED
from ranvier.codegen.triton.library import Printed, kernel
from tests.codegen.nest_oracle import Oracle

Array = np.ndarray[Any, Any]
DEVICE = "cpu" if INTERPRETED else "cuda"


def on_device(array: Array) -> torch.Tensor:
    """The bytes of an array, whatever its element type, at an aligned address."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat.copy()).to(DEVICE) if flat.size else torch.zeros(16, dtype=torch.uint8, device=DEVICE)


def run(made: Printed, memory: dict[Storage, Array]) -> dict[Storage, Array]:
    """What is in memory after a launch, as bytes."""
    tensors = {storage: on_device(array) for storage, array in memory.items()}
    for storage in made.temporaries:
        tensors[storage] = torch.full((storage.nbytes,), 0x7E, dtype=torch.uint8, device=DEVICE)
    made.launch(tensors)
    return {storage: tensors[storage].cpu().numpy()[: memory[storage].nbytes] for storage in memory}


def check(nest: Nest, memory: dict[Storage, Array], tolerance: float = 0.0, made: Printed | None = None) -> None:
    """Run a nest both ways and compare all that it may write, bit by bit or within a tolerance."""
    want = {s: a.reshape(-1).view(np.uint8).copy() for s, a in memory.items()}
    Oracle(nest, want).run()
    got = run(made or kernel(nest), memory)
    for k in nest.written():
        view = nest.operands[k].view
        a, b = (x[view.storage].view(view.dtype.numpy) for x in (got, want))
        if view.dtype.is_float:
            a, b = a.astype(np.float64), b.astype(np.float64)
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=nest.label)
        else:
            np.testing.assert_array_equal(a, b, err_msg=nest.label)
