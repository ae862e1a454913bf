"""Products of one tensor with several constant matrices as one product: queries, keys and values, gates and what they
gate. The results are slices of its result, which whoever reads them takes as they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ranvier.codegen.definitions.exprs import HALVES, add
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.realiser import slice_of
from ranvier.codegen.storage import View
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.providers.cuda.constants import shared
from ranvier.providers.cuda.library import torch
from ranvier.providers.cuda.patterns import Steps
from ranvier.providers.cuda.place import Place
from ranvier.providers.cuda.steps import Env, NodeStep
from ranvier.records import dataclass

_ALIGNED = 8  # halves in 16 bytes
_LARGE = 1024  # elements of a row, for the copy to be worth it


@dataclass(frozen=True)
class Member:
    """One product: ``out`` is what is left of it, and ``inside`` what nobody else sees. ``reshaped``: its rows were
    counted through, as exporters write layers that only know matrices, and are not any more."""

    weight: Value
    turned: bool
    bias: Value | None
    out: Value
    inside: tuple[Value, ...]
    reshaped: bool = False


class Shelf:
    """Matrices side by side, kept for all sizes of a part."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._kept: dict[tuple[tuple[Value, bool], ...], tuple[Value, Any]] = {}

    def joined(self, parts: Sequence[tuple[Value, bool]], env: Env) -> tuple[Value, Any]:
        key = tuple(parts)
        if key not in self._kept:
            form = ("side by side", *(turned for _, turned in parts))
            tensor = shared(self._place, [v for v, _ in parts], form, lambda: _beside(parts, env))
            kind = parts[0][0].type
            assert isinstance(kind, TensorType)
            self._kept[key] = Value(f"{parts[0][0].name} …", TensorType(kind.dtype, tuple(tensor.shape))), tensor
        return self._kept[key]


def _beside(parts: Sequence[tuple[Value, bool]], env: Env) -> Any:
    tensors = [env.tensors[v].mT if turned else env.tensors[v] for v, turned in parts]
    tensor = torch.cat(tensors, dim=-1).contiguous()
    if tensor.ndim == 2 and tensor.shape[1] % _ALIGNED:  # rows that begin anywhere are read element by element
        tensor = tensor.mT.contiguous().mT
    return tensor


