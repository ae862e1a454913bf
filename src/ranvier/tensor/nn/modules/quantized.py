"""Linear layers whose weights stay in few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.quantize.base import Quantized
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.elementwise import add
from ranvier.tensor.expr import spec
from ranvier.tensor.jitted import jit
from ranvier.tensor.linalg import matmul
from ranvier.tensor.manipulate import astype, take
from ranvier.tensor.nn.modules.base import Module
from ranvier.tensor.state import Constant, Parameter

_PRODUCT = "_jitted"
_PARTS = ("codes", "scales", "zeros")  # what operators have behind their data, in their order


class QuantizedLinear(Module):
    """``x @ weight.T + bias``, the weight [outputs, inputs] in codes: as a scheme makes them, or a checkpoint has them.

    Codes are buffers that do not learn; the gradient goes through to the input, so adapters beside them do, and so does
    the bias. The product is a compiled function also outside of ``jit``: it reads codes in the order that the processor
    wants them in, and nothing makes numbers of all of them.

    ``activations``: what the input may be rounded to, at most, where weights have groups: "int8" is fastest.
    """

    def __init__(self, weight: Quantized, bias: Any = None, *, activations: str = "float32") -> None:
        from ranvier.runtime.quantizing.linear_forms import linear_form  # only here: it takes time
        from ranvier.runtime.quantizing.options import LEVELS

        super().__init__()
        if activations not in LEVELS:
            raise InvalidInput(f"activations may be rounded to {', '.join(LEVELS)}, not {activations!r}")
        form = linear_form(weight, level=LEVELS[activations])
        self.out_features, self.in_features = weight.shape
        self.scheme, self.bits = weight.scheme, weight.bits
        self._op = spec(f"{form.domain}::{form.op}" if form.domain else form.op, tuple(sorted(form.attrs.items())))
        for name, array in zip(_PARTS, form.operands):
            self.register_buffer(name, Constant(array))
        self.register_buffer("order", None if form.order is None else Constant(form.order))
        self.bias: Parameter | None
        self.register_parameter("bias", None if bias is None else Parameter(as_tensor(bias)))
        if self.bias is not None and self.bias.shape != (self.out_features,):
            raise ShapeMismatch(f"a bias of shape {list(self.bias.shape)} for {self.out_features} outputs")

    @property
    def nbytes(self) -> int:
        """Of codes, scales and zeros."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, input: Any) -> Tensor:
        x = as_tensor(input)
        if not x.dtype.is_float:
            raise DTypeMismatch(f"a linear layer reads floats, not {x.dtype}")
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ShapeMismatch(f"inputs of shape {list(x.shape)} do not fit {self.in_features} features")
        if self.order is not None:
            x = take(x, self.order, axis=-1)
        found = self._compiled()(x)
        return found if self.bias is None else add(found, self.bias)

    def _compiled(self) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] | None = self.__dict__.get(_PRODUCT)
        if found is None:
            found = jit(self._product)
            object.__setattr__(self, _PRODUCT, found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Copies compile their own."""
        return {name: value for name, value in self.__dict__.items() if name != _PRODUCT}

    def _product(self, x: Tensor) -> Tensor:
        codes, *scales = (self._buffers[name] for name in _PARTS if self._buffers.get(name) is not None)
        assert codes is not None
        name = self._op[0]
        if name == "MatMul":
            return matmul(x, astype(codes, x.dtype))
        kinds = [each if each.dtype.is_integer else astype(each, x.dtype) for each in scales if each is not None]
        if name == "DequantizeLinear":
            return matmul(x, call(self._op, (codes, *kinds), x.dtype, codes.shape))
        return call(self._op, (x, codes, *kinds), x.dtype, (*x.shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        kind = self._op[0].rpartition("::")[2]
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme!r}, bits={self.bits}, {kind}"
        )


_OF_TENSORS = True
