"""Operators over codes against the reference: the CPU provider's tests of them, which say what to check, and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier.errors import InvalidValue, KernelError, ShapeMismatch  # noqa: E402
from ranvier.providers.cuda.ops import products  # noqa: E402
from tests.providers.cpu import (  # noqa: E402
    test_coded_table,
    test_qlinear,
    test_quantized_fused,
    test_quantized_windows,
)
from tests.providers.cpu.compare import Array, one_node  # noqa: E402
from tests.providers.cpu.test_coded_table import (  # noqa: E402, F401
    test_codes_that_share_bytes,
    test_codes_with_a_byte_each,
    test_scales_that_rows_share_and_halves,
)
from tests.providers.cpu.test_qlinear import (  # noqa: E402, F401
    test_binary,
    test_means,
    test_mul_integer,
    test_numbers_between_two_codes_become_the_even_one,
    test_softmax,
    test_softmax_of_extremes,
    test_sums_of_codes,
    test_unary,
    test_where_and_concat,
)
from tests.providers.cpu.test_quantized_fused import (  # noqa: E402, F401
    attention,
    codes,
    embedding,
    test_attention_over_codes,
    test_attention_over_codes_in_half_precision,
    test_attention_over_codes_with_masks_and_a_past,
    test_long_sums_of_16_bits_wrap_and_do_not_round,
    test_norm_of_quantized_embeddings,
    test_products_of_16_bits,
)
from tests.providers.cpu.test_quantized_windows import (  # noqa: E402, F401
    parameters,
    single,
    test_average_of_codes,
    test_average_of_codes_along_one_and_three_axes,
    test_average_without_zero_points_of_constants_and_of_nothing,
    test_averages_between_two_codes_are_even,
    test_largest_of_codes,
)
from tests.torch.device import ON_TWIN, options  # noqa: E402

MICROSOFT: dict[str, Any] = {"domain": "com.microsoft"}


def check(op: str, inputs: Sequence[Array | None], attrs: dict[str, Any] | None = None, **how: Any) -> list[Array]:
    """One node on this provider and on the reference: codes are the same, numbers close."""
    close = {"rtol": 1e-5, "atol": 1e-6} | {name: how.pop(name) for name in ("rtol", "atol") if name in how}
    model = one_node(op, inputs, attrs, **how)
    constant = how.get("constant", ())
    feeds = {f"x{k}": x for k, x in enumerate(inputs) if x is not None and k not in constant}
    with rv.load(model, providers=["reference"], optimization="none") as oracle:
        expected = list(oracle.run(feeds).values())
    with rv.load(model, providers=["cuda"], provider_options=options(), optimization="none") as session:
        assert all(node.provider == "cuda" for node in session.report.nodes), session.report.nodes
        for _ in range(2 if ON_TWIN else 4):  # the first run makes a variant, the second one uses it, later ones replay
            found = list(session.run(feeds).values())
            for have, want in zip(found, expected, strict=True):
                assert have.dtype == want.dtype and have.shape == want.shape
                if want.dtype.kind in "iub":
                    np.testing.assert_array_equal(have, want)
                else:
                    np.testing.assert_allclose(have.astype(np.float64), want.astype(np.float64), **close)
        assert not session.report.fallbacks
    return found


@pytest.fixture(autouse=True)
def on_this_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_coded_table, test_qlinear, test_quantized_fused, test_quantized_windows):
        monkeypatch.setattr(module, "check", check)


def refused(op: str, inputs: Sequence[Array | None], attrs: dict[str, Any] | None, error: type, match: str) -> None:
    model = one_node(op, inputs, attrs, **MICROSOFT)
    with rv.load(model, providers=["cuda"], provider_options=options(), optimization="none") as session:
        assert all(node.provider == "cuda" for node in session.report.nodes), session.report.nodes
        with pytest.raises(error, match=match):
            session.run({f"x{k}": x for k, x in enumerate(inputs) if x is not None})


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_all_pairs_of_codes_by_scales_that_make_ties(kind: type) -> None:
    """Every code with every other; scales are small multiples of one, so that many results lie between two codes."""
    every = np.arange(256, dtype=np.uint8).view(kind)
    rng = np.random.default_rng(5)
    for base in (0.1, 0.3, 0.7):
        a, b, c = (single(np.float32(base) * np.float32(k)) for k in rng.choice([1, 2, 3, 4, 6], 3))
        za, zb, zc = (np.asarray(rng.choice(every), kind) for _ in range(3))
        left, right, out = [every[:, None], a, za], [every, b, zb], [c, zc]
        check("QLinearAdd", [*left, *right, *out], **MICROSOFT)
        check("QLinearMul", [*left, *right, single(4 * a * b), zc], **MICROSOFT)
        check("QLinearWhere", [rng.random((256, 256)) < 0.5, *left, *right, *out], **MICROSOFT)
        check("QLinearConcat", [*out, every, a, za, *right], {"axis": -1}, **MICROSOFT)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_means_of_many_codes_are_not_rounded_on_the_way() -> None:
    """The mean of the first channel is just below 255, which only a sum of more bits than float32 has can tell."""
    x = np.full((1, 2, 300, 301), 255, np.uint8)
    x[0, 0, 0, 0], x[0, 1, :, ::2] = 254, 0
    none = single(0, np.uint8)
    for zero, wanted in ((0, 127), (1, 127), (128, 63)):
        given = [x, single(1.0), single(zero, np.uint8), single(2.0), none]
        forms: list[tuple[str, dict[str, Any]]] = [
            ("QLinearGlobalAveragePool", {}),
            ("QLinearReduceMean", {"axes": [-1, -2], "keepdims": 0}),
            ("QLinearAveragePool", {"kernel_shape": [300, 301]}),
        ]
        for op, attrs in forms:
            (found,) = check(op, given, attrs, **MICROSOFT)
            assert found.ravel()[0] == wanted
        check("QLinearReduceMean", given, **MICROSOFT)
    check("QLinearReduceMean", [x[:, :, :0], *given[1:]], {"axes": [2]}, **MICROSOFT)


@pytest.mark.parametrize(("p", "q"), [((3, 5), (5, 4)), ((5,), (5, 4)), ((2, 3, 5), (5,)), ((2, 1, 3, 7), (4, 7, 2))])
@pytest.mark.parametrize("room", [1, 10, 1 << 24])
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64])
def test_products_of_whole_numbers_wrap_and_do_not_round(
    dtype: type, room: int, p: tuple[int, ...], q: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU makes them: by float64 where that holds the sums, else a few at a time."""
    monkeypatch.setattr(products, "_ROOM", room)
    rng, limits = np.random.default_rng(8), np.iinfo(dtype)
    a, b = (rng.integers(limits.min, limits.max, shape, endpoint=True, dtype=dtype) for shape in (p, q))
    found = products.whole_product(torch.from_numpy(a), torch.from_numpy(b), native=False)
    with np.errstate(over="ignore"):
        expected = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_products_of_whole_numbers_that_do_not_fit() -> None:
    refused("MatMulInteger16", [codes(np.int16, 2, 3), codes(np.int16, 4, 5)], None, ShapeMismatch, "do not multiply")
    with pytest.raises(ShapeMismatch, match="do not multiply"):
        products.whole_product(torch.ones(2, 1).long(), torch.ones(3, 2).long(), native=False)


