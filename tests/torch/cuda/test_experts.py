"""MoE and QMoE against the reference: by torch alone, and by the kernels for few visits and for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier.dtypes import DType  # noqa: E402
from ranvier.errors import ShapeMismatch  # noqa: E402
from ranvier.ops import evaluate  # noqa: E402
from ranvier.ops.contrib.weight_only import WIDTHS  # noqa: E402
from ranvier.providers.cuda.library import installed  # noqa: E402
from ranvier.providers.cuda.ops import experts  # noqa: E402
from tests.providers.cpu.compare import Array, one_node  # noqa: E402
from tests.providers.cpu.test_experts import (  # noqa: E402
    EXPERTS,
    MICROSOFT,
    SMALL_FLOATS,
    TYPES,
    coded,
    floats,
    own_bits,
    plain,
    small_floats,
)
from tests.torch.device import ON_TWIN, TORCH_DEVICE, options  # noqa: E402

HIDDEN, INNER, TOKENS = 32, 48, 5
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}
needs_triton = pytest.mark.skipif(not installed("triton"), reason="there are no kernels without Triton")
WAYS = ["torch", *(["few", "many"] if installed("triton") else [])]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels are interpreted where there is no GPU."""
    found: str = request.param
    monkeypatch.setattr(experts, "_ON_PROCESSOR", found != "torch")
    if found == "torch":
        monkeypatch.setattr(experts, "_MOST_EXPERTS", 0)
    else:
        from ranvier.providers.cuda.kernels import experts as kernels
        from ranvier.providers.cuda.kernels.jit import MatrixTile, Tile

        monkeypatch.setattr(kernels, "FEW_VISITS", 1 << 20 if found == "few" else 0)
        if ON_TWIN:  # the interpreter's time is that of programs, not of what they do
            monkeypatch.setattr(kernels, "TILE", Tile(rows=64, depth=32, warps=1))
            monkeypatch.setattr(kernels, "matrix_tile", lambda *_: MatrixTile(64, 16, 16, 4, 1))
    return found


def check(op: str, inputs: Sequence[Array | None], attrs: dict[str, Any], close: dict[str, Any] = CLOSE) -> None:
    """One node on this provider and on the reference, weights being constants."""
    given = list(inputs)
    while given[-1] is None:
        given.pop()
    model = one_node(op, given, attrs, domain=MICROSOFT, constant=range(2, len(given)))
    expected = evaluate(op, *given, domain=MICROSOFT, **attrs)
    with rv.load(model, providers=["cuda"], provider_options=options(), optimization="none") as session:
        assert all(node.provider == "cuda" for node in session.report.nodes), session.report.nodes
        for _ in range(1 if ON_TWIN else 4):  # the first run makes a variant, later ones replay it
            (found,) = session.run({"x0": given[0], "x1": given[1]}).values()
            assert found.dtype == expected.dtype and found.shape == expected.shape
            np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), **close)
        assert not session.report.fallbacks


def tokens(count: int = TOKENS, dtype: Any = np.float32) -> list[Array]:
    """Tokens, and what their router says."""
    return [floats(count, HIDDEN, dtype=dtype), floats(count, EXPERTS, seed=9, dtype=dtype)]


def few_bits(inner: int, bits: int, block: int, zeros: bool | type = False) -> list[Any]:
    """The operands of QMoE from its weights to its zero points."""
    first, second = coded(inner, HIDDEN, bits, block, 1, zeros), coded(HIDDEN, INNER, bits, block, 2, zeros)
    return [*first[0], *second[0], None, None, None, first[1], second[1], None]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
def test_activations(activation: str, way: str) -> None:
    layers = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    check("MoE", [*tokens(), *layers], {"k": 2, "activation_type": activation, "normalize_routing_weights": 1})
    check("MoE", [*tokens(), *layers, *plain(INNER, HIDDEN, 5)], {"k": 2, "activation_type": activation})


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str, way: str) -> None:
    dtype, off = TYPES[name]
    layers = [*plain(INNER, HIDDEN, 1, dtype), *plain(HIDDEN, INNER, 3, dtype)]
    check("MoE", [*tokens(dtype=dtype), *layers], {"k": 2}, {"rtol": off, "atol": off})
    operands = few_bits(INNER, 4, 16)
    operands[1], operands[4] = (operands[k].astype(dtype) for k in (1, 4))  # scales
    operands[2], operands[5] = (operands[k].astype(dtype) for k in (2, 5))
    given = [*tokens(dtype=dtype), *operands]
    expected = np.abs(evaluate("QMoE", *given, domain=MICROSOFT, k=2, block_size=16).astype(np.float32)).max()
    check("QMoE", given, {"k": 2, "block_size": 16}, {"rtol": 0, "atol": float(expected) * off})


