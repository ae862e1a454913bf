"""The ways in which a product with an epilogue can be computed.

A library multiplies, and a generated pass does the rest where the library has no form with that epilogue; or a
generated kernel does both. Which is faster depends on sizes: :mod:`ranvier.providers.cuda.choosing` finds out.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.codegen.definitions.products import Window
from ranvier.codegen.loops.ir import Const, Epilogue, Expr, Load, Map, Nest, Op, Operand, Result
from ranvier.codegen.loops.normalize import Rewriter
from ranvier.codegen.storage import Storage, View
from ranvier.codegen.triton.conv import Sliding, conv_tiles, convolution
from ranvier.codegen.triton.gemm import Tile, likely_tiles, product
from ranvier.codegen.triton.library import Printed, kernel
from ranvier.providers.cuda.activations import biased_gelu
from ranvier.providers.cuda.library import functional, torch
from ranvier.records import dataclass

TensorOf = Callable[[View], Any]  # a view as torch has it
LIBRARY = "library"
_TILES = 3  # of a generated kernel that are tried
_FEWEST_CHANNELS = 16  # for fewer, most of a step of the generated convolution would be padding


@dataclass(frozen=True)
class Form:
    """``library`` makes a product, or all there is to make; ``printed`` are kernels after it, or instead of it.
    ``temporaries`` must have memory when the form is run. What the library returns is the tensor ``gives``; where that
    is None it has written its results itself."""

    name: str
    library: Callable[[TensorOf], Any] | None
    printed: Printed | None
    temporaries: tuple[Storage, ...] = ()
    gives: View | None = None


@dataclass(frozen=True)
class Ending:
    """An epilogue that libraries have: a row added, perhaps a tensor of the result's size, perhaps no negatives."""

    bias: Operand | None
    added: Operand | None
    positive: bool


def ending(epilogue: Epilogue | None, out: View) -> Ending | None:
    """What a library would have to do after the product; None where none does that."""
    if epilogue is None:
        return Ending(None, None, False)
    value = _bare(epilogue.value)
    positive = isinstance(value, Op) and value.name == "max" and _is_zero(value.args[1])
    if positive:
        assert isinstance(value, Op)
        value = _bare(value.args[0])
    bias = added = None
    terms: list[Expr] = [value]
    sums = 0
    while terms:
        each = _bare(terms.pop())
        if isinstance(each, Op) and each.name == "add":
            terms += each.args
            continue
        if isinstance(each, Result):
            sums += 1
            continue
        if not isinstance(each, Load):
            return None
        operand = epilogue.operands[each.operand]
        if operand.dtype is not out.dtype or operand.at is not None or operand.guard is not None or operand.offset:
            return None
        if bias is None and operand.strides == (0, 0, 1) and operand.view.size == out.shape[2]:
            bias = operand
        elif added is None and operand.strides == out.strides and operand.view.size == out.size:
            added = operand
        else:
            return None
    return Ending(bias, added, positive) if sums == 1 else None


def _bare(e: Expr) -> Expr:
    while isinstance(e, Op) and e.name == "cast" and e.dtype.is_float:
        e = e.args[0]
    return e


def _is_zero(e: Expr) -> bool:
    e = _bare(e)
    return isinstance(e, Const) and e.value == 0


def _after(made: View, out: View, epilogue: Epilogue) -> Printed:
    """The epilogue as a pass over a product in memory."""

    def leaf(e: Expr) -> Expr:
        if isinstance(e, Load):
            return Load(e.operand + 1, e.dtype)
        if isinstance(e, Result):
            load: Expr = Load(0, made.dtype)
            return load if e.dtype is made.dtype else Op("cast", (load,), e.dtype)
        return e

    moved = Rewriter(leaf)
    operands = (
        Operand(made, made.strides),
        *(moved.operand(each) for each in epilogue.operands),
        Operand(out, out.strides),
    )
    return kernel(Nest(out.shape, operands, (Map(((len(operands) - 1, moved(epilogue.value)),)),), label="epilogue"))


def _matrix(view: View) -> View:
    return View(view.storage, view.dtype, view.shape[1:], view.strides[1:], view.offset)


def _vector(operand: Operand) -> View:
    view = operand.view
    return View(view.storage, view.dtype, (view.size,), (1,), view.offset)


