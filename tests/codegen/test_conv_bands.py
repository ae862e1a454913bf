"""Chains of convolutions by bands against the same launches one after another.

Sums may be taken in another order, because blocks of other sizes are worked on by other micro-kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import At, Launch
from ranvier.codegen.llvm import nests
from ranvier.codegen.llvm.conv import ConvShape, bands, chained, conv, pack_weights
from ranvier.codegen.llvm.conv.pooling import pooling
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.loops.ir import Epilogue, Expr, Final, Index, Load, Nest, Op, Operand, Reduce, Result, Size
from ranvier.codegen.storage import View
from ranvier.dtypes import DType
from tests.codegen import harness
from tests.codegen.test_conv import execute

Array = np.ndarray[Any, Any]
F32, BF16, INT64 = DType.float32, DType.bfloat16, DType.int64
LAST = (0, 2, 3, 1)


@pytest.fixture(params=harness.ISAS, ids=[isa.name for isa in harness.ISAS])
def isa(request: pytest.FixtureRequest) -> Isa:
    found: Isa = request.param
    return found


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images are chained too, in bands of few rows."""
    monkeypatch.setattr(bands, "_FAR", 0)
    monkeypatch.setattr(bands, "_SAVED", 1e6)
    monkeypatch.setattr(bands, "_NEAR", 48 << 10)


