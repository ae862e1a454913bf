"""Finds, among the steps of a run whose sizes are known, those that the kernels of decoding do together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ranvier.dtypes import DType
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.cuda.decode_steps import (
    CodesStep,
    DecodeStep,
    Heads,
    LengthsStep,
    LookUpStep,
    Norm,
    ProductStep,
    PromptStep,
    default_scale,
)
from ranvier.providers.cuda.decode_weights import Borrowed, Codes, Floats, GatedFloats, Shelf, Weights
from ranvier.providers.cuda.kernels import choose
from ranvier.providers.cuda.kernels.decode_attention import Workspace
from ranvier.providers.cuda.kernels.int4 import CHUNK
from ranvier.providers.cuda.steps import Env, NodeStep, Step
from ranvier.providers.cuda.table import CONTRIB
from ranvier.records import dataclass

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FEW = 8  # tokens whose embeddings are looked up by a kernel of ours
_SIDE_BY_SIDE = 3  # matrices of floats that one launch multiplies with


@dataclass(frozen=True)
class Matrix:
    """A product with constant weights ``[N, K]``, at a place among the steps."""

    at: int
    node: Node
    x: Value
    y: Value
    kind: str
    n: int
    tokens: int
    k: int
    bias: Value | None = None
    added: int | None = None  # where a bias is added that is no operand of the product

    @property
    def steps(self) -> tuple[int, ...]:
        return (self.at,) if self.added is None else (self.at, self.added)

    @property
    def few(self) -> bool:
        return choose.product(self.kind, self.tokens, self.k).kernel == choose.GEMV

    def alike(self, other: Matrix) -> bool:
        """Can one launch multiply with both?"""
        same = self.kind == other.kind and (self.bias is None) == (other.bias is None)
        if not same or self.kind != "int4":
            return same
        same_zeros = (self.node.input(3) is None) == (other.node.input(3) is None)
        return same_zeros and self.node.attrs["block_size"] == other.node.attrs["block_size"]


@dataclass(frozen=True)
class _Plan:
    """A launch to be: what it multiplies, and the widths of its results."""

    weights: Weights
    x: Value
    outputs: tuple[tuple[Value, int], ...]
    residual: Value | None = None
    few: bool = True


class Search:
    """``run`` gives the steps of a run after a first one that left its tensors in ``env``."""

    def __init__(
        self, steps: Sequence[Step], env: Env, outputs: Sequence[Value], shelf: Shelf, processors: int, *, pdl: bool
    ) -> None:
        self._steps = list(steps)
        self._env = env
        self._outputs = set(outputs)
        self._shelf = shelf
        self._processors = processors
        self._pdl = pdl
        self._maker = {v: k for k, step in enumerate(steps) for v in step.writes}
        self._readers: dict[Value, list[int]] = {}
        for k, step in enumerate(steps):
            for value in dict.fromkeys((*step.reads, *step.shaped_by)):
                self._readers.setdefault(value, []).append(k)
        self._matrices = {k: self._biased(found) for k in range(len(steps)) if (found := self._matrix(k)) is not None}
        self._in_place_of: dict[int, list[Step]] = {}  # empty: nothing is left to do there
        self._plans: dict[int, _Plan] = {}
        self._norms: dict[Value, Norm] = {}
        self._lengths: dict[tuple[Value, int], Value] = {}
        self._workspaces: dict[Any, Workspace] = {}

    def run(self) -> list[Step]:
        self._find_norms()
        taken = set(self._find_gates())
        taken |= set(self._find_sums(taken))
        self._find_neighbours(taken)
        self._in_place_of |= {k: [self._planned(k, plan)] for k, plan in self._plans.items()}
        for k, step in enumerate(self._steps):
            if isinstance(step, NodeStep) and step.node.op == "GroupQueryAttention" and step.node.domain == CONTRIB:
                self._attention(k, step.node)
        if self._in_place_of:
            self._find_tables()
        return [new for k, step in enumerate(self._steps) for new in self._in_place_of.get(k, [step])]

    def let_go(self) -> list[Value]:
        """Codes that are on the shelf and that nothing reads any more; nodes that did find them there from now on."""
        found: list[Value] = []
        for k, matrix in self._matrices.items():
            step, codes = self._steps[k], matrix.node.inputs[1]
            if matrix.node.op != "MatMulNBits" or codes is None or not isinstance(step, NodeStep):
                continue
            if 1 not in step.prepared and self._readers.get(codes) == [k] and codes not in self._outputs:
                step.prepared[1] = Borrowed(self._shelf, matrix.node)
                step.reads = tuple(v for v in step.reads if v is not codes)
                found.append(codes)
        return found

    # -- what is what -------------------------------------------------------------------------------------------------

    def _node(self, k: int | None, *ops: str) -> Node | None:
        step = self._steps[k] if k is not None else None
        return step.node if isinstance(step, NodeStep) and step.node.op in ops else None

    def _shape(self, value: Value | None) -> tuple[int, ...] | None:
        found = self._tensor(value)
        return None if found is None else tuple(found.shape)

    def _tensor(self, value: Value | None) -> Any:
        return None if value is None else self._env.tensors.get(value)

    def _only_reader(self, value: Value) -> int | None:
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self._outputs else None

    def _matrix(self, k: int) -> Matrix | None:
        """The product of a step, where kernels of ours can do it."""
        node = self._node(k, "MatMul", "MatMulNBits")
        if node is None or node.inputs[0] is None or node.inputs[1] is None:
            return None
        x = self._env.tensors.get(node.inputs[0])
        if x is None or x.dtype not in _FLOATS or x.ndim < 2 or not x.numel():
            return None
        if x.dtype == torch.float32 and self._env.low is not None:
            return None
        inner = int(x.shape[-1])
        tokens = x.numel() // inner
        if node.op == "MatMul":
            weight = node.inputs[1]
            if node.domain or weight.const is None or len(self._shape(weight) or ()) != 2:
                return None
            n = int(self._env.tensors[weight].shape[1])
            return Matrix(k, node, node.inputs[0], node.outputs[0], "float", n, tokens, inner)
        if node.domain != CONTRIB or node.input(4) is not None:
            return None
        fixed = [v for v in node.inputs[1:] if v is not None]
        held = fixed[:1] if self._shelf.holds(node) else []
        if any(v.const is None or (v not in self._env.tensors and v not in held) for v in fixed):
            return None
        zeros = node.input(3)
        whole = zeros is None or self._env.tensors[zeros].dtype == torch.uint8
        four = node.attrs.get("bits", 4) == 4 and node.attrs["block_size"] % CHUNK == 0 and whole
        kind, n = "int4" if four else "float", int(node.attrs["N"])
        return Matrix(k, node, node.inputs[0], node.outputs[0], kind, n, tokens, inner, node.input(5))

    def _biased(self, matrix: Matrix) -> Matrix:
        """A product with the bias that is added to it."""
        k = self._only_reader(matrix.y)
        node = self._node(k, "Add")
        if node is None or matrix.bias is not None:
            return matrix
        other = node.inputs[1] if node.inputs[0] is matrix.y else node.inputs[0]
        if other is None or other.const is None or self._shape(other) != (matrix.n,):
            return matrix
        return replace(matrix, y=node.outputs[0], bias=other, added=k)

    def _activation(self, value: Value) -> tuple[str, Value, list[int]] | None:
        """The function a value is of another one, and the steps that compute it and nothing else."""
        k = self._maker.get(value)
        node = self._node(k, "Mul", "Swish", "QuickGelu", "Gelu", "Relu")
        if node is None or k is None or node.inputs[0] is None:
            return None
        x = node.inputs[0]
        if node.op == "Mul":
            for source, gate in (node.inputs, node.inputs[::-1]):
                s = self._maker.get(gate) if gate is not None else None
                sigmoid = self._node(s, "Sigmoid")
                if sigmoid is None or s is None or source is None or sigmoid.inputs[0] is not source or gate is None:
                    continue
                alone = self._only_reader(gate) == k and self._readers[source] == sorted({s, k})
                if alone and source not in self._outputs:
                    return "silu", source, [s, k]
            return None
        if self._only_reader(x) != k:
            return None
        name = {
            "Swish": "silu" if node.attrs.get("alpha", 1.0) == 1.0 else "",
            "QuickGelu": "silu" if node.attrs.get("alpha", 1.702) == 1.0 else "",
            "Gelu": "gelu_tanh" if node.attrs.get("approximate", "none") == "tanh" else "gelu",
            "Relu": "relu",
        }[node.op]
        return (name, x, [k]) if name else None

    # -- patterns -----------------------------------------------------------------------------------------------------

    def _find_norms(self) -> None:
        """Norms all of whose readers are products of few tokens. Sums in front of them are found with the products."""
        for k in range(len(self._steps)):
            node = self._node(k, "SimplifiedLayerNormalization", "RMSNormalization")
            if node is None or node.inputs[0] is None or node.inputs[1] is None:
                continue
            rank = len(self._shape(node.inputs[0]) or ())
            if node.attrs.get("axis", -1) % max(rank, 1) != rank - 1 or node.attrs.get("stash_type", 1) != 1:
                continue
            if self._multiplied_only(node) and len(self._shape(node.inputs[1]) or ()) == 1:
                eps = float(node.attrs.get("epsilon", 1e-5))
                self._norms[node.outputs[0]] = Norm(node.inputs[0], node.inputs[1], eps)
                self._in_place_of[k] = []

    def _multiplied_only(self, node: Node) -> bool:
        y, others = node.outputs[0], node.outputs[1:3]
        if y in self._outputs or any(v in self._outputs or self._readers.get(v) for v in others):
            return False
        found = [self._matrices.get(k) for k in self._readers.get(y, [])]
        return bool(found) and all(each is not None and each.few and each.x is y for each in found)

    def _find_gates(self) -> Iterator[int]:
        for k in range(len(self._steps)):
            product = self._node(k, "Mul")
            if product is None:
                continue
            for inner, beside in (product.inputs, product.inputs[::-1]):
                if inner is not None and beside is not None and (found := self._gate(k, inner, beside)):
                    yield from found
                    break

    def _gate(self, k: int, inner: Value, beside: Value) -> list[int]:
        up = self._matrices.get(self._maker.get(beside, -1))
        activation = self._activation(inner)
        if up is None or activation is None or self._only_reader(beside) != k or self._only_reader(inner) != k:
            return []
        name, source, steps = activation
        gate = self._matrices.get(self._maker.get(source, -1))
        if gate is None or gate.x is not up.x or gate.n != up.n or not gate.alike(up) or gate.bias is not None:
            return []
        if gate.kind == "float" and choose.product("gated", gate.tokens, gate.k).kernel != choose.GEMV:
            return []
        weights = self._shelf.gated(gate.node, up.node, gate.kind, name, self._env)
        for each in (*steps, gate.at, up.at):
            self._in_place_of[each] = []
        self._plans[k] = _Plan(weights, gate.x, ((self._steps[k].writes[0], gate.n),), few=gate.few)
        return [gate.at, up.at]

    def _find_sums(self, taken: set[int]) -> Iterator[int]:
        """Products to whose result something is added: by a sum alone, or by one with a norm behind it."""
        for k, matrix in self._matrices.items():
            reader = self._only_reader(matrix.y) if k not in taken and matrix.few else None
            node = self._node(reader, "Add", "SkipSimplifiedLayerNormalization")
            if node is None or reader is None or reader in self._plans:
                continue
            x, y = node.inputs[:2]
            other = y if x is matrix.y else x
            if other is None or other is matrix.y or not self._of_one_kind(other, matrix.y):
                continue
            if node.op == "Add":
                total = node.outputs[0]
            else:
                weight = node.input(2)
                if weight is None or node.input(3) is not None or not self._multiplied_only(node):
                    continue
                total = node.outputs[3] if len(node.outputs) > 3 else self._new("total", other)
                self._norms[node.outputs[0]] = Norm(total, weight, float(node.attrs.get("epsilon", 1e-12)))
            self._plans[reader] = _Plan(self._weights([matrix]), matrix.x, ((total, matrix.n),), other)
            yield k

    def _find_neighbours(self, taken: set[int]) -> None:
        """Products that read the same, as far as one launch can do them; the library's do each by itself."""
        groups: dict[Value, list[list[Matrix]]] = {}
        for k, matrix in self._matrices.items():
            if k in taken or not (matrix.few or matrix.node.op == "MatMulNBits"):
                continue
            most = len(self._steps) if matrix.kind == "int4" else _SIDE_BY_SIDE if matrix.few else 1
            mine = groups.setdefault(matrix.x, [])
            last = mine[-1] if mine else []
            joins = matrix.y not in self._outputs and last and last[0].y not in self._outputs
            if joins and len(last) < most and last[0].alike(matrix):
                last.append(matrix)
            else:
                mine.append([matrix])
        for group in (group for mine in groups.values() for group in mine):
            results = tuple((each.y, each.n) for each in group)
            self._plans[group[0].at] = _Plan(self._weights(group), group[0].x, results, few=group[0].few)

    def _weights(self, matrices: Sequence[Matrix]) -> Floats | Codes:
        """Of products whose steps have nothing left to do."""
        self._in_place_of |= {k: [] for each in matrices for k in each.steps}
        biases = [each.bias for each in matrices if each.bias is not None]
        return self._shelf.side_by_side([each.node for each in matrices], biases, matrices[0].kind, self._env)

    def _planned(self, k: int, plan: _Plan) -> Step:
        """Built when all norms are known."""
        if not plan.few:
            assert not isinstance(plan.weights, GatedFloats)
            return CodesStep(self._steps[k].label, plan.weights, plan.x, plan.outputs)
        x, label = self._norms.get(plan.x, plan.x), self._steps[k].label
        return ProductStep(label, plan.weights, x, plan.outputs, residual=plan.residual, pdl=self._pdl)

    def _of_one_kind(self, a: Value, b: Value) -> bool:
        x, y = self._env.tensors.get(a), self._env.tensors.get(b)
        return x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype

    def _new(self, name: str, like: Value) -> Value:
        """A value that the graph has not, known like others to whoever comes after."""
        made = Value(name, like.type)
        self._env.tensors[made] = torch.empty_like(self._env.tensors[like])
        return made

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(self, k: int, node: Node) -> None:
        heads = self._heads(node)
        if heads is None:
            return
        batch, length, _ = self._shape(node.inputs[0]) or (0, 0, 0)
        rows = (self._shape(node.input(3)) or ())[2]
        angles = min(self._env.tensors[heads.operand(n)].shape[0] for n in (7, 8))
        if length == 1:
            last = heads.operand(5)
            lengths = self._lengths.get((last, min(rows, angles)))
            before: list[Step] = []
            if lengths is None:
                lengths = Value("lengths", TensorType(DType.int32, (batch,)))
                self._env.tensors[lengths] = torch.ones(batch, dtype=torch.int32, device=self._env.device)
                self._lengths[last, min(rows, angles)] = lengths
                before = [LengthsStep(last, min(rows, angles), lengths)]
            splits = choose.decode_splits(batch, heads.kv_heads, rows, self._processors)
            shape = (batch, heads.heads, heads.kv_heads, heads.dim, splits)
            if shape not in self._workspaces:
                self._workspaces[shape] = Workspace.empty(*shape, self._env.device)
            step = DecodeStep(heads, lengths, splits, self._workspaces[shape], pdl=self._pdl)
            self._in_place_of[k] = [*before, step]
        elif batch == 1 and self._is_prompt(node, length) and length <= min(rows, angles) and heads.plain:
            positions = torch.arange(length, dtype=torch.int32, device=self._env.device)
            self._in_place_of[k] = [PromptStep(heads, positions)]

    def _is_prompt(self, node: Node, length: int) -> bool:
        total = self._env.host.get(node.inputs[6])  # type: ignore[arg-type]
        return total is not None and int(total.reshape(-1)[0]) == length

    def _heads(self, node: Node) -> Heads | None:
        attrs = node.attrs
        plain = attrs.get("do_rotary", 0) == 1 and attrs.get("causal", 1) == 1 and attrs.get("smooth_softmax", -1) != 1
        if not plain or any(v is not None for v in node.inputs[9:]) or len(node.inputs) < 9:
            return None
        if any(v in self._outputs or self._readers.get(v) for v in node.outputs[3:]):
            return None
        q, past, values, present = map(self._tensor, (node.inputs[0], *node.inputs[3:5], node.outputs[1]))
        if past is None or values is None or q is None or present is None or q.ndim != 3 or past.shape != values.shape:
            return None
        if (past.dtype, values.dtype) != (q.dtype, q.dtype) or present.shape != past.shape or q.dtype not in _FLOATS:
            return None
        if (node.inputs[1] is None) != (node.inputs[2] is None):
            return None
        dim = int(past.shape[3])
        angles = [self._env.tensors[v] for v in node.inputs[7:9] if v is not None]
        if len(angles) < 2 or any(a.ndim != 2 or not a.is_contiguous() or 2 * a.shape[1] > dim for a in angles):
            return None
        window = attrs.get("local_window_size", -1)
        return Heads(
            node,
            heads=attrs["num_heads"],
            kv_heads=attrs["kv_num_heads"],
            dim=dim,
            scale=attrs.get("scale", 0.0) or default_scale(dim),
            interleaved=bool(attrs.get("rotary_interleaved", 0)),
            softcap=attrs.get("softcap", 0.0) or None,
            window=window if window >= 0 else None,
            alone=all(len(self._readers.get(v, ())) == 1 for v in node.inputs[3:5] if v is not None),
        )

    def _find_tables(self) -> None:
        """Embeddings of few tokens."""
        for k in range(len(self._steps)):
            node = self._node(k, "Gather")
            if node is None or node.inputs[0] is None or node.attrs.get("axis", 0) not in (0, -2):
                continue
            table, chosen = map(self._tensor, node.inputs)
            if table is None or chosen is None or table.ndim != 2 or not 0 < chosen.numel() <= _FEW:
                continue
            if table.dtype in _FLOATS and table.stride(1) == 1 and table.numel() and chosen.dtype in _WHOLE:
                self._in_place_of[k] = [LookUpStep(node)]


_WHOLE = (torch.int32, torch.int64)
