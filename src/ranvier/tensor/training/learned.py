"""Which constants of a loaded model were learned.

A file calls everything an initializer: weights, running means, scales of quantization, masks, epsilons. What an
operator reads tells them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ranvier.dtypes import DType
from ranvier.graph.ir import Graph, Node, Value
from ranvier.records import dataclass

FLOATS = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
# operators whose constant operands are weights, however small they are
_WEIGHED = frozenset(
    "Conv ConvTranspose Gemm MatMul BatchNormalization InstanceNormalization LayerNormalization GroupNormalization "  # noqa: SIM905
    "RMSNormalization PRelu LSTM GRU RNN Attention SkipLayerNormalization EmbedLayerNormalization "
    "SimplifiedLayerNormalization SkipSimplifiedLayerNormalization FusedMatMul FusedGemm FusedConv GemmFastGelu "
    "MultiHeadAttention BiasAdd BiasGelu FastGelu BiasSplitGelu DeformConv".split()
)
# operators whose constant operands are part of what they do
_SETTLED = frozenset(
    "Resize Upsample QuantizeLinear DequantizeLinear DynamicQuantizeLinear Pad Clip OneHot Range Dropout Pow "  # noqa: SIM905
    "NonMaxSuppression RoiAlign MaxRoiPool Where Equal Greater Less GreaterOrEqual LessOrEqual Max Min Mod STFT DFT "
    "MelWeightMatrix GridSample AffineGrid CenterCropPad TopK Loop Scan If".split()
)
_HUGE = 1e4  # a constant with such numbers is a mask
_TELLING = 256  # elements; two equal constants of fewer may be equal by chance


@dataclass(frozen=True)
class Roles:
    """Names of constants: what is learned, what is only followed (running means), what is another by a second name."""

    learned: tuple[str, ...]
    followed: tuple[str, ...]
    same: dict[str, str]  # name -> the one it equals


def roles_of(graph: Graph) -> Roles:
    followed = [
        value.name
        for node in graph
        if node.op == "BatchNormalization" and not node.domain
        for value in node.inputs[3:5]
        if value is not None and value.const is not None
    ]
    learned = [value for value in graph.constants.values() if value.name not in followed and _learned(value)]
    return Roles(tuple(v.name for v in learned), tuple(dict.fromkeys(followed)), _same(learned))


def _learned(value: Value) -> bool:
    const = value.const
    if const is None or const.dtype not in FLOATS or not value.uses or const.size == 0:
        return False
    users = [use for use in value.uses if not (use[0].op == "QuantizeLinear" and use[0].inputs[0] is value)]
    if not users:
        return True  # numbers that are rounded before anybody uses them: weights that learn to be quantized
    if any(node.op in _SETTLED or node.graph is not value.graph for node, _ in users):
        return False
    if any(node.op in _WEIGHED for node, _ in users):
        return True
    if const.size == 1:
        return any(_is_bias(node, value) for node, _ in users)
    return not bool((np.abs(const.numpy().astype(np.float32)) >= _HUGE).any())


def _is_bias(node: Node, value: Value) -> bool:
    """Whether a single number is added to a product: the bias of one neuron."""
    others = [v.producer for v in node.inputs if v is not None and v is not value]
    return node.op == "Add" and any(p is not None and p.op in ("MatMul", "Conv") for p in others)


def _same(learned: Sequence[Value]) -> dict[str, str]:
    """Weights that a file holds twice: tied ones, which must stay equal."""
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for value in learned:
        const = value.const
        assert const is not None
        if const.size < _TELLING:
            continue
        array = np.ascontiguousarray(const.numpy())
        if (array == array.reshape(-1)[0]).all():
            continue  # as they were made: all zeros, all ones
        key = (const.type, hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest())
        if key in first:
            found[value.name] = first[key]
        else:
            first[key] = value.name
    return found
