"""What the model scripts share: a small writer of ONNX graphs with seeded weights, and the layers that recur.

Layers are spelled as exporters spell them (PyTorch's mostly: weights of a Linear as ``MatMul`` and ``Add``, GELU by
``Erf``, batch normalization folded into the convolution), because a runtime meets the spelling, not the paper.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
# keep the variance of a signal about the same across an activation, so that deep networks neither fade nor explode
GAIN = {"relu": math.sqrt(2.0), "silu": 1.45, "hardswish": 1.45, "gelu": 1.5}


class Net:
    """A graph under construction; every method that makes a node gives back the name of its result."""

    def __init__(self, name: str, opset: int = 17) -> None:
        self.name = name
        self._opset = opset
        # the seed depends on the name alone: a model is the same on every machine and in every order of building
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._weights: list[Any] = []
        self._shared: dict[tuple[Any, ...], str] = {}
        self._renamed: dict[str, str] = {}
        self._scope: list[str] = []
        self._count = 0
        self._domains: set[str] = set()

    # -- interface --------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str], dtype: int = FLOAT) -> None:
        """The result of a node becomes an output and takes its name, wherever it is used."""
        self._renamed[value] = name
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def model(self) -> Any:
        for node in self._nodes:
            node.input[:] = [self._renamed.get(value, value) for value in node.input]
            node.output[:] = [self._renamed.get(value, value) for value in node.output]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._weights)
        opsets = [helper.make_opsetid("", self._opset), *(helper.make_opsetid(d, 1) for d in sorted(self._domains))]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="ranvier-bench")
        self._weights = []  # the model holds them now; large ones should not stay twice
        return made

    def save(self, path: Path) -> None:
        onnx.save(self.model(), path)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def scope(self, name: str) -> _Scope:
        """Inside ``with net.scope("layer.0")`` names begin with it, as module paths do in exported models."""
        return _Scope(self._scope, name)

    def _fresh(self, kind: str) -> str:
        self._count += 1
        return "/".join(["", *self._scope, f"{kind}_{self._count}"])

    def nodes(self, op: str, *inputs: str, results: int, **attributes: Any) -> list[str]:
        name = self._fresh(op)
        outputs = [f"{name}_output_{k}" for k in range(results)]
        if "domain" in attributes:
            self._domains.add(attributes["domain"])
        self._nodes.append(helper.make_node(op, list(inputs), outputs, name=name, **attributes))
        return outputs

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.nodes(op, *inputs, results=1, **attributes)[0]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A small constant; equal ones are kept once, as exporters do."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._shared[key] = self.weight(array, "constant")
        return self._shared[key]

    def ints(self, *values: int) -> str:
        return self.constant(list(values), np.int64)

    def weight(self, array: Array, kind: str = "weight") -> str:
        name = self._fresh(kind)
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.weight(self._rng.standard_normal(shape, np.float32) * np.float32(scale))

    def around(self, centre: float, size: int, spread: float = 0.1) -> str:
        """A vector of values near one number: scales, variances, biases."""
        return self.weight((centre + spread * (self._rng.random(size, np.float32) - 0.5)).astype(np.float32))

    # -- arithmetic that reads better by name -----------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        return self.node("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.node("Mul", a, b)

    def reshape(self, x: str, *shape: int) -> str:
        return self.node("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("Transpose", x, perm=list(perm))

    def size(self, x: str, axis: int) -> str:
        """One dimension as a vector of length 1, the way traced models compute it."""
        return self.node("Unsqueeze", self.node("Gather", self.node("Shape", x), self._scalar(axis)), self.ints(0))

    def _scalar(self, number: int) -> str:
        return self.constant(number, np.int64)

    def slice(self, x: str, starts: str, ends: str, axis: int) -> str:
        return self.node("Slice", x, starts, ends, self.ints(axis), self.ints(1))

    # -- layers -----------------------------------------------------------------------------------------------------

    def linear(self, x: str, inside: int, outside: int, *, gain: float = 1.0, bias: bool = True) -> str:
        """``nn.Linear`` over more than two dims."""
        y = self.node("MatMul", x, self.normal(inside, outside, scale=gain / math.sqrt(inside)))
        return self.add(self.around(0.0, outside), y) if bias else y

    def gemm(self, x: str, inside: int, outside: int, *, gain: float = 1.0) -> str:
        """``nn.Linear`` over two dims: the weight stays as PyTorch keeps it."""
        w = self.normal(outside, inside, scale=gain / math.sqrt(inside))
        return self.node("Gemm", x, w, self.around(0.0, outside), alpha=1.0, beta=1.0, transB=1)

    def conv(
        self,
        x: str,
        inside: int,
        outside: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        groups: int = 1,
        pad: int | None = None,
        gain: float = 1.0,
        bias: bool = True,
    ) -> str:
        border = kernel // 2 if pad is None else pad
        fan = inside // groups * kernel * kernel
        w = self.normal(outside, inside // groups, kernel, kernel, scale=gain / math.sqrt(fan))
        operands = [x, w, self.around(0.0, outside)] if bias else [x, w]
        return self.node(
            "Conv",
            *operands,
            dilations=[1, 1],
            group=groups,
            kernel_shape=[kernel, kernel],
            pads=[border] * 4,
            strides=[stride, stride],
        )

    def batch_norm(self, x: str, channels: int) -> str:
        """Left unfolded, as exporters other than PyTorch's leave it."""
        operands = [self.around(c, channels) for c in (1.0, 0.0, 0.0, 1.0)]
        return self.node("BatchNormalization", x, *operands, epsilon=1e-3, momentum=0.99)

    def layer_norm(self, x: str, width: int, *, epsilon: float = 1e-5) -> str:
        """The operator, as PyTorch writes it from opset 17 on."""
        return self.node(
            "LayerNormalization", x, self.around(1.0, width), self.around(0.0, width), axis=-1, epsilon=epsilon
        )

    def layer_norm_chain(self, x: str, width: int, *, epsilon: float = 1e-5) -> str:
        """The same in single steps, as it was written before."""
        centred = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1], keepdims=1))
        variance = self.node("ReduceMean", self.node("Pow", centred, self.constant(2.0)), axes=[-1], keepdims=1)
        root = self.node("Sqrt", self.add(variance, self.constant(epsilon)))
        normal = self.node("Div", centred, root)
        return self.add(self.mul(normal, self.around(1.0, width)), self.around(0.0, width))

    def rms_norm(self, x: str, width: int, *, epsilon: float = 1e-6) -> str:
        mean = self.node("ReduceMean", self.node("Pow", x, self.constant(2.0)), axes=[-1], keepdims=1)
        root = self.node("Sqrt", self.add(mean, self.constant(epsilon)))
        normal = self.mul(x, self.node("Div", self.constant(1.0), root))
        return self.mul(self.around(1.0, width), normal)

    def gelu(self, x: str) -> str:
        erf = self.node("Erf", self.node("Div", x, self.constant(math.sqrt(2.0))))
        return self.mul(self.mul(x, self.add(erf, self.constant(1.0))), self.constant(0.5))

    def gelu_tanh(self, x: str) -> str:
        """GELU in the tanh form of GPT-2."""
        cubed = self.mul(self.node("Pow", x, self.constant(3.0)), self.constant(0.044715))
        inner = self.mul(self.add(x, cubed), self.constant(math.sqrt(2.0 / math.pi)))
        outer = self.add(self.node("Tanh", inner), self.constant(1.0))
        return self.mul(self.mul(x, self.constant(0.5)), outer)

    def silu(self, x: str) -> str:
        return self.mul(x, self.node("Sigmoid", x))

    def clip(self, x: str, low: float, high: float) -> str:
        return self.node("Clip", x, self.constant(low), self.constant(high))

    def max_pool(self, x: str, kernel: int, *, stride: int, pad: int = 0) -> str:
        return self.node("MaxPool", x, kernel_shape=[kernel] * 2, pads=[pad] * 4, strides=[stride] * 2)

    def upsample(self, x: str) -> str:
        scales = self.constant([1.0, 1.0, 2.0, 2.0])
        return self.node(
            "Resize", x, "", scales, coordinate_transformation_mode="asymmetric", mode="nearest", nearest_mode="floor"
        )


class _Scope:
    def __init__(self, stack: list[str], name: str) -> None:
        self._stack = stack
        self._name = name

    def __enter__(self) -> None:
        self._stack.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()
