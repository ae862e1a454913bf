"""A part of a tensor that is quantized as it is read has the codes of the whole, and reads no more than that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, WeightError
from ranvier.quantize import Awq, Float8, Gptq, Integers, Nf4, Quantized, Ternary, scheme
from ranvier.weights import Quantize, Slice, WeightLoader, apply, save_safetensors
from ranvier.weights.sources import registry
from ranvier.weights.ternary import decoded, i2s
from tests.weights.test_transforms import stored

Array = np.ndarray[Any, Any]
WEIGHTS = np.random.default_rng(5).standard_normal((12, 80)).astype(np.float32) * np.geomspace(1, 9, 80, dtype="f4")


def coded(given: Any, part: Any, array: Array = WEIGHTS) -> tuple[Quantized, int]:
    """The codes of a part, and how many numbers of the file were read for it."""
    weight, blob = stored(array)
    found: Any = apply(weight, Quantize(given), Slice(part)).read()
    return found, blob.asked // 4


def same(found: Quantized, whole: Quantized, part: Any) -> None:
    assert found.scheme == whole.scheme and found.bits == whole.bits and found.dtype == whole.dtype
    np.testing.assert_array_equal(found.codes, whole.codes[part])
    np.testing.assert_array_equal(found.dequantize(), whole.dequantize()[part])


EVERY = {
    "tensor": Integers(8, granularity="tensor"),
    "channel": Integers(8),
    "channel along axis 0": Integers(8, False, axis=0),
    "channel mse": Integers(4, fit="mse"),
    "int4": scheme("int4"),
    "uint4 groups of 8": Integers(4, False, "group", 8, signed=False),
    "groups mse": Integers(4, False, "group", 16, signed=False, fit="mse"),
    "groups along axis 0": Integers(4, granularity="group", group=4, axis=0),
    "groups along axis 0 mse": Integers(4, granularity="group", group=4, axis=0, fit="mse"),
    "fp8": Float8(),
    "fp8 blocks": Float8(granularity="block", group=(4, 32)),
    "nf4": Nf4(64),
    "nf4 nested": Nf4(64, nested=True),
    "ternary": Ternary(),
}


@pytest.mark.parametrize(
    "name, part, asked",
    [
        ("tensor", slice(0, 4), 12 * 80),
        ("tensor", (slice(1, 9, 2), slice(3, 50, 5)), 12 * 80),
        ("ternary", slice(0, 4), 12 * 80),
        ("fp8", slice(0, 4), 12 * 80),
        ("channel", slice(0, 4), 4 * 80),
        ("channel", (slice(0, 4), slice(16, 48)), 4 * 80),
        ("channel mse", slice(3, 5), 2 * 80),
        ("channel along axis 0", (slice(None), slice(0, 4)), None),
        ("channel along axis 0", slice(0, 4), 12 * 80),
        ("int4", slice(0, 4), 4 * 80),
        ("int4", (slice(0, 4), slice(32, 80)), None),
        ("int4", (slice(2, 3), slice(32, 64)), 32),
        ("int4", (slice(2, 3), slice(40, 60)), 32),
        ("int4", (slice(2, 3), slice(32, 70)), 48),
        ("groups mse", (slice(2, 3), slice(32, 64)), 80),
        ("groups along axis 0", slice(4, 8), 4 * 80),
        ("groups along axis 0", slice(4, 10), 8 * 80),
        ("groups along axis 0 mse", slice(4, 8), 12 * 80),
        ("fp8 blocks", slice(4, 9), 8 * 80),
        ("nf4", slice(4, 8), 4 * 80),
        ("nf4", slice(4, 6), 4 * 80),
    ],
)
def test_a_part_of_the_codes_is_that_of_the_whole(name: str, part: Any, asked: int | None) -> None:
    found, read = coded(EVERY[name], part)
    same(found, EVERY[name].quantize(WEIGHTS), part)
    assert asked is None or read == asked


@pytest.mark.parametrize(
    "name, part",
    [
        ("int4", (slice(None), slice(16, 80))),
        ("int4", (slice(None), slice(0, 80, 2))),
        ("uint4 groups of 8", (slice(None), slice(4, 20))),
        ("groups along axis 0", slice(2, 6)),
        ("fp8 blocks", slice(2, 6)),
        ("nf4", slice(1, 5)),
        ("nf4", (slice(None), slice(0, 64))),
        ("nf4 nested", slice(0, 4)),
    ],
)
def test_a_part_that_cuts_blocks_is_an_error(name: str, part: Any) -> None:
    with pytest.raises(WeightError, match=r"'x' cannot be cut behind Quantize.*Slice before Quantize"):
        coded(EVERY[name], part)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_part_is_that_of_the_whole_or_an_error(data: st.DataObject) -> None:
    which = EVERY[data.draw(st.sampled_from(sorted(EVERY)))]
    shape = data.draw(st.sampled_from([(12, 80), (3, 64), (7, 33), (1, 1), (0, 5), (2, 6, 40)]))
    array = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    part = tuple(
        slice(*sorted((data.draw(st.integers(0, d)), data.draw(st.integers(0, d)))), data.draw(st.integers(1, 3)))
        for d in shape
    )
    try:
        found, _ = coded(which, part, array)
    except WeightError:
        return
    same(found, which.quantize(array), part)


def test_the_whole_and_its_slices_in_turn() -> None:
    which = EVERY["tensor"]
    weight, _ = stored(WEIGHTS)
    twice: Any = apply(weight, Quantize(which), Slice(slice(2, 10)), Slice((slice(1, 4), slice(8, 16)))).read()
    same(twice, which.quantize(WEIGHTS), (slice(3, 6), slice(8, 16)))
    every: Any = apply(weight, Quantize(which), Slice(...)).read()
    same(every, which.quantize(WEIGHTS), ...)
    before: Any = apply(weight, Slice(slice(2, 10)), Quantize(which)).read()
    same(before, which.quantize(WEIGHTS[2:10]), ...)


def test_loading_in_parts(tmp_path: Any) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"w": WEIGHTS})
    step, loader = Quantize(Integers(8, granularity="tensor")), WeightLoader()
    whole: Any = loader.load(tmp_path / "m.safetensors", "w", step)
    for part in (slice(0, 4), slice(4, 12)):
        found: Any = loader.load(tmp_path / "m.safetensors", "w", step, part=part)
        assert found.scales == whole.scales
        same(found, whole, part)


def test_codes_that_have_no_parts() -> None:
    class Halves:
        def quantize(self, array: Array) -> Any:
            return {"codes": np.round(array * 2), "scale": 0.5}

    class Ordered:
        def quantize(self, array: Array) -> Quantized:
            return Quantized(
                "mine", np.zeros(array.shape, np.int8), np.ones((12, 2), "f4"), (1, 40), 4, order=np.arange(80) % 2
            )

    for which in (Halves(), Ordered()):
        with pytest.raises(WeightError, match=r"'x'.*parts.*Slice before Quantize"):
            coded(which, slice(0, 4))


def test_bytes_of_scales_of_a_part() -> None:
    class Small:
        def quantize(self, array: Array) -> Quantized:
            scales = np.ones((12, 1), np.float32)
            return Quantized("mine", np.ones(array.shape, np.int8), scales, (1, 80), 4, scale_bytes=12)

    assert coded(Small(), slice(0, 4))[0].nbytes == 4 * 80 // 2 + 4


def test_info_is_that_of_the_numbers() -> None:
    weight, _ = stored(WEIGHTS)
    info = apply(weight, Quantize(Integers(8))).info
    assert info == weight.info and info.dtype is DType.float32


# -- what is no scheme, and no source ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [Gptq(), Awq()])
def test_schemes_that_need_samples_quantize_nothing_that_is_loaded(which: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"'x'.*InputMoments"):
        apply(stored(WEIGHTS)[0], Quantize(which))


def test_the_class_of_a_scheme_is_none() -> None:
    with pytest.raises(WeightError, match=r"'x'.*Integers\(\)"):
        apply(stored(WEIGHTS)[0], Quantize(Integers))  # type: ignore[arg-type]


def plug(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    class Entry:
        def load(self) -> Any:
            return make

    monkeypatch.setattr(registry, "plugged", lambda group: {"mine": Entry()})


def test_sources_of_others_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(address: str) -> Any:
        raise ValueError(f"no such place: {address}")

    plug(monkeypatch, make)
    with pytest.raises(InvalidConfig, match=r"mine://.*ValueError: no such place: mine://a/b"):
        WeightLoader().load("mine://a/b", "w")
    with pytest.raises(InvalidConfig) as caught:
        WeightLoader().metadata("mine://user:hidden@a/b")
    assert "hidden" not in str(caught.value)

    def typed(address: str) -> Any:
        raise WeightError("ours")

    plug(monkeypatch, typed)
    with pytest.raises(WeightError, match=r"^ours$"):
        WeightLoader().open("mine://a")


@pytest.mark.parametrize("made", [3, None, "path", registry.FileSource])
def test_sources_of_others_that_are_none(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    plug(monkeypatch, lambda address: made)
    with pytest.raises(InvalidConfig, match=r"mine://.*no source"):
        WeightLoader().load("mine://a", "w")


def test_a_source_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    save_safetensors(tmp_path / "m.safetensors", {"w": WEIGHTS})
    plug(monkeypatch, lambda address: registry.FileSource(tmp_path / "m.safetensors"))
    np.testing.assert_array_equal(WeightLoader().load("mine://a", "w"), WEIGHTS)


@pytest.mark.parametrize("shape", ["ab", 5, None, (1.5, 2), (1, None), (1, 2, 3), (-1, 128)])
def test_shapes_that_are_no_matrix(shape: Any) -> None:
    with pytest.raises(WeightError, match=r"I2_S: ternary weights are a matrix"):
        i2s(bytes(36), shape)
    with pytest.raises(WeightError, match=r"TQ2_0: ternary weights are a matrix"):
        decoded(bytes(66), "TQ2_0", shape)
