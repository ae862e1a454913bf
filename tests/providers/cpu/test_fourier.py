"""DFT and STFT nodes: generated code agrees with the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ranvier as rv
from ranvier.providers.cpu.realise import Realiser
from tests.providers.cpu.compare import agree, one_node
from tests.providers.cpu.test_precision import model, node

Array = np.ndarray[Any, Any]


def signal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "axis", "length", "attrs"),
    [
        ((3, 48, 1), 1, None, {"onesided": 1}),
        ((3, 48, 1), 1, None, {}),
        ((64, 5, 2), 0, None, {}),
        ((2, 30, 3, 2), -3, 40, {}),
        ((2, 33, 2), 1, None, {"inverse": 1, "onesided": 1}),
        ((2, 50, 2), 1, 17 * 17, {}),
    ],
)
def test_dft(shape: tuple[int, ...], axis: int, length: int | None, attrs: dict[str, int]) -> None:
    x = signal(*shape)
    size = None if length is None else np.array(length, np.int64)
    model = one_node("DFT", [x, size, np.array(axis, np.int64)], attrs, constant=[1, 2])
    agree(model, {"x0": x}, rtol=1e-4, atol=2e-5)
    if length is None and axis >= 0:
        old = one_node("DFT", [x], {**attrs, "axis": axis}, opset=17)
        agree(old, {"x0": x}, rtol=1e-4, atol=2e-5)


def test_stft() -> None:
    x, window = signal(2, 700), signal(100)
    model = one_node("STFT", [x, np.array(40, np.int64), window], constant=[1, 2])
    agree(model, {"x0": x}, rtol=1e-4, atol=2e-4)


# -- powers of a spectrum ---------------------------------------------------------------------------------------------


def spectrum(
    *rest: onnx.NodeProto, outputs: str = "y", length: int = 100, batch: int = 2, **constants: Any
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model that begins with frames of a signal."""
    x, window = signal(batch, 700), signal(length)
    nodes = [node("STFT", "x step window", "s"), *rest]
    made = model(nodes, {"x": x}, outputs, {"step": 40, "window": window, **constants})
    return made, {"x": x}


WAYS = {
    "squares": [node("ReduceSumSquare", "s last", "y", keepdims=0)],
    "squares with an axis left": [node("ReduceSumSquare", "s last", "y")],
    "magnitudes": [node("ReduceL2", "s last", "y", keepdims=0)],
    "products": [node("Mul", "s s", "q"), node("ReduceSum", "q last", "y", keepdims=0)],
    "powers": [node("Pow", "s two", "q"), node("ReduceSum", "q last", "y", keepdims=0)],
    "without the last frame": [
        node("Slice", "s zero most one", "t"),
        node("ReduceSumSquare", "t last", "y", keepdims=0),
    ],
    "every second bin": [
        node("Slice", "s zero many axis two_", "t"),
        node("ReduceSumSquare", "t last", "y", keepdims=0),
    ],
    "and what follows": [node("ReduceSumSquare", "s last", "p", keepdims=0), node("Log", "p", "y")],
}
CONSTANTS = {
    "last": np.array([-1]),
    "two": np.float32(2),
    "zero": np.array([0]),
    "one": np.array([1]),
    "most": np.array([-1]),
    "many": np.array([1000]),
    "axis": np.array([2]),
    "two_": np.array([2]),
}


def of(way: list[onnx.NodeProto]) -> dict[str, Any]:
    used = {name for each in way for name in each.input}
    return {name: array for name, array in CONSTANTS.items() if name in used}


def kernels(made: onnx.ModelProto, feeds: dict[str, Array]) -> list[str]:
    found: list[str] = []
    whole = Realiser.run

    def watched(self: Realiser) -> Any:
        done = whole(self)
        found.extend(launch.spec.name for launch in done.launches)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Realiser, "run", watched)
        rv.load(made, providers=["cpu"], optimization="none").run(feeds)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [100, 74])  # passes, and a product
def test_powers(way: str, length: int) -> None:
    made, feeds = spectrum(*WAYS[way], length=length, **of(WAYS[way]))
    agree(made, feeds, rtol=2e-4, atol=2e-3)
    names = kernels(made, feeds)
    if length == 100:
        alone = ("squares", "squares with an axis left", "products", "powers")
        assert len(names) == (1 if way in alone else 2), names
        assert names[0].startswith("fourier")


@pytest.mark.parametrize(
    "rest, outputs",
    [
        ([node("ReduceSumSquare", "s last", "y", keepdims=0)], "y s"),  # the spectrum is a result too
        ([node("ReduceSumSquare", "s last", "y", keepdims=0), node("Abs", "s", "z")], "y z"),
        ([node("ReduceSumSquare", "s bins", "y", keepdims=0)], "y"),  # another axis
        ([node("Slice", "s zero one last", "t"), node("ReduceSumSquare", "t last", "y")], "y"),  # real parts alone
        ([node("ReduceSum", "s last", "y", keepdims=0)], "y"),
        ([node("Mul", "s s", "q"), node("ReduceSum", "q last", "y"), node("Neg", "q", "z")], "y z"),
    ],
)
def test_spectra_that_are_read_as_they_are(rest: list[onnx.NodeProto], outputs: str) -> None:
    more = {**of(rest), **({"bins": np.array([2])} if any("bins" in n.input for n in rest) else {})}
    made, feeds = spectrum(*rest, outputs=outputs, **more)
    agree(made, feeds, rtol=2e-4, atol=2e-3)
    assert len(kernels(made, feeds)) >= 2