@pytest.mark.parametrize("fusion", [0, 1, 2])
def test_swiglu(fusion: int, way: str) -> None:
    operands = few_bits(INNER * (2 if fusion else 1), 4, 16)
    if not fusion:
        operands[6:9] = coded(INNER, HIDDEN, 4, 16, 3)[0]
    attrs = {"k": 2, "block_size": 16, "activation_type": "swiglu", "swiglu_fusion": fusion}
    more = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.5}
    check("QMoE", [*tokens(), *operands], {**attrs, **more})
    check("QMoE", [*tokens(2), *operands], attrs)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_integers(bits: int, block: int, zeros: bool, way: str) -> None:
    attrs = {"k": 2, "expert_weight_bits": bits, "block_size": block, "activation_type": "silu"}
    check("QMoE", [*tokens(), *few_bits(INNER, bits, block, zeros)], attrs)


@pytest.mark.parametrize(("bits", "block"), [(2, 16), (3, 16), (4, 0), (5, 0), (6, 16), (8, 16)])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_zero_points_between_codes(bits: int, block: int, kind: type, way: str) -> None:
    attrs = {"k": 2, "expert_weight_bits": bits, "block_size": block, "activation_type": "silu"}
    check("QMoE", [*tokens(), *few_bits(INNER, bits, block, kind)], attrs)


