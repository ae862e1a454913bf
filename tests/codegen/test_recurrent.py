"""LSTM, GRU and RNN kernels against float64 NumPy, and against the reference operators for ONNX's corner cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ranvier.codegen.launch import Launch
from ranvier.codegen.llvm import compiler, library
from ranvier.codegen.llvm.isa import Isa, named
from ranvier.codegen.llvm.recurrent import Layer, Operands, Results, recurrent, supported, work
from ranvier.codegen.llvm.recurrent.cells import GATES, Kind
from ranvier.codegen.storage import Storage, View
from ranvier.dtypes import DType
from ranvier.ops.nn import recurrent as reference
from tests.codegen.harness import ISAS, Array, Runner, view_of

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
_kept: list[object] = []  # kernels of earlier cases: most cases share them, and each is compiled once


def run(launches: Sequence[Launch], isa: Isa, bound: Mapping[Storage, Array], *, split: int = 1) -> None:
    runner = Runner(launches, isa, bound, split=split)
    _kept.append(runner.kernels)
    runner()


KINDS: tuple[Kind, ...] = ("LSTM", "GRU", "RNN")


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def oracle(kind: Kind, x: Array, w: Array, r: Array, b: Array, *, linear_before_reset: bool = False) -> Array:
    """Default activations, forward, one direction, straight from the equations of the standard; all hidden states."""
    x, w, r, b = (a.astype(np.float64) for a in (x, w[0], r[0], b[0]))
    hidden = r.shape[1]
    h = c = np.zeros((x.shape[1], hidden))
    wb, rb = b[: len(b) // 2], b[len(b) // 2 :]
    out = []
    for step in x:
        gx = np.split(step @ w.T + wb, GATES[kind], axis=1)
        gh = np.split(h @ r.T, GATES[kind], axis=1)
        bh = np.split(rb, GATES[kind])
        if kind == "RNN":
            h = np.tanh(gx[0] + gh[0] + bh[0])
        elif kind == "LSTM":
            i, o, f = (sigmoid(gx[k] + gh[k] + bh[k]) for k in range(3))
            c = f * c + i * np.tanh(gx[3] + gh[3] + bh[3])
            h = o * np.tanh(c)
        else:
            z, reset = (sigmoid(gx[k] + gh[k] + bh[k]) for k in range(2))
            if linear_before_reset:
                candidate = np.tanh(gx[2] + reset * (gh[2] + bh[2]))
            else:
                candidate = np.tanh(gx[2] + (reset * h) @ r[2 * hidden :].T + bh[2])
            h = (1 - z) * candidate + z * h
        out.append(h)
    return np.stack(out)[:, None]


def weights(
    seed: int, kind: Kind, directions: int, steps: int, batch: int, width: int, hidden: int, dtype: Any = np.float32
) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    rows = GATES[kind] * hidden

    def random(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.5).astype(dtype)

    return {
        "x": random(steps, batch, width),
        "w": random(directions, rows, width),
        "r": random(directions, rows, hidden),
        "bias": random(directions, 2 * rows),
    }


def computed(
    isa: Isa,
    layer: Layer,
    arrays: Mapping[str, Array | None],
    *,
    constant: bool = True,
    split: int = 1,
    threads: int = 1,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    narrow: bool = False,
) -> list[Array | None]:
    """Y, Y_h and Y_c in the layer's layout; weights as constants or as inputs."""
    bound = {}
    views: dict[str, View | None] = {}
    for name, array in arrays.items():
        if array is None:
            views[name] = None
        elif constant and name in ("w", "r", "bias", "peepholes"):
            views[name] = View.constant(array, DType.float32 if array.dtype == np.float32 else DType.float64)
        else:
            views[name] = view_of(array)
            bound[views[name].storage] = array  # type: ignore[union-attr]
    x, r = arrays["x"], arrays["r"]
    assert x is not None and r is not None
    steps, batch = x.shape[:2] if layer.layout == 0 else x.shape[1::-1]
    directions, hidden = r.shape[0], r.shape[2]
    y_shape = (steps, directions, batch, hidden) if layer.layout == 0 else (batch, steps, directions, hidden)
    state = (directions, batch, hidden) if layer.layout == 0 else (batch, directions, hidden)
    outputs: list[Array | None] = []
    for shape, asked in zip((y_shape, state, state), wanted):
        outputs.append(np.full(shape, np.nan, x.dtype) if asked else None)
    targets = [None if o is None else view_of(o, "output") for o in outputs]
    for target, output in zip(targets, outputs):
        if target is not None and output is not None:
            bound[target.storage] = output
    if layer.kind != "LSTM":
        targets[2] = outputs[2] = None
    given = Operands(**views)  # type: ignore[arg-type]
    launches = recurrent(layer, given, Results(*targets), isa, threads=threads, narrow=narrow)
    run(launches, isa, bound, split=split)
    return outputs


