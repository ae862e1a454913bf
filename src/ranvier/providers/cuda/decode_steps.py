"""Steps of a decoding run: products with what stands around them, attention over a cache, the first look at inputs.

They are made for sizes that were seen; nothing in them depends on how long the sequences are, which only the device
knows, so a captured run serves a context as it grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ranvier.graph.ir import Node, Value
from ranvier.providers.cuda.decode_weights import Codes, Floats, Weights
from ranvier.providers.cuda.kernels.decode_attention import NewToken, Workspace, decode_attention
from ranvier.providers.cuda.kernels.few_tokens import Around
from ranvier.providers.cuda.kernels.first import lengths_after, look_up
from ranvier.providers.cuda.kernels.rope_append import rope_append
from ranvier.providers.cuda.ops.attention import in_one_kernel
from ranvier.providers.cuda.steps import Env
from ranvier.providers.cuda.table import Call
from ranvier.records import dataclass


class _Step:
    shaped_by: tuple[Value, ...] = ()
    stops = ""

    def __init__(self, label: str, reads: Sequence[Value | None], writes: Sequence[Value]) -> None:
        self.label = label
        self.reads = tuple(dict.fromkeys(v for v in reads if v is not None))
        self.writes = tuple(writes)


@dataclass(frozen=True)
class Norm:
    """The RMS norm of ``source``, which a product computes by the way."""

    source: Value
    weight: Value
    eps: float


class ProductStep(_Step):
    """Few tokens: a norm before, several matrices or a gated pair, and a sum behind, in one launch."""

    def __init__(
        self,
        label: str,
        weights: Weights,
        x: Value | Norm,
        outputs: Sequence[tuple[Value, int]],
        *,
        residual: Value | None = None,
        pdl: bool = False,
    ) -> None:
        self._norm = x if isinstance(x, Norm) else None
        self._x = x.source if isinstance(x, Norm) else x
        read = [self._x, residual, self._norm.weight if self._norm else None]
        super().__init__(label, read, [value for value, _ in outputs])
        self._weights, self._outputs, self._residual, self._pdl = weights, list(outputs), residual, pdl

    def run(self, env: Env) -> None:
        given = env.tensors[self._x]
        x = rows_of(given)
        residual = None if self._residual is None else rows_of(env.tensors[self._residual])
        norm = None if self._norm is None else env.tensors[self._norm.weight].contiguous()
        around = Around(residual=residual, norm=norm, eps=self._norm.eps if self._norm else 0.0, pdl=self._pdl)
        out = self._weights.few(x, x.new_empty(x.shape[0], self._weights.n), around)
        first = 0
        for value, n in self._outputs:
            env.tensors[value] = out[:, first : first + n].view(*given.shape[:-1], n)
            first += n


class CodesStep(_Step):
    """Products with weights of few bits, of many tokens."""

    def __init__(self, label: str, weights: Floats | Codes, x: Value, outputs: Sequence[tuple[Value, int]]) -> None:
        super().__init__(label, [x], [value for value, _ in outputs])
        self._weights, self._x, self._widths = weights, x, [n for _, n in outputs]

    def run(self, env: Env) -> None:
        given = env.tensors[self._x]
        parts = self._weights.many(rows_of(given)).split(self._widths, dim=1)
        env.tensors.update((v, part.view(*given.shape[:-1], -1)) for v, part in zip(self.writes, parts))


class LookUpStep(_Step):
    """Rows of a table."""

    def __init__(self, node: Node) -> None:
        self._table, self._chosen = (v for v in node.inputs if v is not None)
        super().__init__(node.name or node.op, node.inputs, node.outputs)

    def run(self, env: Env) -> None:
        table, chosen = env.tensors[self._table], env.tensors[self._chosen].contiguous()
        out = table.new_empty(*chosen.shape, table.shape[1])
        fine = torch.empty(1, dtype=torch.uint8, device=table.device)
        env.tensors[self.writes[0]] = look_up(table, chosen, out, fine)
        env.requirements.append(fine.view(torch.bool))
        env.messages.append(f"Gather: an index is outside an axis of {table.shape[0]}")


class LengthsStep(_Step):
    """Lengths of sequences with the new token, none longer than there is room for."""

    def __init__(self, last: Value, most: int, lengths: Value) -> None:
        super().__init__("lengths", [last], [lengths])
        self._last, self._most = last, most

    def run(self, env: Env) -> None:
        last = env.tensors[self._last].contiguous()
        out = torch.empty(last.numel(), dtype=torch.int32, device=last.device)
        fine = torch.empty(1, dtype=torch.uint8, device=last.device)
        env.tensors[self.writes[0]] = lengths_after(last, self._most, out, fine)
        env.requirements.append(fine.view(torch.bool))
        env.messages.append(f"GroupQueryAttention: a sequence does not fit {self._most} rows")


@dataclass(frozen=True)
class Heads:
    """A GroupQueryAttention whose positions are turned inside and whose cache has room."""

    node: Node
    heads: int
    kv_heads: int
    dim: int
    scale: float
    interleaved: bool
    softcap: float | None
    window: int | None
    alone: bool  # nobody else reads the cache as it was

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.window is None

    def operand(self, position: int) -> Value:
        found = self.node.input(position)
        assert found is not None
        return found

    def parts(self, env: Env) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens, ``[tokens, heads, dim]`` each."""
        q = rows_of(env.tensors[self.operand(0)])
        if self.node.input(1) is None:
            widths = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
            q, k, v = q.split(widths, dim=1)
        else:
            k, v = (rows_of(env.tensors[self.operand(n)]) for n in (1, 2))
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (part.unflatten(1, (n, self.dim)) for part, n in zip((q, k, v), counts))
        return q, k, v

    def caches(self, env: Env, lengths: torch.Tensor | None) -> list[torch.Tensor]:
        """Where the new rows go: the memory of the past where the caller gives it up, else a copy of it as far as
        ``lengths`` say; without them nothing of it is needed."""
        found = []
        for position in (3, 4):
            value = self.operand(position)
            past = env.tensors[value]
            if not (value in env.overwritten and self.alone and past.stride(3) == 1):
                nothing = torch.zeros((), dtype=past.dtype, device=past.device)
                if lengths is None:
                    past = nothing.expand_as(past).contiguous()
                else:
                    inside = torch.arange(past.shape[2], device=past.device) < lengths[:, None]
                    past = torch.where(inside[:, None, :, None], past, nothing)
            found.append(past)
        return found

    def hand_on(self, env: Env, out: torch.Tensor, caches: Sequence[torch.Tensor]) -> None:
        env.tensors.update(zip(self.node.outputs, (out, *caches)))