def _named(tile: Tile) -> str:
    return "tile " + ",".join(map(str, (tile.rows, tile.columns, tile.depth, tile.warps, tile.stages, tile.parts)))


class _Work:
    """A product, its operands and its result."""

    out: View  # [1, rows, columns]
    epilogue: Epilogue | None

    def structure(self) -> str:
        """What the best form depends on."""
        raise NotImplementedError

    def reads(self) -> list[Storage]:
        raise NotImplementedError

    def sizes(self) -> str:
        """For people."""
        return "x".join(map(str, self.out.shape[1:]))

    def candidates(self) -> dict[str, Callable[[], Form]]:
        """The forms by name, made when they are asked for; the first is what a library does best."""
        raise NotImplementedError

    def _digest(self, *parts: Any) -> str:
        epilogue = self.epilogue
        after = () if epilogue is None else (epilogue.value, [(o.dtype, o.strides) for o in epilogue.operands])
        text = repr((self.out.dtype, self.out.shape, self.out.strides, after, parts))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _epilogue_reads(self) -> list[Storage]:
        return [o.view.storage for o in self.epilogue.operands] if self.epilogue is not None else []


@dataclass(frozen=True, eq=False)
class Multiplied(_Work):
    """``left`` [1, rows, K] by ``right`` [1, K, columns]."""

    left: View
    right: View
    out: View
    epilogue: Epilogue | None = None

    def structure(self) -> str:
        return f"product {self._digest(self.left.strides, self.right.shape, self.right.strides)}"

    def reads(self) -> list[Storage]:
        return [self.left.storage, self.right.storage, *self._epilogue_reads()]

    def candidates(self) -> dict[str, Callable[[], Form]]:
        _, rows, columns = self.out.shape
        tiles = likely_tiles(1, rows, columns, self.left.shape[2], self.left.dtype.numpy.itemsize, _TILES)
        found: dict[str, Callable[[], Form]] = {LIBRARY: self._library}
        known, gelu = ending(self.epilogue, self.out), biased_gelu(self.epilogue, self.out)
        if gelu is not None:
            found["fused"] = functools.partial(self._activated, gelu, True)
        elif known is not None and known.bias is not None and known.added is None and known.positive:
            found["fused"] = functools.partial(self._activated, known.bias, False)
        return found | {_named(t): functools.partial(self._own, t) for t in tiles}

    def _activated(self, bias: Operand, gelu: bool) -> Form:
        """The library's own form with GELU, or without negatives."""
        row, left, right, out = _vector(bias), _matrix(self.left), _matrix(self.right), _matrix(self.out)

        def run(tensor: TensorOf) -> None:
            given = tensor(row), tensor(left), tensor(right)
            if given[1].is_cuda:
                torch._addmm_activation(*given, use_gelu=gelu, out=tensor(out))
            else:  # whose GELU is another one
                made = torch.addmm(*given)
                tensor(out).copy_(functional.gelu(made, approximate="tanh") if gelu else torch.relu(made))

        return Form("fused", run, None)

    def _own(self, tile: Tile) -> Form:
        made = product(self.left, self.right, self.out, self.epilogue, tile=tile)
        return Form(_named(tile), None, made, made.temporaries)

    def _library(self) -> Form:
        known = ending(self.epilogue, self.out)
        left, right, out = _matrix(self.left), _matrix(self.right), _matrix(self.out)
        if known is not None and known.added is None and not known.positive:
            bias = None if known.bias is None else _vector(known.bias)

            def whole(tensor: TensorOf) -> None:
                if bias is None:
                    torch.mm(tensor(left), tensor(right), out=tensor(out))
                else:
                    torch.addmm(tensor(bias), tensor(left), tensor(right), out=tensor(out))

            return Form(LIBRARY, whole, None)
        assert self.epilogue is not None
        made = View.temporary(self.left.dtype, self.out.shape)
        into, rest = _matrix(made), _after(made, self.out, self.epilogue)

        def multiply(tensor: TensorOf) -> None:
            torch.mm(tensor(left), tensor(right), out=tensor(into))

        return Form(LIBRARY, multiply, rest, (made.storage, *rest.temporaries))


