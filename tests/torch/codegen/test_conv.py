"""Convolutions as products against torch, in every layout and with every window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.codegen.loops.ir import Const, Epilogue, Load, Op, Operand, Result  # noqa: E402
from ranvier.codegen.storage import View  # noqa: E402
from ranvier.codegen.triton.conv import Sliding, conv_tiles, convolution  # noqa: E402
from ranvier.codegen.triton.gemm import Tile  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.errors import NotSupported  # noqa: E402
from tests.torch.codegen.checking import run  # noqa: E402

Array = np.ndarray[Any, Any]
F32 = DType.float32
LAST, FIRST = (0, 2, 3, 1), (0, 1, 2, 3)


def laid(array: Array, order: tuple[int, ...]) -> tuple[View, Array]:
    """A view of an array whose axes lie in memory in ``order``, and the memory."""
    return View.temporary(DType[str(array.dtype)], array.shape, order), np.ascontiguousarray(array.transpose(order))


@pytest.mark.parametrize("order", [LAST, FIRST])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("channels", "made", "kernel", "stride", "dilation", "pad"),
    [(16, 8, 1, 1, 1, 0), (20, 33, 1, 2, 1, 0), (32, 16, 3, 1, 1, 1), (18, 10, 3, 2, 2, 2), (3, 16, 5, 2, 1, 2)],
)
def test_windows(
    order: tuple[int, ...], parts: int, channels: int, made: int, kernel: int, stride: int, dilation: int, pad: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, channels, 9, 7)).astype(np.float32)
    w = rng.normal(size=(made, channels, kernel, kernel)).astype(np.float32)
    bias = rng.normal(size=made).astype(np.float32)
    how = {"stride": stride, "padding": pad, "dilation": dilation}
    summed = torch.nn.functional.conv2d(*(torch.from_numpy(a.astype(np.float64)) for a in (x, w, bias)), **how)
    wanted = summed.clamp(min=0).numpy()
    (image, image_memory), (filters, filters_memory) = laid(x, order), laid(w, order)
    rows = wanted.shape[0] * wanted.shape[2] * wanted.shape[3]
    out, added = View.temporary(F32, (1, rows, made)), View.temporary(F32, (made,))
    total = Op("add", (Result(0, F32), Load(0, F32)), F32)
    epilogue = Epilogue(Op("max", (total, Const(0.0, F32)), F32), (Operand(added, (0, 0, 1)),))
    sliding = Sliding((stride, stride), (dilation, dilation), (pad, pad))
    places = (wanted.shape[2], wanted.shape[3])
    printed = convolution(image, filters, out, places, sliding, epilogue, tile=Tile(32, 32, 16, 4, 2, parts))
    memory = {
        image.storage: image_memory,
        filters.storage: filters_memory,
        added.storage: bias,
        out.storage: np.zeros(out.shape, np.float32),
    }
    found = run(printed, memory)[out.storage].view(np.float32).reshape(wanted.transpose(0, 2, 3, 1).shape)
    np.testing.assert_allclose(found, wanted.transpose(0, 2, 3, 1), atol=1e-4, rtol=1e-5)


def test_tiles_stay_under_one_tap_and_fill_the_gpu() -> None:
    x, w = View.temporary(DType.float16, (1, 512, 7, 7), LAST), View.temporary(DType.float16, (512, 512, 3, 3), LAST)
    few = conv_tiles(x, w, 49, 3)
    assert len(few) == 3 and few[0].parts > 1 and all(t.depth == 64 for t in few)
    narrow = View.temporary(DType.float16, (512, 24, 3, 3), LAST)
    assert conv_tiles(x, narrow, 49, 1)[0].depth == 32


def test_operands_that_do_not_fit() -> None:
    x, w = View.temporary(F32, (1, 4, 5, 5)), View.temporary(DType.float16, (8, 4, 1, 1))
    sliding = Sliding((1, 1), (1, 1), (0, 0))
    with pytest.raises(NotSupported, match="float32 and float16"):
        convolution(x, w, View.temporary(F32, (1, 25, 8)), (5, 5), sliding)
    with pytest.raises(ValueError, match="does not make"):
        convolution(x, View.temporary(F32, (8, 3, 1, 1)), View.temporary(F32, (1, 25, 8)), (5, 5), sliding)
