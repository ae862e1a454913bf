"""com.microsoft QMoE: a layer of experts whose weights are stored in a few bits.

ONNX Runtime has zero points as packed codes alone, and blocks of one size. Here zero points of integers may also be
floats, as MatMulNBits has them (zero may then lie between two codes), and layers may have blocks of their own sizes, as
they may have bits of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from ranvier.errors import InvalidValue, NotSupported, ShapeMismatch
from ranvier.graph.attributes import text_of
from ranvier.graph.types import Type
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.moe import Hidden, mixed, no_sparse_mixer
from ranvier.ops.contrib.rules import MICROSOFT
from ranvier.ops.contrib.weight_only import WIDTHS, unpacked, zeros_of
from ranvier.ops.costs import dims, traffic
from ranvier.ops.registry import Array, Cost, TypeCall, op
from ranvier.records import dataclass

NAME = "QMoE"
FLOAT4_BLOCKS = {"fp4": 32, "nvfp4": 16}  # weights that share a scale, by the kind of 4-bit float
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_FLOAT4_SCALES = {"fp4": np.dtype(ml_dtypes.float8_e8m0fnu), "nvfp4": np.dtype(ml_dtypes.float8_e4m3fn)}
# operands of each layer: weights, scales, bias, zero points, scale of a whole expert
PLACES = {"fc1": (2, 3, 4, 11, 15), "fc2": (5, 6, 7, 12, 16), "fc3": (8, 9, 10, 13, None)}
ROUTER_WEIGHTS = 14
_ACTIVATION_SCALES = range(17, 21)


@op(NAME, domain=MICROSOFT)
def quantized_mixture_of_experts(
    x: Array,
    router_probs: Array,
    fc1_experts_weights: Array,
    fc1_scales: Array | None,
    fc1_experts_bias: Array | None,
    fc2_experts_weights: Array,
    fc2_scales: Array | None = None,
    fc2_experts_bias: Array | None = None,
    fc3_experts_weights: Array | None = None,
    fc3_scales: Array | None = None,
    fc3_experts_bias: Array | None = None,
    fc1_zero_points: Array | None = None,
    fc2_zero_points: Array | None = None,
    fc3_zero_points: Array | None = None,
    router_weights: Array | None = None,
    fc1_global_scale: Array | None = None,
    fc2_global_scale: Array | None = None,
    *activation_scales: Array | None,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int = 0,
    fc1_block_size: int = 0,
    fc2_block_size: int = 0,
    fc3_block_size: int = 0,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int = 0,
    fc2_expert_weight_bits: int = 0,
    fc3_expert_weight_bits: int = 0,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float = math.inf,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
) -> Array:
    no_sparse_mixer(NAME, use_sparse_mixer)
    if weights_prepacked == 1:
        raise NotSupported(f"{NAME}: weights_prepacked=1 is a layout of one GPU; store weights as they are specified")
    if any(given is not None for given in activation_scales):
        raise NotSupported(f"{NAME}: activations in float8")
    hidden = Hidden(NAME, activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit)
    experts = router_probs.shape[-1] if router_probs.ndim else 0
    stored = Stored(quant_type, expert_weight_bits, block_size)
    fc1 = stored.own(fc1_expert_weight_bits, fc1_block_size).layer(
        *("fc1", experts, fc1_experts_weights, fc1_scales, fc1_experts_bias, fc1_zero_points, fc1_global_scale)
    )
    fc2 = stored.own(fc2_expert_weight_bits, fc2_block_size).layer(
        *("fc2", experts, fc2_experts_weights, fc2_scales, fc2_experts_bias, fc2_zero_points, fc2_global_scale)
    )
    fc3 = None
    if fc3_experts_weights is not None:
        fc3 = stored.own(fc3_expert_weight_bits, fc3_block_size).layer(
            *("fc3", experts, fc3_experts_weights, fc3_scales, fc3_experts_bias, fc3_zero_points, None)
        )
    normalize = shares_add_up(normalize_routing_weights, router_weights is not None)
    return mixed(x, router_probs, hidden, (fc1, fc2, fc3), k, normalize, router_weights)


def shares_add_up(normalize: int, weighed_apart: bool) -> bool:
    """Whether shares of the chosen experts add up to one. ONNX Runtime's CPU provider takes the softmax of the chosen
    ones alone, whatever ``normalize_routing_weights`` says (MoE does not)."""
    return bool(normalize) or not weighed_apart


@dataclass(frozen=True)
class Stored:
    """How the weights of a layer are stored."""

    kind: str  # "int", "fp4", "nvfp4" or "fp8"
    bits: int  # of integers
    block: int  # weights of a row that share a scale; 0: all of them

    @classmethod
    def of(cls, attrs: Mapping[str, Any], layer: str) -> Stored:
        """By the attributes of a node."""
        found = cls(
            text_of(attrs.get("quant_type", "int")),
            int(attrs.get("expert_weight_bits", 4)),
            int(attrs.get("block_size", 0)),
        )
        return found.own(*(int(attrs.get(f"{layer}_{name}", 0)) for name in ("expert_weight_bits", "block_size")))

    def own(self, bits: int, block: int) -> Stored:
        """The same with what a layer has of its own, if it has."""
        return replace(self, bits=bits if bits > 0 else self.bits, block=block if block > 0 else self.block)

    @property
    def width(self) -> int:
        """Bits of a weight, of whatever kind."""
        return {"int": self.bits, "fp8": 8}.get(self.kind, 4)

    def layer(
        self, what: str, experts: int, weights: Array, scales: Array | None, bias: Array | None, zeros: Array | None,
        whole: Array | None,
    ) -> Layer:  # fmt: skip
        """Sizes are checked here, not when an expert is visited."""
        return Layer(self, f"{NAME}: {what}", experts, weights, scales, bias, zeros, whole)


class Layer:
    """A linear layer for each expert, decoded when it is visited."""

    def __init__(
        self, stored: Stored, what: str, experts: int, weights: Array, scales: Array | None, bias: Array | None,
        zeros: Array | None, whole: Array | None,
    ) -> None:  # fmt: skip
        self.what, self.stored = what, stored
        if weights.ndim != 3 or len(weights) != experts:
            raise ShapeMismatch(f"{what} weights {list(weights.shape)} are not those of {experts} experts")
        self.outputs = weights.shape[1]
        if bias is not None and bias.shape != (experts, self.outputs):
            raise ShapeMismatch(f"{what} bias {list(bias.shape)} is not [{experts}, {self.outputs}]")
        if whole is not None and whole.shape != (experts,):
            raise ShapeMismatch(f"{what} has global scales {list(whole.shape)} for {experts} experts")
        self.weights, self.scales, self.bias, self.zeros, self.whole = weights, scales, bias, zeros, whole
        self.inputs: int
        self.blocks = 1
        check = {"int": self._integers, "fp8": self._float8, **dict.fromkeys(FLOAT4_BLOCKS, self._float4)}
        if stored.kind not in check:
            raise NotSupported(f"{what} weights of quant_type {stored.kind!r}")
        check[stored.kind]()

    def __call__(self, rows: Array, expert: int) -> Array:
        if rows.shape[1] != self.inputs:
            raise ShapeMismatch(f"{self.what} takes {self.inputs} features, got {rows.shape[1]}")
        y: Array = rows @ self.decoded(expert).T
        return y if self.bias is None else y + widened(self.bias[expert])

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        if self.blocks == 1:
            return self.inputs
        return self.stored.block if self.stored.block > 0 else FLOAT4_BLOCKS[self.stored.kind]

    def decoded(self, expert: int) -> Array:
        """The weights of an expert, [outputs, inputs]."""
        values = self.values(expert)
        if self.stored.kind == "int":
            values = values - self._along(self.zero_points(expert))
        return np.asarray(values * self._along(self.factors(expert)))

    def _along(self, numbers: Array) -> Array:
        """What blocks have one of, for each input."""
        return np.repeat(numbers, self.block, axis=1)[:, : self.inputs]

    def values(self, expert: int) -> Array:
        """What codes stand for, before they are scaled and anything is subtracted."""
        codes = self.weights[expert]
        if self.stored.kind == "int":
            return unpacked(codes, self.stored.bits).astype(np.float32)
        if self.stored.kind == "fp8":
            return np.asarray(codes, np.float32)
        return np.asarray(unpacked(codes, 4).view(ml_dtypes.float4_e2m1fn), np.float32)

    def factors(self, expert: int) -> Array:
        """Scales, [outputs, blocks]."""
        factors = np.ones((self.outputs, 1), np.float32)
        if self.scales is not None:
            factors = widened(self.scales[expert]).astype(np.float32).reshape(-1, self.blocks)
            if self.stored.kind == "fp8":  # blocks are square
                factors = np.repeat(factors, self.stored.block, axis=0)[: self.outputs]
        return factors if self.whole is None else factors * widened(self.whole)[expert]

    def zero_points(self, expert: int) -> Array:
        """Codes of zero, or numbers between them, [outputs, blocks]."""
        own = None if self.zeros is None else self.zeros[expert]
        if own is not None and own.ndim == 1 and own.dtype == np.uint8:  # one for each row, packed along the rows
            return unpacked(own, self.stored.bits)[: self.outputs, None].astype(np.float32)
        return zeros_of(self.what, own, self.outputs, self.blocks, self.stored.bits)

    # -- sizes, and what is not defined -------------------------------------------------------------------------------

    def _integers(self) -> None:
        bits, block = self.stored.bits, self.stored.block
        if bits not in WIDTHS:
            raise InvalidValue(f"{self.what} weights of {bits} bits are not defined", op=NAME)
        if self.whole is not None:
            raise InvalidValue(f"{self.what}: global scales are of floats, its weights integers", op=NAME)
        experts, outputs, width = self.weights.shape
        self.inputs = width * 8 // bits
        if block > 0 and self.inputs % block:
            raise ShapeMismatch(f"{self.what} takes {self.inputs} features, which blocks of {block} do not divide")
        self.blocks = self.inputs // block if block > 0 else 1
        self._scaled((experts, outputs), (experts, outputs, self.blocks))
        if self.zeros is None:
            return
        if self.zeros.dtype != np.uint8 and self.zeros.dtype not in _FLOATS:
            raise InvalidValue(
                f"{self.what} has zero points of {self.zeros.dtype}, neither bytes of codes nor floats", op=NAME
            )
        each = bits if self.zeros.dtype == np.uint8 else 8
        wanted: list[tuple[int, ...]] = [(experts, outputs, -(-self.blocks * each // 8))]
        if self.blocks == 1:
            wanted.append((experts, -(-outputs * each // 8)))
        if self.zeros.shape not in wanted:
            raise ShapeMismatch(f"{self.what} has zero points {list(self.zeros.shape)} and not {list(wanted[0])}")

    def _scaled(self, *wanted: tuple[int, ...]) -> None:
        """Scales are there, in one of these shapes, of which the first is for rows that have one."""
        wanted = wanted if self.blocks == 1 else wanted[-1:]
        if self.scales is None or self.scales.shape not in wanted:
            found = None if self.scales is None else list(self.scales.shape)
            raise ShapeMismatch(f"{self.what} has scales {found} and not {list(wanted[0])}")

    def _float4(self) -> None:
        kind = self.stored.kind
        experts, outputs, width = self.weights.shape
        self.inputs, block = 2 * width, FLOAT4_BLOCKS[kind]
        if self.stored.block not in (0, -1, block):
            raise InvalidValue(f"{self.what}: {kind} has blocks of {block}, not of {self.stored.block}", op=NAME)
        if self.inputs % block:
            raise ShapeMismatch(f"{self.what} takes {self.inputs} features, which blocks of {block} do not divide")
        self.blocks = self.inputs // block
        self._scaled((experts, outputs, self.blocks))
        assert self.scales is not None
        if self.scales.dtype != _FLOAT4_SCALES[kind]:
            raise InvalidValue(f"{self.what}: {kind} has scales of {_FLOAT4_SCALES[kind]}", op=NAME)
        self._has_no_zeros()
        if self.whole is None:
            raise InvalidValue(f"{self.what}: {kind} needs a global scale for each expert", op=NAME)

    def _float8(self) -> None:
        experts, outputs, self.inputs = self.weights.shape
        block = self.stored.block
        if self.weights.dtype != ml_dtypes.float8_e4m3fn:
            raise InvalidValue(f"{self.what}: fp8 has weights of float8e4m3fn, not {self.weights.dtype}", op=NAME)
        self._has_no_zeros()
        if block <= 0:
            if self.whole is None or self.scales is not None:
                raise InvalidValue(f"{self.what}: fp8 without blocks has one global scale for each expert", op=NAME)
            return
        if self.whole is not None:
            raise InvalidValue(f"{self.what}: fp8 in blocks has no global scales", op=NAME)
        self.blocks = -(-self.inputs // block)
        wanted = (experts, -(-outputs // block), self.blocks)
        if self.scales is None or self.scales.shape != wanted:
            found = None if self.scales is None else list(self.scales.shape)
            raise ShapeMismatch(f"{self.what} has scales {found} and not {list(wanted)}")

    def _has_no_zeros(self) -> None:
        if self.zeros is not None:
            raise InvalidValue(f"{self.what}: {self.stored.kind} has no zero points", op=NAME)


@quantized_mixture_of_experts.infer
def _(call: TypeCall) -> Sequence[Type | None]:
    return [call.type(0)]


@quantized_mixture_of_experts.cost
def _(call: TypeCall) -> Cost:
    """Each token meets the weights of k experts."""
    tokens = math.prod(dims(call.type(0))[:-1])
    weights = 0.0
    for name, (place, *_) in PLACES.items():
        if call.type(place) is not None:
            weights += math.prod(dims(call.type(place))[1:]) * 8 / Stored.of(call.attrs, name).width
    return Cost(2.0 * tokens * int(call.attr("k", 1)) * weights, traffic(call))
