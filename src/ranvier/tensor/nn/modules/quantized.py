"""Linear layers and tables whose weights stay in few bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ranvier.dtypes import DType
from ranvier.errors import DTypeMismatch, ShapeMismatch
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Rows
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.elementwise import add
from ranvier.tensor.expr import spec
from ranvier.tensor.linalg import matmul
from ranvier.tensor.manipulate import astype, expand_dims, reshape, take
from ranvier.tensor.nn.modules.coded import Array, Coded, Reader, again, held, let_go, level_of, opened
from ranvier.tensor.state import Constant, Parameter

if TYPE_CHECKING:
    from ranvier.runtime.quantizing.coded_forms import CodedForm

_PARTS = ("codes", "scales", "zeros")  # what operators have behind their data, in their order


class _Matrix(Coded):
    """Codes of one matrix."""

    scheme: str
    bits: int

    def _hold(self, given: Quantized | Reader, form_of: Callable[[Quantized | Rows], CodedForm]) -> tuple[int, ...]:
        """Have the codes in their form, and return the shape of what they stand for."""
        with opened(given) as weight:
            form = form_of(weight)
        like = weight.like if isinstance(weight, Rows) else weight
        self.scheme, self.bits = like.scheme, like.bits
        self._op = spec(f"{form.domain}::{form.op}" if form.domain else form.op, tuple(sorted(form.attrs.items())))

        def operands() -> Sequence[Array]:
            with opened(given) as once_more:
                return form_of(once_more).operands

        for name, constant in zip(_PARTS, held(form.operands, operands if again(given) else None)):
            self.register_buffer(name, constant)
        self.register_buffer("order", None if form.order is None else Constant(form.order))
        let_go(weight)
        shape: tuple[int, ...] = weight.shape
        return shape

    def _parts(self, dtype: DType | None = None) -> list[Tensor]:
        """Codes, and what belongs to them, floats in a type."""
        codes, *others = (part for name in _PARTS if (part := self._buffers.get(name)) is not None)
        return [codes, *(each if dtype is None or each.dtype.is_integer else astype(each, dtype) for each in others)]


class QuantizedLinear(_Matrix):
    """``x @ weight.T + bias``, the weight [outputs, inputs] in codes: as a scheme makes them, or a checkpoint has them.

    Codes are buffers that do not learn; the gradient goes through to the input, so adapters beside them do, and so does
    the bias. The product is a compiled function also outside of ``jit``: it reads codes in the order that the processor
    wants them in, and nothing makes numbers of all of them.

    ``weight``: codes, or a function that reads them, as ``quantized_layers`` gives. It is asked again where they are
    needed once more: in memory is only what the processor reads then, once a product was compiled.
    ``activations``: what the input may be rounded to, at most, where weights have groups: "int8" is fastest.
    """

    def __init__(self, weight: Quantized | Reader, bias: Any = None, *, activations: str = "float32") -> None:
        from ranvier.runtime.quantizing.coded_forms import linear_form  # only here: it takes time

        super().__init__()
        form_of = functools.partial(linear_form, level=level_of(activations))
        self.out_features, self.in_features = self._hold(weight, form_of)
        self.bias: Parameter | None
        self.register_parameter("bias", None if bias is None else Parameter(as_tensor(bias)))
        if self.bias is not None and self.bias.shape != (self.out_features,):
            raise ShapeMismatch(f"a bias of shape {list(self.bias.shape)} for {self.out_features} outputs")

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

    def _computed(self, x: Tensor) -> Tensor:
        if self._kind == "BitLinear":  # scales in float32 whatever its tokens are: in 16 bits it would be another scale
            return call(self._op, (x, *self._parts()), x.dtype, (*x.shape[:-1], self.out_features))
        codes, *others = self._parts(x.dtype)
        if self._kind == "MatMul":
            return matmul(x, astype(codes, x.dtype))
        if self._kind == "DequantizeLinear":
            return matmul(x, call(self._op, (codes, *others), x.dtype, codes.shape))
        return call(self._op, (x, codes, *others), x.dtype, (*x.shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme!r}, bits={self.bits}, {self._kind}"
        )


class QuantizedEmbedding(_Matrix):
    """A table [rows, features] in codes, or a function that reads them, looked up by number: only rows that are asked
    for become numbers."""

    def __init__(self, weight: Quantized | Reader) -> None:
        from ranvier.runtime.quantizing.coded_forms import table_form  # only here: it takes time

        super().__init__()
        self.num_embeddings, self.embedding_dim = self._hold(weight, table_form)

    def forward(self, input: Any) -> Tensor:
        places = as_tensor(input)
        if not places.dtype.is_integer:
            raise DTypeMismatch(f"rows are looked up by integers, not {places.dtype}")
        return self._compiled()(places)

    def _computed(self, x: Tensor) -> Tensor:
        codes, *others = self._parts()
        if self._kind == "Gather":
            return take(codes, x, axis=0)
        scales, *zeros = others
        added = [each for each in zeros if each.dtype.is_float]
        operands = (codes, x, scales) if added else (codes, x, scales, *zeros)
        shape = (*x.shape, self.embedding_dim)
        found = call(self._op, operands, scales.dtype, shape)
        if not added:
            return found
        groups = scales.shape[1]
        apart = reshape(found, (*x.shape, groups, self.embedding_dim // groups))
        return reshape(add(apart, expand_dims(take(added[0], x, axis=0), axis=-1)), shape)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme!r}, bits={self.bits}, {self._kind}"


_OF_TENSORS = True
