"""What bench_gpu_kernels measures: kernels at the sizes of a Llama-shaped model of 1.2 billion weights.

Every case has its two numbers, bytes and operations; tensors in as many copies as it takes to leave the caches; a way
to launch it on one copy; its error against float64; and what torch offers for the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ranvier.providers.cuda.kernels import fp8, int4, ternary, w4a16, w8a8
from ranvier.providers.cuda.kernels.codes import Codes, quantize
from ranvier.providers.cuda.kernels.decode_attention import NewToken, Workspace, decode_attention
from ranvier.providers.cuda.kernels.gemv import gated_gemv, gemv
from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile
from ranvier.providers.cuda.kernels.norms import norm
from ranvier.providers.cuda.kernels.rope_append import rope_append
from ranvier.providers.cuda.kernels.swiglu import swiglu

BF16, F32, INT8, E4M3 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
OUT_OF_CACHE = 256 << 20  # bytes of all copies together
EPS = 1e-5


@dataclass
class Case:
    name: str
    nbytes: float
    flops: float
    candidates: list[Any]
    launch: Callable[[Any, int], object]  # a candidate on a copy
    error: Callable[[Any], float]  # of the largest magnitude
    tolerance: float
    copies: int
    peers: dict[str, Callable[[int], object]] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()  # peers that are also worth compiling


@dataclass(frozen=True)
class Sizes:
    width: int = 2048
    inner: int = 8192
    qkv: int = 3072
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    dim: int = 64
    context: int = 2048
    tokens: int = 1024
    batch: int = 16


TINY = Sizes(128, 256, 192, 320, 8, 2, 16, 96, 20, 2)


def copies_for(nbytes: float, tiny: bool) -> int:
    return 1 if tiny else max(1, min(48, math.ceil(OUT_OF_CACHE / nbytes)))


def largest_off(found: torch.Tensor, exact: torch.Tensor) -> float:
    if not torch.isfinite(found.float()).all():
        return math.inf
    return float((found.double() - exact).abs().max() / exact.abs().max())


def floats(*shape: int, device: str, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=device, dtype=F32) * scale).to(dtype)


def poisoned(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), gain, EPS)


def tiles(tiny: bool, *found: tuple[int, ...]) -> list[Any]:
    return [Tile(16, 256, 1)] if tiny else [Tile(*one) for one in found]


def matrix_tiles(tiny: bool, *found: tuple[int, int, int, int, int]) -> list[Any]:
    return [MatrixTile(32, 32, 128, 1, 1)] if tiny else [MatrixTile(*one) for one in found]


FEW = ((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (4, 2048, 8), (2, 1024, 4), (2, 1024, 4, 2), (2, 512, 2, 2),
       (4, 1024, 4), (4, 512, 2), (8, 512, 2))  # fmt: skip


def float_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    shapes = {
        "qkv, norm": (1, s.qkv, s.width, True, False),
        "o, residual": (1, s.width, s.width, False, True),
        "down, residual": (1, s.width, s.inner, False, True),
        "head, norm": (1, s.vocabulary, s.width, True, False),
        "down, 4 tokens": (4, s.width, s.inner, False, False),
    }
    for name, (m, n, k, normed, added) in shapes.items():
        count = copies_for(2 * n * k, tiny)
        w = [floats(n, k, device=device, scale=k**-0.5) for _ in range(count)]
        x, g, r = floats(m, k, device=device), floats(k, device=device), floats(m, n, device=device)
        out = poisoned(m, n, device=device)

        def launch(
            tile: Any,
            i: int,
            w: Any = w,
            x: Any = x,
            g: Any = g,
            r: Any = r,
            out: Any = out,
            how: Any = (normed, added),
        ) -> torch.Tensor:
            return gemv(x, (w[i],), out, norm=g if how[0] else None, residual=r if how[1] else None, tile=tile)

        def plain(
            i: int, w: Any = w, x: Any = x, g: Any = g, r: Any = r, how: Any = (normed, added), to: Any = None
        ) -> torch.Tensor:
            x, g, r, one = (t if to is None else t.to(to) for t in (x, g, r, w[i]))
            y = functional.linear(rms(x, g) if how[0] else x, one)
            return y + r if how[1] else y

        def error(tile: Any, launch: Any = launch, plain: Any = plain, out: Any = out) -> float:
            out.fill_(float("nan"))
            return largest_off(launch(tile, 0), plain(0, to=torch.float64))

        yield Case(
            f"gemv bf16 {m}x{n}x{k} ({name})", 2 * n * k, 2 * m * n * k, tiles(tiny, *FEW), launch, error, 1e-2, count,
            {"torch": plain}, ("torch",) if normed else (),
        )  # fmt: skip


def gated_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    n, k = s.inner, s.width
    count = copies_for(4 * n * k, tiny)
    gate, up = ([floats(n, k, device=device, scale=k**-0.5) for _ in range(count)] for _ in range(2))
    x, g, out = floats(1, k, device=device), floats(k, device=device), poisoned(1, n, device=device)

    def launch(tile: Any, i: int) -> torch.Tensor:
        return gated_gemv(x, gate[i], up[i], out, norm=g, tile=tile)

    def plain(i: int, to: Any = BF16) -> torch.Tensor:
        y = rms(x.to(to), g.to(to))
        return functional.silu(functional.linear(y, gate[i].to(to))) * functional.linear(y, up[i].to(to))

    def error(tile: Any) -> float:
        out.fill_(float("nan"))
        return largest_off(launch(tile, 0), plain(0, torch.float64))

    yield Case(
        f"gated gemv bf16 2x{n}x{k}, norm", 4 * n * k, 4 * n * k, tiles(tiny, *FEW), launch, error, 1e-2, count,
        {"torch": plain}, ("torch",),
    )  # fmt: skip


def four_bits(n: int, k: int, device: str, group: int = 128) -> int4.Int4:
    group = min(group, k)
    codes = torch.randint(0, 256, (n, k // group, group // 2), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5) * (k**-0.5 / 4)
    return int4.pack(codes, scales.to(BF16), k, group)


def int4_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    few = ((4, 1024, 1), (8, 1024, 1), (4, 2048, 2), (8, 2048, 2), (4, 4096, 4), (8, 4096, 4), (2, 8192, 8),
           (4, 8192, 8))  # fmt: skip
    narrow = ((16, 16, 512, 2, 2), (32, 16, 512, 4, 2), (64, 16, 256, 4, 2), (64, 16, 512, 4, 2), (128, 16, 256, 4, 2))
    wide_tiles = ((32, 64, 256, 4, 2), (64, 64, 256, 4, 2), (128, 64, 256, 8, 2), (64, 64, 256, 4, 3))
    for m, n, k in ((1, 2 * s.inner, s.width), (1, s.width, s.inner), (2, s.width, s.inner), (4, s.width, s.inner),
                    (16, s.width, s.inner), (64, 2 * s.inner, s.width)):  # fmt: skip
        weights = [four_bits(n, k, device)]
        count = copies_for(weights[0].nbytes, tiny)
        weights += [four_bits(n, k, device) for _ in range(count - 1)]
        wide = [torch.empty(n, k, dtype=BF16, device=device) for _ in range(max(1, count // 4))]
        for one in wide:
            w4a16.unpack(weights[0], one)
        x, out = floats(m, k, device=device), poisoned(m, n, device=device)
        product: Callable[..., torch.Tensor] = w4a16.gemv if m <= 4 else w4a16.gemm

        def launch(tile: Any, i: int, w: Any = weights, x: Any = x, out: Any = out, run: Any = product) -> torch.Tensor:
            return run(x, w[i], out, tile=tile)  # type: ignore[no-any-return]

        def error(tile: Any, launch: Any = launch, w: Any = weights, x: Any = x, out: Any = out) -> float:
            out.fill_(float("nan"))
            exact = w4a16.unpack(w[0], torch.empty(w[0].n, w[0].k, dtype=F32, device=x.device)).double()
            return largest_off(launch(tile, 0), x.double() @ exact.T)

        def library(i: int, x: Any = x, wide: Any = wide) -> torch.Tensor:
            return functional.linear(x, wide[i % len(wide)])

        yield Case(
            f"w4a16 {m}x{n}x{k}", weights[0].nbytes, 2 * m * n * k,
            tiles(tiny, *few) if m <= 4 else matrix_tiles(tiny, *(narrow if m <= 16 else wide_tiles)), launch, error,
            1e-2, count, {"torch, weights in bf16": library},
        )  # fmt: skip


def int8_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    many = ((128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (64, 128, 128, 4, 4), (128, 128, 64, 8, 4))
    for m, n, k in ((1, s.width, s.inner), (s.tokens, s.inner, s.width)):
        count = copies_for(n * k, tiny)
        w = [torch.randint(-127, 128, (n, k), dtype=INT8, device=device) for _ in range(count)]
        x = torch.randint(-127, 128, (m, k), dtype=INT8, device=device)
        x_scale, w_scale = torch.rand(m, device=device) * 0.01, torch.rand(n, device=device) * 0.01
        out = poisoned(m, n, device=device)
        product: Callable[..., torch.Tensor] = w8a8.gemv if m == 1 else w8a8.gemm
        scales = (x_scale, w_scale)

        def launch(
            tile: Any, i: int, w: Any = w, x: Any = x, s: Any = scales, out: Any = out, run: Any = product
        ) -> torch.Tensor:
            return run(x, s[0], w[i], s[1], out, tile=tile)  # type: ignore[no-any-return]

        def error(tile: Any, launch: Any = launch, w: Any = w, x: Any = x, s: Any = scales, out: Any = out) -> float:
            out.fill_(float("nan"))
            exact = (x.double() @ w[0].double().T) * s[0].double()[:, None] * s[1].double()
            return largest_off(launch(tile, 0), exact)

        def library(i: int, w: Any = w, x: Any = x, s: Any = scales) -> torch.Tensor:
            return (torch._int_mm(x, w[i].T) * (s[0][:, None] * s[1])).to(BF16)

        yield Case(
            f"w8a8 {m}x{n}x{k}", n * k + m * k + 2 * m * n, 2 * m * n * k / 2,
            tiles(tiny, *FEW, (4, 4096, 8)) if m == 1 else matrix_tiles(tiny, *many), launch, error, 1e-2, count,
            {"torch._int_mm": library} if m > 16 else {}, ("torch._int_mm",) if m > 16 else (),
        )  # fmt: skip


def fp8_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    many = ((128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (64, 128, 128, 4, 4), (128, 128, 64, 8, 4))
    few = ((1, 2048, 4), (2, 1024, 2), (1, 8192, 16), (2, 8192, 16), (1, 8192, 8), (1, 4096, 8))
    one, all_of_them = (1, s.width, s.inner), (s.tokens, s.inner, s.width)
    for (m, n, k), blocks in ((one, False), (one, True), (all_of_them, False), (all_of_them, True)):
        count = copies_for(n * k, tiny)
        w = [floats(n, k, device=device).to(E4M3) for _ in range(count)]
        x = floats(m, k, device=device) if m == 1 else floats(m, k, device=device).to(E4M3)
        pieces = -(-k // 128)
        w_scale = torch.rand(-(-n // 128), pieces, device=device) if blocks else torch.rand(n, device=device)
        x_scale = None
        if m > 1:
            x_scale = torch.rand(m, pieces, device=device) if blocks else torch.rand(m, device=device)
        out = poisoned(m, n, device=device)
        product: Callable[..., torch.Tensor] = fp8.gemv if m == 1 else fp8.gemm
        scales = (x_scale, w_scale)

        def launch(
            tile: Any, i: int, w: Any = w, x: Any = x, s: Any = scales, out: Any = out, run: Any = product
        ) -> torch.Tensor:
            return run(x, w[i], s[1], out, x_scale=s[0], tile=tile)  # type: ignore[no-any-return]

        def error(
            tile: Any, launch: Any = launch, w: Any = w, x: Any = x, s: Any = scales, out: Any = out, b: bool = blocks
        ) -> float:
            out.fill_(float("nan"))
            n, k = w[0].shape
            along = torch.arange(k, device=x.device) // 128
            rows = torch.arange(n, device=x.device) // 128
            by_row = s[1].double()[rows][:, along] if b else s[1].double()[:, None]
            by_token = 1.0 if s[0] is None else (s[0].double()[:, along] if b else s[0].double()[:, None])
            return largest_off(launch(tile, 0), (x.double() * by_token) @ (w[0].double() * by_row).T)

        def library(i: int, w: Any = w, x: Any = x, s: Any = scales) -> torch.Tensor:
            return torch._scaled_mm(x, w[i].T, s[0][:, None], s[1][None], out_dtype=BF16)  # type: ignore[no-any-return]

        yield Case(
            f"fp8 {m}x{n}x{k}, scales of {'blocks' if blocks else 'rows'}", n * k + m * k + 2 * m * n,
            2 * m * n * k / 2, tiles(tiny, *few) if m == 1 else matrix_tiles(tiny, *many), launch, error, 1e-2, count,
            {} if m == 1 or blocks else {"torch._scaled_mm": library},
        )  # fmt: skip


def ternary_products(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    few = ((2, 2048, 1), (4, 2048, 1), (8, 2048, 1), (2, 4096, 2), (2, 8192, 4), (4, 8192, 4), (8, 8192, 4))
    many = ((64, 64, 256, 4, 3), (128, 64, 256, 8, 3), (64, 32, 256, 4, 3), (128, 128, 256, 8, 2))
    for m, n, k in ((1, 2 * s.inner, s.width), (1, s.width, s.inner), (s.tokens // 4, s.inner, s.width)):
        count = copies_for(n * k / 4, tiny)

        def packed(n: int = n, k: int = k) -> ternary.Ternary:
            codes = torch.randint(0, 3, (n, k // 4, 4), dtype=torch.uint8, device=device)
            stored = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
            return ternary.pack(stored, torch.rand(1, device=device), k)

        weights = [packed() for _ in range(count)]
        x = quantize(floats(m, k, device=device), Codes.empty(m, k, INT8, device, inverse=True))
        out = poisoned(m, n, device=device)
        product: Callable[..., torch.Tensor] = ternary.gemv if m == 1 else ternary.gemm

        def launch(tile: Any, i: int, w: Any = weights, x: Any = x, out: Any = out, run: Any = product) -> torch.Tensor:
            return run(x.codes, x.scale, w[i], out, tile=tile)  # type: ignore[no-any-return]

        def error(tile: Any, launch: Any = launch, w: Any = weights, x: Any = x, out: Any = out) -> float:
            out.fill_(float("nan"))
            planes = w[0].words.view(torch.uint8)
            codes = torch.stack([(planes >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2).reshape(w[0].n, -1)
            exact = x.codes.double() @ (codes[:, : w[0].k].double() - 1.0).T
            return largest_off(launch(tile, 0), exact * w[0].scale.double() / x.scale.double()[:, None])

        yield Case(
            f"ternary {m}x{n}x{k}", n * k / 4 + m * k + 2 * m * n, 2 * m * n * k / 2,
            tiles(tiny, *few) if m == 1 else matrix_tiles(tiny, *many), launch, error, 1e-2, count,
        )  # fmt: skip


def attentions(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    long = s.context if tiny else 32768
    for batch, context, paged, appended in ((1, s.context, False, True), (1, s.context, False, False),
                                            (s.batch, s.context, False, False), (s.batch, s.context, True, False),
                                            (1, long, False, False)):  # fmt: skip
        nbytes = 2 * 2 * batch * context * s.kv_heads * s.dim
        count = copies_for(nbytes, tiny)
        q = floats(batch, s.heads, s.dim, device=device)
        k, v = ([floats(batch, context, s.kv_heads, s.dim, device=device) for _ in range(count)] for _ in range(2))
        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        out = poisoned(batch, s.heads, s.dim, device=device)
        page = 16
        table = torch.arange(batch * context // page, dtype=torch.int32, device=device).view(batch, -1)
        angles = torch.rand(context, s.dim // 2, device=device)
        new = (floats(batch, s.kv_heads, s.dim, device=device), floats(batch, s.kv_heads, s.dim, device=device))
        token = NewToken(*new, angles.cos(), angles.sin()) if appended else None
        spaces = {n: Workspace.empty(batch, s.heads, s.kv_heads, s.dim, n, device) for n in (1, 2, 4, 8, 16, 32, 64)}
        data = (q, k, v, lengths, out, spaces, table if paged else None, token, page)

        def launch(how: Any, i: int, data: Any = data) -> torch.Tensor:
            q, k, v, lengths, out, spaces, table, token, page = data
            splits, tokens, warps, fused = how
            keys, values = k[i], v[i]
            if table is not None:
                keys, values = (t.view(-1, page, *t.shape[2:]) for t in (keys, values))
            return decode_attention(
                q, keys, values, lengths, out, workspace=spaces[splits], splits=splits, new=token, table=table,
                tokens=tokens, warps=warps, fused=fused,
            )  # fmt: skip

        def library(i: int, data: Any = data, to: Any = BF16) -> torch.Tensor:
            q, k, v = data[0].to(to), data[1][i].to(to), data[2][i].to(to)
            found = functional.scaled_dot_product_attention(
                q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
            )
            return found[:, :, 0]

        def error(how: Any, launch: Any = launch, data: Any = data) -> float:
            out, token = data[4], data[7]
            out.fill_(float("nan"))
            found = launch(how, 0)
            q, k, v = (t.double() for t in (data[0], data[1][0], data[2][0]))
            if token is not None:  # the cache has the new key and value by now: only queries are left to turn
                c, s = token.cos[-1].double(), token.sin[-1].double()
                a, b = q.chunk(2, dim=-1)
                q = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
                a, b = token.k.double().chunk(2, dim=-1)
                k[:, -1] = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
                v[:, -1] = token.v.double()
            exact = functional.scaled_dot_product_attention(
                q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
            )
            return largest_off(found, exact[:, :, 0])

        ways: list[Any] = [(2, 32, 1, True), (2, 32, 1, False)]
        if not tiny and batch > 1:
            ways = [(8, 64, 4, True), (8, 64, 4, False), (4, 64, 4, True), (4, 128, 8, True), (16, 64, 4, True)]
        elif not tiny and context > 8192:
            ways = [(16, 128, 8, True), (32, 64, 4, True), (32, 128, 8, True), (64, 64, 4, True), (64, 128, 4, True)]
        elif not tiny:
            ways = [(16, 64, 4, True), (16, 64, 4, False), (16, 128, 8, True), (16, 128, 4, True), (32, 64, 4, True),
                    (32, 64, 4, False)]  # fmt: skip
        yield Case(
            f"attention {batch}x{s.heads}/{s.kv_heads}x{s.dim}, context {context}" + ", pages" * paged
            + ", token appended" * appended,
            nbytes, 4 * batch * context * s.heads * s.dim, ways, launch, error, 2e-2, count,
            {} if appended or paged else {"torch SDPA": library},
        )  # fmt: skip


def row_kernels(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    m, n = s.tokens, s.width
    g = floats(n, device=device)
    for kind in (None, INT8, E4M3):
        nbytes = m * n * (2 + 2 + 2 + (2 if kind is None else 1))
        count = copies_for(nbytes, tiny)
        x, r = ([floats(m, n, device=device) for _ in range(count)] for _ in range(2))
        out, total = poisoned(m, n, device=device), poisoned(m, n, device=device)
        codes = None if kind is None else Codes.empty(m, n, kind, device)
        data = (x, r, out, total, codes)

        def launch(_: Any, i: int, data: Any = data) -> None:
            x, r, out, total, codes = data
            norm(x[i], g, out=None if codes else out, codes=codes, residual=r[i], total=total)

        def plain(i: int, data: Any = data, to: Any = BF16) -> Any:
            both = data[0][i].to(to) + data[1][i].to(to)
            y = rms(both, g.to(to))
            if data[4] is None:
                return y, both
            reach = y.abs().amax(-1, keepdim=True) / data[4].largest
            codes = y / reach
            return (codes.round() if data[4].codes.dtype == INT8 else codes).to(data[4].codes.dtype), reach, both

        def error(how: Any, launch: Any = launch, data: Any = data) -> float:
            out, total, codes = data[2:]
            out.fill_(float("nan"))
            total.fill_(float("nan"))
            launch(how, 0)
            both = data[0][0].double() + data[1][0].double()
            exact = rms(both, g.double())
            found = out if codes is None else codes.codes.double() * codes.scale.double()[:, None]
            return max(largest_off(found, exact), largest_off(total, both))

        name = {None: "bf16", INT8: "int8", E4M3: "e4m3"}[kind]
        yield Case(
            f"norm {m}x{n}, residual, to {name}", nbytes, 8 * m * n, [None], launch, error,
            {None: 1e-2, INT8: 1e-2, E4M3: 5e-2}[kind], count, {"torch": plain}, ("torch",),
        )  # fmt: skip
    n = s.inner
    packed = [floats(m, 2 * n, device=device) for _ in range(copies_for(6 * m * n, tiny))]
    result = poisoned(m, n, device=device)

    def gate(_: Any, i: int) -> None:
        swiglu(packed[i], out=result)

    def plain_gate(i: int, to: Any = BF16) -> torch.Tensor:
        a, b = packed[i].to(to).chunk(2, dim=-1)
        return functional.silu(a) * b

    def gate_error(how: Any) -> float:
        result.fill_(float("nan"))
        gate(how, 0)
        return largest_off(result, plain_gate(0, torch.float64))

    yield Case(
        f"swiglu {m}x{n}", 6 * m * n, 6 * m * n, [None], gate, gate_error, 1e-2, len(packed), {"torch": plain_gate},
        ("torch",),
    )  # fmt: skip


def appends(s: Sizes, device: str, tiny: bool) -> Iterator[Case]:
    m, page = s.tokens, 16
    q, k, v = (floats(m, h, s.dim, device=device) for h in (s.heads, s.kv_heads, s.kv_heads))
    caches = [torch.zeros(1, -(-m // page) * page, s.kv_heads, s.dim, dtype=BF16, device=device) for _ in range(2)]
    angles = torch.rand(m, s.dim // 2, device=device)
    cos, sin, positions = angles.cos(), angles.sin(), torch.arange(m, device=device)
    out = poisoned(m, s.heads, s.dim, device=device)

    def launch(_: Any, i: int) -> torch.Tensor:
        return rope_append(q, k, v, positions, cos, sin, out, caches[0], caches[1], length=m)

    def turned(x: torch.Tensor, to: Any = BF16) -> torch.Tensor:
        a, b = x.to(to).chunk(2, dim=-1)
        c, s = cos.to(to)[:, None], sin.to(to)[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1)

    def plain(i: int) -> torch.Tensor:
        caches[0][0, positions], caches[1][0, positions] = turned(k), v
        return turned(q)

    def error(how: Any) -> float:
        out.fill_(float("nan"))
        caches[0].fill_(0.0)
        launch(how, 0)
        of_keys = largest_off(caches[0][0, :m], turned(k, torch.float64))
        return max(of_keys, largest_off(out, turned(q, torch.float64)), largest_off(caches[1][0, :m], v.double()))

    nbytes = 2 * 2 * m * (s.heads + 2 * s.kv_heads) * s.dim
    yield Case(
        f"rope and append {m} tokens (in the cache)", nbytes, 0, [None], launch, error, 1e-2, 1, {"torch": plain}
    )


FAMILIES = (
    float_products,
    gated_products,
    int4_products,
    int8_products,
    fp8_products,
    ternary_products,
    attentions,
    row_kernels,
    appends,
)