class DecodeStep(_Step):
    """One new token for each sequence: turned, put into the cache, and attending, in one launch."""

    def __init__(self, heads: Heads, lengths: Value, splits: int, workspace: Workspace, *, pdl: bool) -> None:
        node = heads.node
        reads = [node.input(k) for k in (0, 1, 2, 3, 4, 7, 8)]
        super().__init__(node.name or node.op, [*reads, lengths], node.outputs[:3])
        self._heads, self._lengths = heads, lengths
        self._splits, self._workspace, self._pdl = splits, workspace, pdl

    def run(self, env: Env) -> None:
        how = self._heads
        q, k, v = how.parts(env)
        lengths = env.tensors[self._lengths]
        caches = how.caches(env, lengths)
        early = all(env.tensors[how.operand(n)] is cache for n, cache in zip((3, 4), caches))  # no copies
        keys, values = (cache.transpose(1, 2) for cache in caches)
        out = q.new_empty(q.shape[0], how.heads, how.dim)
        new = NewToken(k, v, env.tensors[how.operand(7)], env.tensors[how.operand(8)], how.interleaved)
        decode_attention(
            q,
            keys,
            values,
            lengths,
            out,
            workspace=self._workspace,
            splits=self._splits,
            new=new,
            scale=how.scale,
            softcap=how.softcap,
            window=how.window,
            tokens=128 if how.dim <= 64 else 64,
            fused=not self._pdl,  # launches that begin early cost less than waiting for the last split
            pdl=self._pdl,
            early=early,
        )
        how.hand_on(env, out.view(out.shape[0], 1, -1), caches)


class PromptStep(_Step):
    """The first tokens of one sequence: turned and put into the cache by one launch, attending in another."""

    def __init__(self, heads: Heads, positions: torch.Tensor) -> None:
        node = heads.node
        super().__init__(node.name or node.op, [node.input(k) for k in (0, 1, 2, 3, 4, 7, 8)], node.outputs[:3])
        self._heads, self._positions = heads, positions

    def run(self, env: Env) -> None:
        how = self._heads
        q, k, v = how.parts(env)
        caches = how.caches(env, None)
        turned = q.new_empty(q.shape)
        cos, sin = env.tensors[how.operand(7)], env.tensors[how.operand(8)]
        keys, values = (cache.transpose(1, 2) for cache in caches)
        length = q.shape[0]
        how_far = {"length": length, "interleaved": how.interleaved}
        rope_append(q, k, v, self._positions, cos, sin, turned, keys, values, **how_far)
        there = [cache[:, :, :length] for cache in caches]
        call = Call(how.node, env.device, env.low)
        out = in_one_kernel(call, turned.transpose(0, 1)[None], there[0], there[1], None, how.scale, True)
        how.hand_on(env, out.transpose(1, 2).reshape(1, length, -1), caches)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """The last axis as rows that kernels read in order."""
    found = tensor.reshape(-1, tensor.shape[-1])
    return found if found.stride(1) == 1 else found.contiguous()


def default_scale(dim: int) -> float:
    return 1 / math.sqrt(dim)