@pytest.mark.parametrize(("name", "off"), [("float16", 4e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("block", [0, 16])
def test_zero_points_between_codes_in_other_types(name: str, off: float, block: int, way: str) -> None:
    """Nothing of them is lost where codes are numbers of 16 bits."""
    dtype = TYPES[name][0]
    operands = few_bits(INNER, 4, block, dtype)
    operands[:6] = [x if x.dtype == np.uint8 else x.astype(dtype) for x in operands[:6]]
    given, attrs = [*tokens(dtype=dtype), *operands], {"k": 2, "block_size": block}
    expected = np.abs(evaluate("QMoE", *given, domain=MICROSOFT, **attrs).astype(np.float32)).max()
    check("QMoE", given, attrs, {"rtol": 0, "atol": float(expected) * off})


@pytest.mark.parametrize("block", [16, 32])
def test_zero_points_of_each_layer(block: int, way: str) -> None:
    """Three layers, the second with other bits and with codes for zero points."""
    operands, attrs = own_bits(block, np.float32)
    operands[10] = own_bits(block, True)[0][10]
    check("QMoE", [floats(TOKENS, HIDDEN), floats(TOKENS, 8, seed=9), *operands], attrs)


@pytest.mark.parametrize("normalize", [0, 1])
def test_shares_of_another_table(normalize: int, way: str) -> None:
    weigher = np.abs(floats(TOKENS, EXPERTS, seed=4))
    attrs = {"k": 3, "block_size": 16, "normalize_routing_weights": normalize}
    check("QMoE", [*tokens(), *few_bits(INNER, 4, 16), weigher], attrs)


def test_layers_with_bits_of_their_own(way: str) -> None:
    """So tokens are wanted in different orders."""
    first, third = coded(INNER, HIDDEN, 2, 16, 1, True), coded(INNER, HIDDEN, 8, 16, 3, True)
    second = coded(HIDDEN, INNER, 4, 16, 2, True)
    operands = [*first[0], *second[0], *third[0], first[1], second[1], third[1]]
    attrs = {"fc1_expert_weight_bits": 2, "fc3_expert_weight_bits": 8, "block_size": 16, "k": 2}
    check("QMoE", [*tokens(), *operands], {**attrs, "activation_type": "swiglu"})


@pytest.mark.parametrize("kind", SMALL_FLOATS)
def test_floats_of_few_bits(kind: str, way: str) -> None:
    operands, attrs = small_floats(kind)
    check("QMoE", [*tokens(), *operands], attrs)


def test_scales_that_are_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, the least among the smallest that float32 has."""
    monkeypatch.setattr(experts, "_type", lambda node, position: DType.float8_e8m0fnu)
    every = np.arange(256, dtype=np.uint8)[None, :, None]
    nobody: Any = None
    found = experts._scales(torch.from_numpy(every), nobody, position=3)
    np.testing.assert_array_equal(found.numpy(), every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_codes_that_are_no_numbers(way: str) -> None:
    weights = [(floats(EXPERTS, n, k) / 2).astype(ml_dtypes.float8_e4m3fn) for n, k in ((16, HIDDEN), (HIDDEN, 16))]
    weights[1].view(np.uint8)[2, 3, 5:7] = 0x7F, 0xFF
    wholes = [np.ones(EXPERTS, np.float32)] * 2
    given = [*tokens(), weights[0], None, None, weights[1], *[None] * 9, *wholes]
    assert np.isnan(evaluate("QMoE", *given, domain=MICROSOFT, k=2, quant_type="fp8")).any()
    check("QMoE", given, {"k": 2, "quant_type": "fp8"})


def test_of_equals_the_first_is_chosen(way: str) -> None:
    """Zeros of both signs are equal, what is forbidden by minus infinity comes behind, and what is no number last."""
    router = np.array([[0, -0.0, 1, 0, 1], [-np.inf, 2, -np.inf, -np.inf, -3], [7, 7, 7, 7, 7]], np.float32)
    layers = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    for k in (3, EXPERTS):
        check("MoE", [tokens(3)[0], router, *layers], {"k": k})
    weigher = np.arange(15, dtype=np.float32).reshape(3, 5)
    router[0, 2] = np.nan
    check("QMoE", [tokens(3)[0], router, *few_bits(INNER, 4, 16), weigher], {"k": EXPERTS, "block_size": 16})


def test_numbers_of_tokens_that_change(way: str) -> None:
    """One session, from one token to more and back, all of which may like the same experts; and none at all."""
    weights, attrs = few_bits(INNER, 4, 16)[:6], {"k": 2, "block_size": 16}
    given = [floats(1, 3, HIDDEN), floats(3, EXPERTS), *weights]
    model = one_node("QMoE", given, attrs, domain=MICROSOFT, constant=range(2, 8))
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "tokens"
    with rv.load(model, providers=["cuda"], provider_options=options()) as session:
        for count in (1, 20, 3, 0):
            x, router = floats(1, count, HIDDEN, seed=count), floats(count, EXPERTS, seed=count + 1)
            if count == 20:
                router[:] = [0, 3, 0, 9, 0]
            (found,) = session.run({"x0": x, "x1": router}).values()
            np.testing.assert_allclose(found, evaluate("QMoE", x, router, *weights, domain=MICROSOFT, **attrs), **CLOSE)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_weights_that_are_computed(bits: int, way: str) -> None:
    layers = few_bits(INNER, bits, 0, zeros=True)
    given, attrs = [*tokens(), *layers], {"k": 2, "expert_weight_bits": bits}
    model = one_node("QMoE", given, attrs, domain=MICROSOFT)
    with rv.load(model, providers=["cuda"], provider_options=options()) as session:
        (found,) = session.run({f"x{k}": x for k, x in enumerate(given) if x is not None}).values()
    np.testing.assert_allclose(found, evaluate("QMoE", *given, domain=MICROSOFT, **attrs), **CLOSE)


def test_rows_that_are_no_whole_words(way: str) -> None:
    """Six inputs of four bits are three bytes: torch reads those."""
    weights = [coded(n, k, 4, 0, 1)[0] for n, k in ((HIDDEN, 6), (6, HIDDEN))]
    given = [floats(3, 6), floats(3, EXPERTS), *weights[0], *weights[1]]
    check("QMoE", given, {"k": 2})


def test_what_does_not_fit_is_told() -> None:
    layers: list[Any] = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    operands, wrong = few_bits(INNER, 4, 16, True), floats(EXPERTS, INNER, 1)
    cases: list[tuple[str, list[Any], dict[str, Any], str]] = [
        ("MoE", [tokens()[0], floats(4, EXPERTS), *layers], {}, "router"),
        ("MoE", [*tokens(), *layers], {"k": EXPERTS + 1}, "router"),
        ("MoE", [*tokens(), layers[0][:, :, :30], *layers[1:]], {}, "fc1"),
        ("MoE", [*tokens(), *layers[:2], layers[2][:4], layers[3]], {}, "fc2"),
        ("MoE", [*tokens(), *layers[:2], layers[2][:, :30], None], {}, "fc2"),
        ("MoE", [*tokens(), *layers], {"activation_type": "swiglu", "swiglu_fusion": 1}, "fc2"),
        ("QMoE", [*tokens(), operands[0], operands[1][:, :, :1], *operands[2:]], {"block_size": 16}, "fc1 has scales"),
        ("QMoE", [*tokens(), operands[0], operands[1][:, :, :1], *operands[2:]], {"block_size": 32}, "fc2 takes 48"),
        ("QMoE", [*tokens(), *operands[:9], operands[9][:, :, :0], *operands[10:]], {"block_size": 16}, "zero points"),
        ("QMoE", [*tokens(), *operands[:9], wrong, *operands[10:]], {"block_size": 16}, "zero points"),
        ("QMoE", [*tokens(), *operands[:9], wrong[:, 0, 0], *operands[10:]], {"block_size": 16}, "zero points"),
        ("QMoE", [*tokens(), *operands[:9], operands[9][:, 0, 0], *operands[10:]], {"block_size": 16}, "zero points"),
        ("QMoE", [*tokens(), *operands, floats(2, EXPERTS)], {"block_size": 16}, "router_weights"),
    ]
    for op, given, attrs, words in cases:
        while given[-1] is None:
            given.pop()
        model = one_node(op, given, attrs, domain=MICROSOFT, constant=range(2, len(given)))
        with (
            rv.load(model, providers=["cuda"], provider_options=options(), optimization="none") as session,
            pytest.raises(ShapeMismatch, match=words),
        ):
            session.run({"x0": given[0], "x1": given[1]})


def test_what_is_left_to_others() -> None:
    layers = [*plain(INNER, HIDDEN, 1), *plain(HIDDEN, INNER, 3)]
    operands = few_bits(INNER, 4, 16)
    cases: list[tuple[str, list[Any], dict[str, Any], str]] = [
        ("MoE", layers, {"use_sparse_mixer": 1}, "use_sparse_mixer"),
        ("MoE", layers, {"activation_type": "swiglu"}, "swiglu without fc3"),
        ("MoE", layers, {"activation_type": "tanh"}, "'tanh'"),
        ("QMoE", operands, {"weights_prepacked": 1}, "weights_prepacked"),
        ("QMoE", operands, {"expert_weight_bits": 7}, "7 bits"),
        ("QMoE", operands, {"expert_weight_bits": 3}, "a row is a multiple of 8"),
        ("QMoE", operands, {"quant_type": "fp3"}, "'fp3'"),
        ("QMoE", [*operands, *[None] * 3, np.ones(EXPERTS, np.float32)], {}, "activations in float8"),
    ]
    for op, given, attrs, words in cases:
        all_of_it = [*tokens(), *given]
        while all_of_it[-1] is None:
            all_of_it.pop()
        model = one_node(op, all_of_it, attrs, domain=MICROSOFT, constant=range(2, len(all_of_it)))
        with rv.load(model, providers=["cuda", "reference"], provider_options=options()) as session:
            (node,) = session.report.nodes
            assert node.provider == "reference" and words in str(node.declined), node


@needs_triton
@pytest.mark.parametrize(("visits", "count", "block"), [(1, 1, 16), (7, 5, 16), (90, 3, 16), (600, 40, 32)])
def test_visits_sorted_by_expert(visits: int, count: int, block: int) -> None:
    from ranvier.providers.cuda.kernels.visits import most_blocks, sort

    chosen = np.random.default_rng(1).integers(0, count, (visits, 1)).astype(np.int32)
    chosen[chosen == 2] = 1  # an expert that nobody visits
    most = most_blocks(visits, count, block)
    owners = torch.full((most,), 99, dtype=torch.int32, device=TORCH_DEVICE)
    order = torch.full((most * block,), -9, dtype=torch.int32, device=TORCH_DEVICE)
    sort(torch.from_numpy(chosen).to(TORCH_DEVICE), order, owners, count, block)
    wanted: list[int] = []
    experts_of: list[int] = []
    for expert in range(count):
        mine = np.nonzero(chosen[:, 0] == expert)[0].tolist()
        wanted += mine + [-1] * (-len(mine) % block)
        experts_of += [expert] * -(-len(mine) // block)
    assert owners.tolist() == experts_of + [-1] * (most - len(experts_of))
    assert order[: len(wanted)].tolist() == wanted