@dataclass(frozen=True, eq=False)
class Convolved(_Work):
    """``image`` [N, C, H, W] by ``filters``; ``target`` is the result and ``out`` the same as [1, pixels, channels]."""

    image: View
    filters: View
    target: View
    out: View
    window: Window
    epilogue: Epilogue | None = None

    def structure(self) -> str:
        how = (self.window.strides, self.window.dilations, self.window.pads, self.window.group)
        image, filters = self.image, self.filters
        return f"convolution {self._digest(image.shape, image.strides, filters.shape, filters.strides, how)}"

    def reads(self) -> list[Storage]:
        return [self.image.storage, self.filters.storage, *self._epilogue_reads()]

    def candidates(self) -> dict[str, Callable[[], Form]]:
        known = ending(self.epilogue, self.out)
        found: dict[str, Callable[[], Form]] = {}
        if self.epilogue is not None and known is not None and (known.added is None or known.positive):
            found["fused"] = functools.partial(self._fused, known)
        found[LIBRARY] = self._library
        if self.window.group == 1 and self.filters.shape[1] >= _FEWEST_CHANNELS:
            tiles = conv_tiles(self.image, self.filters, self.out.shape[1], _TILES)
            found |= {_named(t): functools.partial(self._own, t) for t in tiles}
        return found

    def _own(self, tile: Tile) -> Form:
        window = self.window
        sliding = Sliding(window.strides[:2], window.dilations[:2], window.pads[:2])  # type: ignore[arg-type]
        places = (self.target.shape[2], self.target.shape[3])
        made = convolution(self.image, self.filters, self.out, places, sliding, self.epilogue, tile=tile)
        return Form(_named(tile), None, made, made.temporaries)

    def _fused(self, known: Ending) -> Form:
        """The library's own form with this epilogue."""
        bias = None if known.bias is None else _vector(known.bias)
        other = known.added
        like = None
        if other is not None:
            shape, strides = self.target.shape, self.target.strides
            like = View(other.view.storage, other.dtype, shape, strides, other.view.offset)

        def run(tensor: TensorOf) -> Any:
            given = (tensor(self.image), tensor(self.filters), None if bias is None else tensor(bias))
            return self._called(*given, None if like is None else tensor(like), known.positive)

        return Form("fused", run, None, gives=self.target)

    def _called(self, image: Any, filters: Any, bias: Any, added: Any, positive: bool) -> Any:
        image, pads = self._framed(image)
        how = (self.window.strides, pads, self.window.dilations, self.window.group)
        if not positive:
            return functional.conv2d(image, filters, bias, *how)
        if not image.is_cuda:
            y = functional.conv2d(image, filters, bias, *how)
            return torch.relu(y if added is None else y + added)
        if added is None:
            return torch.cudnn_convolution_relu(image, filters, bias, *how)
        return torch.cudnn_convolution_add_relu(image, filters, added, 1.0, bias, *how)

    def _framed(self, image: Any) -> tuple[Any, Sequence[int]]:
        """Libraries pad both ends alike."""
        before, behind = self.window.pads[:2], self.window.pads[2:]
        if before == behind:
            return image, before
        return functional.pad(image, (before[1], behind[1], before[0], behind[0])), (0, 0)

    def _library(self) -> Form:
        if self.epilogue is None:
            return Form(LIBRARY, self._plain, None, gives=self.target)
        channels, rows = self.out.shape[2], self.out.shape[1]
        made = View.temporary(self.image.dtype, (1, rows, channels))
        rest = _after(made, self.out, self.epilogue)
        number, _, high, wide = self.target.shape
        strides = (high * wide * channels, 1, wide * channels, channels)
        into = View(made.storage, made.dtype, (number, channels, high, wide), strides)
        return Form(LIBRARY, self._plain, rest, (made.storage, *rest.temporaries), into)

    def _plain(self, tensor: TensorOf) -> Any:
        image, pads = self._framed(tensor(self.image))
        how = (self.window.strides, pads, self.window.dilations, self.window.group)
        return functional.conv2d(image, tensor(self.filters), None, *how)


Work = Multiplied | Convolved
__all__ = ["LIBRARY", "Convolved", "Ending", "Form", "Multiplied", "TensorOf", "Work", "ending"]
