"""Layers of experts: MoE and QMoE. Rows are sorted by the expert they visit, so each one's weights are read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ranvier.codegen.definitions.defs import Declined, RowBody
from ranvier.codegen.definitions.exprs import add, cast, clamp, const, div, mul, op
from ranvier.codegen.definitions.lower.activation import gelu_tanh, silu
from ranvier.codegen.definitions.lower.reduction import softmax
from ranvier.codegen.definitions.lower.tables import part
from ranvier.codegen.definitions.lower.views import sliced
from ranvier.codegen.definitions.nest_builder import NestBuilder
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm.coded import Accuracy, Coding, Groups
from ranvier.codegen.llvm.coded.held import held
from ranvier.codegen.llvm.coded.visited import Experts, pack_experts, usual_rows, visited_matmul
from ranvier.codegen.llvm.coded.visiting import ALIGNED
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.topk import top_k
from ranvier.codegen.llvm.visits import VISIT, most_visits, sort_visits, sorted_rows
from ranvier.codegen.loops.ir import Expr, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from ranvier.errors import RanvierError
from ranvier.graph.ir import Node, Value
from ranvier.graph.tensors import ConstTensor, stand_in
from ranvier.ops.accumulate import widened
from ranvier.ops.contrib.moe import PLACES as MOE
from ranvier.ops.contrib.moe import Hidden
from ranvier.ops.contrib.quantized_moe import PLACES, ROUTER_WEIGHTS, Layer, Stored, shares_add_up
from ranvier.providers.cpu.lower.index import lowers
from ranvier.providers.cpu.lower.weight_only import (
    FLOAT8,
    LEVELS,
    TWICE_E2M1,
    all_finite,
    computed,
    constant,
)
from ranvier.providers.cpu.realise import Realiser
from ranvier.records import dataclass

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
FLOAT, INT, INT64 = DType.float32, DType.int32, DType.int64
_FLOATS = frozenset({FLOAT, DType.float16, DType.bfloat16})
_MOST_CHOICES = 32  # experts of a token: the sum over them is written out


@dataclass(frozen=True)
class _Linear:
    """A layer that is packed: ``pack`` makes the weights of all experts of ``sources``, once for all ``more`` that they
    depend on."""

    inputs: int
    outputs: int
    pack: Callable[[Isa], Experts]
    sources: Sequence[ConstTensor | None]
    more: Hashable
    bias: Value | None


class _Visits:
    """The rows of the work: token and choice, sorted by expert."""

    def __init__(self, b: Definitions, router: Value, k: int) -> None:
        self.b, self.k = b, k
        self.tokens, self.experts = b.shape(router)
        self.usual = usual_rows(self.tokens, k, self.experts)
        self.align = ALIGNED if self.usual >= ALIGNED else 1
        count = self.tokens * k
        self.rows = sorted_rows(count, self.experts, self.align)
        likes = b.pointwise([router], lambda e: cast(e[0], FLOAT), FLOAT)

        def best(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
            return top_k(views[0], outs[0], outs[1], largest=True, in_order=True)

        shape = (self.tokens, k)
        self.likes = likes
        self.best, self.chosen = b.opaque([likes], best, [(FLOAT, shape), (INT64, shape)])

        def sort(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
            order, places, owners, visits = outs
            return sort_visits(views[0], order, places, owners, visits, self.experts, self.align)

        flat = b.reshape(self.chosen, (count,))
        row, visit = (INT, (self.rows,)), (INT, (most_visits(count, self.experts), VISIT))
        self.order, self.places, self.owners, self.visits = b.opaque([flat], sort, [row, (INT, (count,)), row, visit])

    def shares(self, normalize: bool, weigher: Value | None) -> Value:
        """How much of each choice a token takes, [tokens, k] of float32."""
        b = self.b
        if weigher is None and normalize:
            return softmax(b, self.best, 1)

        def pick(nest: NestBuilder, views: list[View]) -> Expr:
            table, chosen = views
            at = mul(nest.load(chosen), Size(table.strides[1]))
            return cast(nest.load(table, (table.strides[0], 0), at=at), FLOAT)

        table = softmax(b, self.likes, 1) if weigher is None else weigher
        picked = b.moved([table, self.chosen], pick, FLOAT, (self.tokens, self.k))
        if not normalize:
            return picked

        def build(e: list[Expr]) -> RowBody:
            return RowBody([Reduce("sum", e[0], FLOAT)], maps={0: div(e[0], Result(0, FLOAT))})

        return b.rows([picked], [1], build, [(FLOAT, True)])[0]

    def gathered(self, x: Value) -> Value:
        """The token of each row, [rows, features] of float32."""
        return self._taken(x, self.order, self.k)

    def _taken(self, table: Value, numbers: Value, each: int = 1) -> Value:
        """For every row that of a table which its number tells, as float32; ``each`` numbers in a row mean the same."""

        def pick(nest: NestBuilder, views: list[View]) -> Expr:
            table, numbers = views
            at = cast(nest.load(numbers, (numbers.strides[0], 0)), INT64)
            at = op("floordiv", at, Size(each)) if each > 1 else at
            return cast(nest.load(table, (0, table.strides[1]), at=mul(at, Size(table.strides[0]))), FLOAT)

        return self.b.moved([table, numbers], pick, FLOAT, (self.rows, self.b.shape(table)[1]))

    def product(self, rows: Value, layer: _Linear, accuracy: Accuracy) -> Value:
        """Each row by the layer of the expert that it visits, with its bias, of float32."""
        b = self.b

        def realise(r: Realiser, views: list[View], outs: list[View]) -> Sequence[Launch]:
            asked: Accuracy = "int8" if r.target.int8_activations else accuracy
            packed = r.packs.shared(layer.sources, ("experts", layer.more, r.isa), make=lambda: layer.pack(r.isa))
            return visited_matmul(
                *(views[0], views[1], packed, outs[0], self.usual, r.isa),
                aligned=self.align == ALIGNED,
                threads=r.threads,
                accuracy=asked,
            )

        flops = 2.0 * self.rows * layer.inputs * layer.outputs
        shape = (self.rows, layer.outputs)
        (made,) = b.opaque([rows, self.visits], realise, [(FLOAT, shape)], flops=flops)
        if layer.bias is None:
            return made
        bias = self._taken(layer.bias, self.owners)
        return b.pointwise([made, bias], lambda e: add(e[0], e[1]), FLOAT)

    def added(self, made: Value, shares: Value, dtype: DType) -> Value:
        """Of each token its choices, as much of each as its share."""
        k = self.k

        def total(nest: NestBuilder, views: list[View]) -> Expr:
            rows, places, shares = views
            found: Expr | None = None
            for choice in range(k):
                place = nest.load(places, (k * places.strides[0], 0), offset=choice * places.strides[0])
                at = mul(cast(place, INT64), Size(rows.strides[0]))
                value = nest.load(rows, (0, rows.strides[1]), at=at)
                share = nest.load(shares, (shares.strides[0], 0), offset=choice * shares.strides[1])
                term = mul(share, value)
                found = term if found is None else add(found, term)
            assert found is not None
            return cast(found, dtype)

        return self.b.moved([made, self.places, shares], total, dtype, (self.tokens, self.b.shape(made)[1]))


def _hidden(n: NodeView, b: Definitions, first: Value, third: Value | None) -> Value:
    """What happens between the first layers of an expert and its last."""
    hidden = Hidden.of(n.op, n.attrs)
    if hidden.activation != "swiglu":
        formulas: dict[str, Callable[[Expr], Expr]] = {
            "relu": lambda x: op("max", x, const(0.0, x)),
            "gelu": gelu_tanh,
            "silu": silu,
            "identity": lambda x: x,
        }
        if hidden.activation not in formulas:
            raise Declined(f"activation_type {hidden.activation!r}")
        formula = formulas[hidden.activation]
        if third is None:
            return b.pointwise([first], lambda e: formula(e[0]), FLOAT)
        return b.pointwise([first, third], lambda e: mul(formula(e[0]), e[1]), FLOAT)
    rows, width = b.shape(first)
    if hidden.fusion in (1, 2) and width % 2:
        raise Declined(f"swiglu of {width} features")
    if hidden.fusion == 1:
        half = (rows, width // 2)

        def every_second(k: int) -> Value:
            return b.alias(first, lambda view: sliced(view, (0, k), (1, 2), half), half)

        gate, line = every_second(0), every_second(1)
    elif hidden.fusion == 2:
        gate, line = (part(b, first, 1, k * (width // 2), width // 2) for k in range(2))
    elif third is None:
        raise Declined("swiglu without fc3")
    else:
        gate, line = first, third

    def opened(e: list[Expr]) -> Expr:
        gate, line = e
        if math.isfinite(hidden.limit):
            top = const(hidden.limit, gate)
            gate, line = op("min", gate, top), clamp(line, const(-hidden.limit, line), top)
        return mul(silu(gate, hidden.alpha), add(line, const(hidden.beta, line)))

    return b.pointwise([gate, line], opened, FLOAT)


def _mixture(
    n: NodeView, b: Definitions, layers: dict[str, _Linear], normalize: bool, weigher: Value | None, accuracy: Accuracy
) -> None:  # fmt: skip
    x, k = n.input(0), int(n.attr("k", 1))
    shape, router = n.shape(0), n.shape(1)
    if len(shape) not in (2, 3) or len(router) != 2 or math.prod(shape[:-1]) != router[0]:
        raise Declined(f"a router of {list(router)} for tokens of {list(shape)}")
    if not 1 <= k <= min(router[1], _MOST_CHOICES) or 0 in shape:
        raise Declined(f"{k} of {router[1]} experts, tokens of {list(shape)}")
    if weigher is not None and b.shape(weigher) != router:
        raise Declined(f"router_weights of {list(b.shape(weigher))}")
    fc1, fc2, fc3 = layers["fc1"], layers["fc2"], layers.get("fc3")
    features = shape[-1]
    visits = _Visits(b, n.input(1), k)
    shares = visits.shares(normalize, weigher)
    rows = visits.gathered(b.reshape(x, (visits.tokens, features)))
    for layer in (fc1, fc3):
        if layer is not None and layer.inputs != features:
            raise Declined(f"a layer of {layer.inputs} features for tokens of {features}")
    third = None if fc3 is None else visits.product(rows, fc3, accuracy)
    inner = _hidden(n, b, visits.product(rows, fc1, accuracy), third)
    if b.shape(inner)[1] != fc2.inputs or fc2.outputs != features:
        raise Declined(f"a layer of {fc2.inputs} to {fc2.outputs} features for {b.shape(inner)[1]} and {features}")
    made = visits.product(inner, fc2, accuracy)
    flat = visits.added(made, shares, n.out_dtype())
    b.reshape(flat, shape, out=n.outputs[0])


# -- weights as they are ----------------------------------------------------------------------------------------------

_STORED = {FLOAT: Coding(32, "float32"), DType.float16: Coding(16, "float16"), DType.bfloat16: Coding(16, "bfloat16")}


def _plain(node: Node) -> str | None:
    if node.attrs.get("use_sparse_mixer"):
        return "use_sparse_mixer"
    return computed(node, [weights for weights, _ in MOE.values()])


@lowers("MoE", domain=MICROSOFT, dtypes=_FLOATS, check=_plain)
def moe(n: NodeView, b: Definitions) -> None:
    experts = n.shape(1)[-1] if n.rank(1) else 0
    layers = {}
    for name, (weights, bias) in MOE.items():
        if n.has(weights):
            layers[name] = _floats(n, experts, weights, bias)
    _mixture(n, b, layers, bool(n.attr("normalize_routing_weights", 0)), None, "float32")


def _floats(n: NodeView, experts: int, weights: int, bias: int) -> _Linear:
    content = constant(n, weights)
    if len(content.shape) != 3 or content.shape[0] != experts or not content.size:
        raise Declined(f"weights of {list(content.shape)} for {experts} experts")
    count, outputs, inputs = content.shape
    coding = _STORED[content.dtype]

    def pack(isa: Isa) -> Experts:
        floats, groups = content.numpy(), Groups.even(inputs, inputs, coding)
        return pack_experts(floats, coding, groups, np.ones((count, outputs, 1), np.float32), None, isa, filled=False)

    return _Linear(inputs, outputs, pack, (content,), None, _bias(n, bias, count, outputs))


def _bias(n: NodeView, k: int, experts: int, outputs: int) -> Value | None:
    if n.has(k) and n.shape(k) != (experts, outputs):
        raise Declined(f"a bias of {list(n.shape(k))} for {experts} experts of {outputs} features")
    return n.input(k) if n.has(k) else None


# -- weights in a few bits --------------------------------------------------------------------------------------------


def _coded(node: Node) -> str | None:
    if node.attrs.get("use_sparse_mixer"):
        return "use_sparse_mixer"
    if node.attrs.get("weights_prepacked", -1) == 1:
        return "weights_prepacked"
    if any(given is not None for given in node.inputs[ROUTER_WEIGHTS + 3 :]):
        return "activations in float8"
    places = [k for weights, scales, _, *others in PLACES.values() for k in (weights, scales, *others) if k is not None]
    return computed(node, places)


_TAKEN = _FLOATS | FLOAT8 | {DType.uint8, DType.float8_e8m0fnu}


@lowers("QMoE", domain=MICROSOFT, dtypes=_TAKEN, check=_coded)
def qmoe(n: NodeView, b: Definitions) -> None:
    experts = n.shape(1)[-1] if n.rank(1) else 0
    layers = {}
    for name, (weights, scales, bias, zeros, whole) in PLACES.items():
        if not n.has(weights):
            continue
        own = Stored.of(n.attrs, name)
        sources = [n.constant(k) if k is not None else None for k in (weights, scales, zeros, whole)]
        layers[name] = _few_bits(own, name, experts, sources, _bias(n, bias, experts, n.shape(weights)[1]))
    weigher = n.input(ROUTER_WEIGHTS) if n.has(ROUTER_WEIGHTS) else None
    normalize = shares_add_up(int(n.attr("normalize_routing_weights", 0)), weigher is not None)
    accuracy = LEVELS.get(int(n.attr("accuracy_level", 0)), "float32")
    _mixture(n, b, layers, normalize, weigher, accuracy)


def _few_bits(
    stored: Stored, name: str, experts: int, sources: list[ConstTensor | None], bias: Value | None
) -> _Linear:  # fmt: skip
    weights = sources[0]
    assert weights is not None

    def layer_of(contents: list[Array | None]) -> Layer:
        codes, scales, zeros, whole = contents
        assert codes is not None
        return Layer(stored, name, experts, codes, scales, None, zeros, whole)

    try:
        sizes = layer_of([None if each is None else stand_in(each) for each in sources])
    except RanvierError as error:
        raise Declined(str(error)) from error
    if stored.kind == "fp8" and not all_finite(weights):
        raise Declined("weights that are no numbers")
    floats = {"fp8": Coding(8, "e4m3"), "fp4": TWICE_E2M1, "nvfp4": TWICE_E2M1}

    def pack(isa: Isa) -> Experts:
        layer = layer_of([None if each is None else each.numpy() for each in sources])
        raw = layer.weights.view(np.uint8)
        coding = floats.get(stored.kind) or held(stored.bits, isa, raw, layer.inputs)
        groups = Groups.even(layer.inputs, layer.block, coding)
        return pack_experts(
            *(raw, coding, groups, _factors(layer, coding), _zero_points(layer), isa),
            filled=stored.kind != "fp8",
            bits=stored.width,
            below=1 << (stored.width - 1),
        )

    return _Linear(sizes.inputs, sizes.outputs, pack, sources, (stored.kind, stored.bits, stored.block), bias)


def _factors(layer: Layer, coding: Coding) -> Array:
    """Scales of all experts, [experts, outputs, blocks]."""
    shape = (len(layer.weights), layer.outputs, layer.blocks)
    if layer.stored.kind == "int" and layer.scales is not None and layer.scales.size == math.prod(shape):
        return widened(layer.scales).astype(np.float32, copy=False).reshape(shape)  # as they are: there are many
    factors = np.stack([layer.factors(e) for e in range(shape[0])])
    return factors / np.float32(2) if coding is TWICE_E2M1 else factors


def _zero_points(layer: Layer) -> Array | None:
    if layer.zeros is None:
        return None
    shape = (len(layer.weights), layer.outputs, layer.blocks)
    if layer.zeros.dtype != np.uint8 and layer.zeros.size == math.prod(shape):
        return widened(layer.zeros).reshape(shape)
    return np.stack([layer.zero_points(e) for e in range(shape[0])])
