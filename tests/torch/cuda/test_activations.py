"""GELU behind a bias is known by its values, however it is spelled out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Op, Operand, Result  # noqa: E402
from ranvier.codegen.storage import View  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.providers.cuda.activations import biased_gelu  # noqa: E402
from ranvier.providers.cuda.forms import Multiplied  # noqa: E402

F16 = DType.float16
OUT = View.temporary(F16, (1, 8, 24))
BIAS = Operand(View.temporary(F16, (24,)), (0, 0, 1))


def number(value: float) -> Expr:
    return Const(float(np.float16(value)), F16)


def op(name: str, *args: Expr) -> Expr:
    return Op(name, args, F16)


def spelled_out(x: Expr, root: Expr, half: float = 0.5, cubic: float = 0.044715) -> Expr:
    cube = op("mul", op("mul", x, x), x)
    inner = op("mul", op("add", x, op("mul", cube, number(cubic))), root)
    return op("mul", op("mul", x, number(half)), op("add", op("tanh", inner), number(1.0)))


BIASED = op("add", Result(0, F16), Load(0, F16))
ROOT = number(math.sqrt(2 / math.pi))


def test_known_with_rounded_constants() -> None:
    assert biased_gelu(Epilogue(spelled_out(BIASED, ROOT), (BIAS,)), OUT) is BIAS


def test_known_with_a_constant_that_is_loaded() -> None:
    root = View.constant(np.asarray(math.sqrt(2 / math.pi), np.float16), F16, "root")
    operands = (BIAS, Operand(root, (0, 0, 0)))
    assert biased_gelu(Epilogue(spelled_out(BIASED, Load(1, F16)), operands), OUT) is BIAS
    other = View.constant(np.asarray(0.7, np.float16), F16, "root")
    operands = (BIAS, Operand(other, (0, 0, 0)))
    assert biased_gelu(Epilogue(spelled_out(BIASED, Load(1, F16)), operands), OUT) is None


@pytest.mark.parametrize(
    "value",
    [
        spelled_out(BIASED, ROOT, half=0.49),
        spelled_out(BIASED, ROOT, cubic=0.05),
        spelled_out(op("sub", Result(0, F16), Load(0, F16)), ROOT),
        op("add", spelled_out(Result(0, F16), ROOT), Load(0, F16)),
        op("max", BIASED, number(0.0)),
        op("mul", op("mul", BIASED, number(0.5)), op("add", op("erf", op("mul", BIASED, number(0.7071))), number(1.0))),
        BIASED,
    ],
)
def test_others_are_others(value: Expr) -> None:
    assert biased_gelu(Epilogue(value, (BIAS,)), OUT) is None


def test_only_a_row_of_the_results_type() -> None:
    value = spelled_out(BIASED, ROOT)
    for bias in (
        Operand(View.temporary(F16, (8, 24)), (0, 24, 1)),
        Operand(View.temporary(DType.float32, (24,)), (0, 0, 1)),
        Operand(View.temporary(F16, (25,)), (0, 0, 1), 1),
    ):
        assert biased_gelu(Epilogue(value, (bias,)), OUT) is None
    assert biased_gelu(None, OUT) is None


@pytest.mark.parametrize("gelu", [True, False])
def test_the_librarys_form_gives_it(gelu: bool) -> None:
    left, right = View.temporary(F16, (1, 8, 16)), View.temporary(F16, (1, 16, 24))
    value = spelled_out(BIASED, ROOT) if gelu else op("max", BIASED, number(0.0))
    work = Multiplied(left, right, OUT, Epilogue(value, (BIAS,)))
    form = work.candidates()["fused"]()
    memory = {
        left.storage: torch.randn(8, 16).half(),
        right.storage: torch.randn(16, 24).half(),
        BIAS.view.storage: torch.randn(24).half(),
        OUT.storage: torch.empty(8, 24).half(),
    }

    def tensor(view: View) -> Any:
        return memory[view.storage].view(view.shape)

    assert form.library is not None
    form.library(tensor)
    a, b, c, found = memory.values()
    total = a.double() @ b.double() + c.double()
    wanted = torch.nn.functional.gelu(total, approximate="tanh") if gelu else torch.relu(total)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-2)