def test_attention_over_codes_with_positions() -> None:
    how: dict[str, Any] = {"outputs": 2, "rtol": 1e-4, "atol": 1e-4, **MICROSOFT}
    for past in (0, 3):
        given = attention(np.int8, np.uint8, mask=None, past=past, columns=True)
        check("QAttention", given, {"num_heads": 3, "do_rotary": 1, "unidirectional": 1}, **how)


def test_a_buffer_without_its_length_is_declined() -> None:
    given = attention(np.uint8, np.int8, mask=None, past=3, columns=False)
    model = one_node("QAttention", given, {"num_heads": 3, "past_present_share_buffer": 1}, outputs=2, **MICROSOFT)
    order = {"providers": ["cuda", "reference"], "provider_options": options(), "optimization": "none"}
    with rv.load(model, **order) as session:
        (node,) = session.report.nodes
    assert node.provider == "reference" and "shared buffer" in dict(node.declined)["cuda"]


def test_indices_outside_of_a_table() -> None:
    given = embedding(np.uint8, segments=True, mask=False)
    assert given[0] is not None
    given[0][1, 2] = 9
    refused("QEmbedLayerNormalization", given, None, InvalidValue, "outside")
    table, scales = codes(np.uint8, 0, 16), np.ones((0, 1), np.float32)
    attrs = {"block_size": 32}
    refused("GatherBlockQuantized", [table, np.array([0]), scales], attrs, InvalidValue, "empty")
    check("GatherBlockQuantized", [table, np.zeros((2, 0), np.int64), scales], attrs, **MICROSOFT)


def test_shapes_that_do_not_fit() -> None:
    given = [codes(np.uint8, 1, 2, 3, 3), *parameters(np.uint8, 0)]
    for op, inputs in (("QLinearAveragePool", given), ("NhwcMaxPool", given[:1])):
        refused(op, inputs, {"kernel_shape": [5, 5]}, ShapeMismatch, op)
    flat = [codes(np.uint8, 4, 5), *parameters(np.uint8, 0)]
    refused("QLinearGlobalAveragePool", flat, None, ShapeMismatch, "spatial")
    many = [given[0], np.full(4, 0.1, np.float32), *given[2:]]
    refused("QLinearSoftmax", many, {"opset": 13}, KernelError, "shape")
    table = [codes(np.uint8, 4, 16), np.array([1]), np.ones((4, 3), np.float32)]
    refused("GatherBlockQuantized", table, {"block_size": 16}, ShapeMismatch, "scales")