class Layers:
    """A chain under construction: layers as launches over channels-last tensors."""

    def __init__(self, isa: Isa, shape: tuple[int, int, int, int], seed: int = 0, dtype: DType = F32) -> None:
        self.isa, self.rng, self.dtype = isa, np.random.default_rng(seed), dtype
        self.image = self._filled(shape)
        self.x = self.view = View.temporary(dtype, shape, LAST)
        self.memory: dict[Any, Array] = {self.x.storage: self.image}
        self.launches: list[Launch] = []

    def _filled(self, shape: tuple[int, ...]) -> Array:
        numbers = self.rng.standard_normal(np.prod(shape)).astype(self.dtype.numpy)
        array = harness.aligned(numbers.nbytes)
        array[:] = numbers.view(np.uint8)
        return array

    def layer(self, cout: int, kernel: int = 1, *, residual: View | None = None, group: int = 1, **how: Any) -> Layers:
        cin = self.view.shape[1]
        w = self.rng.standard_normal((cout, cin // group, kernel, kernel)).astype(np.float32)
        shape = ConvShape.conv(self.view.shape, w.shape, group=group, **how)
        out = View.temporary(self.dtype, (shape.n, cout, shape.out[1], shape.out[2]), LAST)
        bias = View.constant(self.rng.standard_normal(cout).astype(np.float32), F32)
        operands = [Operand(bias, (0, 0, 1))]
        value = Op("add", (Result(0, F32), Load(0, F32)), F32)
        if residual is not None:
            operands.append(Operand(residual, (residual.strides[0], residual.strides[3], 1)))
            value = Op("add", (value, Load(1, F32)), F32)
        epilogue = Epilogue(Op("tanh", (value,), F32), tuple(operands))
        kind = None if self.dtype is F32 else self.dtype
        packed = pack_weights(w, self.isa, shape, winograd=False, dtype=kind)
        self.launches += conv(self.view, packed, out, shape, self.isa, epilogue=epilogue)
        self.view = out
        return self

    def depthwise(self, kernel: int = 3, **how: Any) -> Layers:
        channels = self.view.shape[1]
        return self.layer(channels, kernel, group=channels, **how)

    def pool(self, kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, ...] = (0, 0, 0, 0)) -> Layers:
        """Max pooling, as loops."""
        x, (n, c, *size) = self.view, self.view.shape
        spatial = [(i + pads[k] + pads[k + 2] - kernel[k]) // strides[k] + 1 for k, i in enumerate(size)]
        out = View.temporary(self.dtype, (n, c, *spatial), LAST)
        guard: Expr | None = None
        for k in (0, 1) if any(pads) else ():
            step = Op("mul", (Index(2 + k), Size(strides[k])), INT64)
            place = Op("sub", (Op("add", (step, Index(4 + k)), INT64), Size(pads[k])), INT64)
            inside = [Op("le", (Size(0), place), DType.bool), Op("lt", (place, Size(size[k])), DType.bool)]
            for each in inside:
                guard = each if guard is None else Op("and", (guard, each), DType.bool)
        steps = (x.strides[2] * strides[0], x.strides[3] * strides[1], *x.strides[2:])
        offset = -(pads[0] * x.strides[2] + pads[1] * x.strides[3])
        source = Operand(x, (*x.strides[:2], *steps), offset, guard=guard, other=-math.inf)
        stages = (Reduce("max", Load(0, self.dtype), self.dtype), Final(((1, Result(0, self.dtype)),)))
        operands = (source, Operand(out, (*out.strides, 0, 0)))
        nest = Nest((n, c, *spatial, *kernel), operands, stages, frozenset({4, 5}))
        (launch,) = nests.launches(nest, self.isa)
        launch.origin = pooling(nest)
        self.launches.append(launch)
        self.view = out
        return self

    def check(self, wanted: list[int], split: int = 1) -> None:
        """Both ways give the same; ``wanted`` is the number of given launches in each that is left."""
        kept = {self.x.storage, self.view.storage}
        made, places = chained(self.launches, self.isa, 1, kept)
        assert [places.count(k) for k in range(len(made))] == wanted
        results = []
        for launches in (self.launches, made):
            out = harness.aligned(self.view.storage.nbytes)
            execute(launches, self.isa, {**self.memory, self.view.storage: out}, split)
            results.append(out)
        first, second = (r.view(self.dtype.numpy).astype(np.float64) for r in results)
        np.testing.assert_allclose(second, first, rtol=0, atol=2e-6 if self.dtype is F32 else 1e-2)
        gone = {s for launch in self.launches for s in launch.writes} - {self.view.storage}
        between = {b.storage for launch in made if len(made) == 1 for b in launch.buffers if isinstance(b, At)}
        assert not gone & between  # nothing between the layers has memory of its own


PAD = (1, 1, 1, 1)


@pytest.mark.parametrize("split", [1, 3])
def test_a_block_of_a_mobile_network(isa: Isa, split: int) -> None:
    net = Layers(isa, (1, 16, 30, 24))
    net.layer(48).depthwise(pads=PAD).layer(16, residual=net.x).check([3], split)


@pytest.mark.parametrize("height", [7, 16, 31])
def test_strides_and_images(isa: Isa, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_NEAR", 15 << 10)
    net = Layers(isa, (2, 8, height, 20), seed=height)
    net.layer(32).depthwise(pads=PAD, strides=(2, 2)).layer(24).check([3])


def test_windows_that_reach_far(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_NEAR", 15 << 10)
    net = Layers(isa, (1, 12, 40, 18))
    net.depthwise(5, pads=(2, 2, 2, 2)).layer(20, 3, pads=(2, 2, 2, 2), dilations=(2, 2)).check([2])


def test_padding_on_one_side_only(isa: Isa) -> None:
    net = Layers(isa, (1, 20, 26, 17))
    net.layer(36).depthwise(pads=(0, 0, 1, 1), strides=(2, 1)).check([2])


def test_pools_are_layers_too(isa: Isa) -> None:
    net = Layers(isa, (2, 3, 60, 44))
    net.layer(24, 3, pads=PAD).pool((2, 2), (2, 2)).layer(32).depthwise(pads=PAD).check([4])


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 1, 1, 0), (1, 0, 0, 2)])
def test_pools_with_pads(isa: Isa, pads: tuple[int, ...]) -> None:
    net = Layers(isa, (1, 3, 58, 40))
    net.layer(16, 5, pads=(2, 2, 2, 2), strides=(2, 1)).pool((3, 3), (2, 2), pads).layer(24).check([3])


def test_a_chain_does_not_begin_with_a_pool(isa: Isa) -> None:
    Layers(isa, (1, 16, 96, 40)).pool((2, 2), (2, 2)).layer(24).depthwise(pads=PAD).check([1, 2])


def test_long_chains_take_turns_in_two_places(isa: Isa) -> None:
    """A tensor is written over as soon as it was read, so bands may be higher."""
    net = Layers(isa, (1, 16, 64, 32))
    net.layer(24).depthwise(pads=PAD).layer(24).depthwise(pads=PAD).layer(8).check([5])


def test_what_others_read_is_not_taken_away(isa: Isa) -> None:
    net = Layers(isa, (1, 16, 24, 24))
    net.layer(40)
    middle = net.view
    net.depthwise(pads=PAD).layer(40, residual=middle).check([1, 2])


def test_small_tensors_stay_as_they_are(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_FAR", 1 << 30)
    Layers(isa, (1, 16, 24, 24)).layer(40).depthwise(pads=PAD).check([1, 1])


def test_heavy_weights_are_not_read_for_every_band(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "_WEIGHTS", 1 << 10)
    Layers(isa, (1, 16, 24, 24)).layer(40).depthwise(pads=PAD).check([1, 1])


def test_bfloat16(isa: Isa) -> None:
    net = Layers(isa, (1, 32, 28, 32), dtype=BF16)
    net.layer(64)
    net.depthwise(pads=PAD)
    made, _ = chained(net.launches, isa, 1, {net.x.storage, net.view.storage})
    net.check([2] if len(made) == 1 else [1] * len(net.launches))