def check_against_reference(isa: Isa, kind: Kind, arrays: Mapping[str, Array | None], **attrs: Any) -> None:
    """The reference operator in float64 must agree; ``lengths`` keep their type."""
    arguments = [arrays["x"], arrays["w"], arrays["r"], arrays.get("bias"), arrays.get("lengths")]
    arguments += [arrays.get("initial_h")]
    if kind == "LSTM":
        arguments += [arrays.get("initial_c"), arrays.get("peepholes")]
    wide = [a if a is None or a.dtype.kind != "f" else a.astype(np.float64) for a in arguments]
    body = {"LSTM": reference.lstm, "GRU": reference.gru, "RNN": reference.rnn}[kind]
    expected = body.body(*wide, **attrs)
    for constant in (True, False):
        found = computed(isa, Layer.of(kind, attrs), arrays, constant=constant, split=2)
        for have, want in zip(found, expected):
            assert have is not None
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=5e-6)


@each_isa
@pytest.mark.parametrize("kind", [*KINDS, "GRU linear"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_the_equations(isa: Isa, kind: str, dtype: Any) -> None:
    linear = kind.endswith("linear")
    name: Kind = "GRU" if linear else kind  # type: ignore[assignment]
    for shape in ((5, 1, 3, 4), (7, 8, 6, 33), (3, 13, 10, 16), (4, 2, 5, 50), (1, 1, 1, 1)):
        arrays = weights(0, name, 1, *shape, dtype=dtype)
        expected = oracle(name, *arrays.values(), linear_before_reset=linear)
        y, y_h, _ = computed(isa, Layer(name, linear_before_reset=linear), arrays, split=3, threads=3)
        tolerance = 1e-12 if dtype == np.float64 else 1e-5
        assert y is not None and y_h is not None
        np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(y_h, y[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_going_back_over_the_weights_changes_nothing(
    kind: Kind, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, turning = Layer(kind, direction), replace(ISAS[0], turns=True)
    for shape in ((6, 1, 5, 130), (5, 9, 3, 70)):  # several panels, the last one not full
        arrays = weights(2, kind, len(layer.backwards), *shape)
        forwards = computed(replace(turning, turns=False), layer, arrays)
        found = [computed(turning, layer, arrays)]
        with monkeypatch.context() as patched:
            patched.setattr(work, "_SHARED_NS", 0)
            found += [computed(turning, layer, arrays, threads=5, split=64)]
        for each in found:
            for have, want in zip(each, forwards):
                np.testing.assert_array_equal(have, want)


@each_isa
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRU linear", "RNN"])
@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (7, 3)])
def test_recurrent_weights_are_all_that_narrow_rounds(isa: Isa, kind: str, batch: int, threads: int) -> None:
    linear = kind.endswith("linear")
    name: Kind = "GRU" if linear else kind.split()[0]  # type: ignore[assignment]
    layer = Layer(name, linear_before_reset=linear)
    arrays = weights(3, name, 1, 5, batch, 6, 70)
    exact = oracle(name, *arrays.values(), linear_before_reset=linear)
    rounded = {**arrays, "r": arrays["r"].astype(DType.bfloat16.numpy).astype(np.float32)}
    expected = oracle(name, *rounded.values(), linear_before_reset=linear)
    assert np.abs(expected - exact).max() > 1e-4
    (y, *_) = computed(isa, layer, arrays, narrow=True, threads=threads)
    assert y is not None
    # where vectors do not come in pairs the weights stay as they are
    closest = min((expected, exact), key=lambda z: float(np.abs(y - z).max())) if name != "LSTM" else expected
    np.testing.assert_allclose(y, closest, rtol=1e-5, atol=1e-5)
    (y, *_) = computed(isa, layer, arrays, narrow=True, constant=False, threads=threads)
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


@each_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_directions_lengths_and_states(isa: Isa, kind: Kind, direction: str) -> None:
    directions = 2 if direction == "bidirectional" else 1
    arrays: dict[str, Array | None] = {**weights(1, kind, directions, 6, 5, 4, 19)}
    rng = np.random.default_rng(2)
    check_against_reference(isa, kind, arrays, direction=direction)
    arrays["lengths"] = np.array([6, 0, 3, 1, 6], np.int32)
    arrays["initial_h"] = rng.standard_normal((directions, 5, 19)).astype(np.float32)
    if kind == "LSTM":
        arrays["initial_c"] = rng.standard_normal((directions, 5, 19)).astype(np.float32)
        arrays["peepholes"] = rng.standard_normal((directions, 57)).astype(np.float32)
    check_against_reference(isa, kind, arrays, direction=direction)


@each_isa
@pytest.mark.parametrize("kind", [*KINDS, "GRU linear"])
@pytest.mark.parametrize(("directions", "batch", "hidden"), [(1, 1, 70), (2, 1, 70), (1, 19, 6), (2, 9, 40), (1, 3, 1)])
def test_threads_that_share_every_step_change_nothing(
    isa: Isa, kind: str, directions: int, batch: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are panels then, with a round per phase of a step; here they run in the worst order, one by one."""
    linear = kind.endswith("linear")
    name: Kind = "GRU" if linear else kind  # type: ignore[assignment]
    layer = Layer(name, "forward" if directions == 1 else "bidirectional", linear_before_reset=linear)
    arrays: dict[str, Array | None] = {**weights(20, name, directions, 5, batch, 4, hidden)}
    arrays["initial_h"] = np.random.default_rng(21).standard_normal((directions, batch, hidden)).astype(np.float32)
    for lengths in (None, np.random.default_rng(22).integers(0, 6, batch).astype(np.int32)):
        arrays["lengths"] = lengths
        alone = computed(isa, layer, arrays)
        with monkeypatch.context() as patched:
            patched.setattr(work, "_SHARED_NS", 0)
            shared = [computed(isa, layer, arrays, threads=5, split=split) for split in (1, 64)]
        with monkeypatch.context() as patched:
            patched.setattr(work, "_ROUND_NS", 0)
            by_rounds = computed(isa, layer, arrays, split=2)
        for found in (*shared, by_rounds):
            for have, want in zip(found, alone):
                assert (have is None) == (want is None)
                if have is not None and want is not None:
                    np.testing.assert_array_equal(have, want)


def test_large_steps_are_shared_and_long_loops_have_rounds() -> None:
    def loop(hidden: int, steps: int, threads: int, batch: int = 1) -> Launch:
        given = {name: view_of(a) for name, a in weights(23, "LSTM", 1, steps, batch, 4, hidden).items()}
        return recurrent(Layer("LSTM"), Operands(**given), Results(), ISAS[0], threads=threads)[-1]

    assert (loop(16, 9, 4).tiles, loop(16, 9, 4).rounds) == (1, 1)
    assert (loop(256, 9, 1).tiles, loop(256, 9, 1).rounds) == (1, 1)
    assert loop(256, 9, 4).tiles >= 8 and loop(256, 9, 4).rounds == 11
    assert loop(256, 4000, 1).rounds >= 10  # a run can be aborted
    assert (loop(256, 9, 4, 32).tiles, loop(256, 9, 4, 32).rounds) == (4, 1)  # sequences apart, nobody waits
    assert loop(512, 9, 4, 32).rounds == 11  # weights that no core keeps near are shared


@each_isa
@pytest.mark.parametrize("kind", KINDS)
def test_batch_first(isa: Isa, kind: Kind) -> None:
    arrays: dict[str, Array | None] = {**weights(3, kind, 2, 5, 3, 4, 20)}
    x = arrays["x"]
    assert x is not None
    arrays["x"] = np.ascontiguousarray(x.swapaxes(0, 1))
    arrays["initial_h"] = np.random.default_rng(4).standard_normal((3, 2, 20)).astype(np.float32)
    check_against_reference(isa, kind, arrays, direction="bidirectional", layout=1)


@each_isa
def test_clip_coupled_gates_and_missing_bias(isa: Isa) -> None:
    for kind in KINDS:
        arrays: dict[str, Array | None] = {**weights(5, kind, 1, 4, 2, 3, 9)}
        arrays["bias"] = None
        check_against_reference(isa, kind, arrays, clip=0.3)
    arrays = {**weights(6, "LSTM", 1, 4, 2, 3, 9)}
    check_against_reference(isa, "LSTM", arrays, input_forget=1)
    arrays = {**weights(7, "GRU", 1, 4, 2, 3, 9)}
    check_against_reference(isa, "GRU", arrays, linear_before_reset=1, clip=0.4)


@pytest.mark.parametrize(
    "activations",
    [
        ["Relu", "Affine", "LeakyRelu"],
        ["ThresholdedRelu", "ScaledTanh", "HardSigmoid"],
        ["Elu", "Softsign", "Softplus"],
        ["Sigmoid", "Tanh", "Tanh", "HardSigmoid", "Relu", "Softsign"],
    ],
    ids="-".join,
)
def test_activations(activations: list[str]) -> None:
    direction = "bidirectional" if len(activations) == 6 else "forward"
    arrays: dict[str, Array | None] = {**weights(8, "LSTM", len(activations) // 3, 4, 2, 3, 9)}
    check_against_reference(
        ISAS[0], "LSTM", arrays, direction=direction, activations=activations, activation_alpha=[0.3, 0.1]
    )


@each_isa
def test_only_wanted_outputs_and_strided_inputs(isa: Isa) -> None:
    arrays = weights(9, "LSTM", 1, 6, 3, 4, 21)
    full = computed(isa, Layer("LSTM"), arrays)
    for wanted in ((True, False, False), (False, True, False), (False, False, True)):
        found = computed(isa, Layer("LSTM"), arrays, wanted=wanted)
        for want, have, asked in zip(full, found, wanted):
            assert (have is None) == (not asked)
            if have is not None and want is not None:
                np.testing.assert_array_equal(have, want)
    wide = np.random.default_rng(10).standard_normal((6, 3, 8)).astype(np.float32)
    wide[..., ::2] = arrays["x"]
    strided = computed(isa, Layer("LSTM"), {**arrays, "x": wide[..., ::2]})
    for a, b in zip(full, strided):
        assert a is not None and b is not None
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@each_isa
def test_no_steps_and_no_sequences(isa: Isa) -> None:
    arrays: dict[str, Array | None] = {**weights(11, "LSTM", 1, 0, 2, 3, 5)}
    arrays["initial_h"] = np.ones((1, 2, 5), np.float32)
    _, y_h, y_c = computed(isa, Layer("LSTM"), arrays)
    assert y_h is not None and y_c is not None
    assert (y_h == 1).all() and (y_c == 0).all()
    y, _, _ = computed(isa, Layer("LSTM"), weights(12, "LSTM", 1, 3, 0, 3, 5))
    assert y is not None and y.size == 0


def test_what_is_not_supported_has_a_reason() -> None:
    assert supported("LSTM", {}) is None
    assert supported("GRU", {"activations": ["Relu", "Elu"], "direction": "reverse"}) is None
    assert "Sine" in (supported("LSTM", {"activations": ["Sine", "Tanh", "Tanh"]}) or "")
    assert "sideways" in (supported("RNN", {"direction": "sideways"}) or "")
    assert "float16" in (supported("RNN", {}, DType.float16) or "")
    assert supported("GRU", {"activations": ["Tanh"]}) is not None


def test_emits_for_aarch64() -> None:
    isa = named("neon", "aarch64")
    given = {name: view_of(a) for name, a in weights(13, "GRU", 1, 3, 2, 4, 9).items()}
    launches = recurrent(Layer("GRU"), Operands(**given), Results(), isa)
    for spec in {launch.spec for launch in launches}:
        assert compiler.compile_object(library.source(spec, isa), isa)