class MergedStep:
    """Several products as one, or one with the shape that its readers see."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(self, x: Value, members: Sequence[Member], shelf: Shelf, env: Env) -> None:
        self._x = x
        self._weight, weights = shelf.joined([(m.weight, m.turned) for m in members], env)
        self.held: Mapping[Value, Any] = {self._weight: weights}
        self._bias: Value | None = None
        if members[0].bias is not None:
            self._bias, biases = shelf.joined([(m.bias, False) for m in members if m.bias is not None], env)
            self.held = {**self.held, self._bias: biases}
        self._lead = tuple(env.tensors[members[0].out].shape[:-1])
        self._sizes = [int(env.tensors[m.out].shape[-1]) for m in members]
        self.label = " | ".join(m.out.name for m in members)
        self.reads: tuple[Value, ...] = (x,)
        self.writes = tuple(m.out for m in members)

    def run(self, env: Env) -> None:
        y = torch.matmul(env.tensors[self._x].reshape(*self._lead, -1), self.held[self._weight])
        if self._bias is not None:
            y = y + self.held[self._bias]
        env.tensors.update(zip(self.writes, y.split(self._sizes, dim=-1)))

    def define(self, program: Definitions) -> None:
        shape = (*self._lead, sum(self._sizes))
        x, wide = self._x, (*self._lead, program.shape(self._weight)[0])
        if program.shape(x) != wide:
            x = program.reshape(x, wide)
        one = self.writes[0] if len(self.writes) == 1 else None  # no view between it and what reads it
        whole = program.products.matmul(program, x, self._weight, shape, one if self._bias is None else None)
        if self._bias is not None:
            kind = program.dtype(whole)
            whole = program.pointwise([whole, self._bias], lambda e: add(*e), kind, shape=shape, out=one)
        if one is not None:
            return
        start = 0
        for value, size in zip(self.writes, self._sizes):
            program.alias(whole, _Slice(start, size), (*shape[:-1], size), out=value)
            start += size


@dataclass(frozen=True)
class _Slice:
    start: int
    size: int

    def __call__(self, view: View) -> View:
        return slice_of(view, view.rank - 1, self.start, self.size)


def merge(steps: Steps, shelf: Shelf) -> None:
    """Put one step in the place of products of the same tensor."""
    found: dict[tuple[Value, bool, tuple[int, ...]], list[Member]] = {}
    for step in steps.steps:
        if isinstance(step, NodeStep) and not step.node.domain:
            member = _member(steps, step.node)
            x = step.node.input(0)
            if member is not None and x is not None:
                lead = tuple(steps.tensor(member.out).shape[:-1])
                found.setdefault((x, member.bias is not None, lead), []).append(member)
    for (x, _, _), members in found.items():
        if len(members) > 1 or members[0].reshaped or _is_odd(steps, members[0]):
            made = MergedStep(x, members, shelf, steps.env)
            places = [steps.place(v) for m in members for v in (m.out, *m.inside)]
            steps.put(made, min(places), [v for m in members for v in (m.out, *m.inside)])


def _member(steps: Steps, node: Node) -> Member | None:
    if node.op == "MatMul":
        weight, bias, turned = node.input(1), None, False
    elif node.op == "Gemm" and not node.attrs.get("transA") and _plain(node):
        weight, bias, turned = node.input(1), node.input(2), bool(node.attrs.get("transB"))
    else:
        return None
    x = node.input(0)
    if x is None or weight is None or not _is_matrix(steps, weight):
        return None
    out = node.output
    size = steps.tensor(out).shape[-1]
    if node.op == "MatMul":
        added = steps.only_user(out, "Add")
        other = None if added is None else next((v for v in added.inputs if v is not out), None)
        if added is not None and other is not None and _is_row(steps, other, size):
            return Member(weight, turned, other, added.output, (out,))
    if bias is not None and not _is_row(steps, bias, size):
        return None
    seen = steps.only_user(out, "Reshape")
    if seen is not None and steps.tensor(seen.output).ndim > 2 and steps.tensor(seen.output).shape[-1] == size:
        return Member(weight, turned, bias, seen.output, (out,), reshaped=True)
    return Member(weight, turned, bias, out, ())


def _is_odd(steps: Steps, member: Member) -> bool:
    """Whether the matrix had better lie the other way round."""
    rows, columns = steps.tensor(member.weight).stride()
    return bool((rows if columns == 1 else columns) % _ALIGNED != 0 and rows * columns >= _LARGE)


def _plain(node: Node) -> bool:
    return float(node.attrs.get("alpha", 1.0)) == 1.0 and float(node.attrs.get("beta", 1.0)) == 1.0


def _is_matrix(steps: Steps, value: Value) -> bool:
    tensor = steps.tensor(value)
    kind = value.type.dtype if isinstance(value.type, TensorType) else None
    return value.const is not None and tensor is not None and tensor.ndim == 2 and kind in HALVES


def _is_row(steps: Steps, value: Value, size: int) -> bool:
    tensor = steps.tensor(value)
    return value.const is not None and tensor is not None and tuple(tensor.shape) == (size,)


class PassedStep:
    """A tensor by another name."""

    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(self, label: str, source: Value, out: Value) -> None:
        self.label = label
        self.held: Mapping[Value, Any] = {}
        self.reads: tuple[Value, ...] = (source,)
        self.writes: tuple[Value, ...] = (out,)

    def run(self, env: Env) -> None:
        env.tensors[self.writes[0]] = env.tensors[self.reads[0]]

    def define(self, program: Definitions) -> None:
        program.identity(self.reads[0], self.writes[0])


def pass_on(steps: Steps) -> None:
    """What is joined with nothing (a cache at its beginning) is what it was."""
    for k, step in enumerate(steps.steps):
        if isinstance(step, NodeStep) and step.node.op == "Concat" and not step.node.domain:
            operands = [v for v in step.node.inputs if v is not None]
            filled = [v for v in operands if v in steps.env.tensors and steps.tensor(v).numel()]
            if len(filled) == 1 and all(v in steps.env.tensors for v in operands) and len(operands) > 1:
                steps.steps[k] = PassedStep(step.label, filled[0], step.node.output)


__all__ = ["MergedStep", "PassedStep", "Shelf", "merge", "pass_on"]
