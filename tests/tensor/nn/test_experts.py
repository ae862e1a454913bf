"""Layers of experts whose weights are codes, against a plain definition of what they compute."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import DTypeMismatch, InvalidConfig, InvalidInput, ShapeMismatch
from ranvier.quantize import Integers, Quantized, scheme
from ranvier.weights import WeightLoader, save_safetensors
from ranvier.weights.quantized import quantized_layers

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
EXPERTS, FEATURES, INNER, CHOSEN = 6, 64, 96, 2
FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def numbers(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def stack(
    outputs: int, inputs: int, bits: int = 4, group: int = 32, zeros: str = "", experts: int = EXPERTS
) -> Quantized:
    """Codes of all experts in one tensor, as GGUF files have them."""
    codes = RNG.integers(0, 1 << bits, (experts, outputs, inputs)).astype(np.uint8)
    groups = (experts, outputs, inputs // group)
    scales = RNG.uniform(0.01, 0.03, groups).astype(np.float32)
    if zeros == "between":
        taken = RNG.uniform(0, (1 << bits) - 1, groups).astype(np.float32)
    else:
        taken = RNG.integers(0, 1 << bits, groups).astype(np.uint8)
    return Quantized("blocks", codes, scales, (1, 1, group), bits, taken, axis=2)


def levels(outputs: int, inputs: int, table: Array, powers: bool) -> Quantized:
    codes = RNG.integers(0, 16, (EXPERTS, outputs, inputs)).astype(np.uint8)
    groups = (EXPERTS, outputs, inputs // 32)
    scales = 2.0 ** RNG.integers(-6, -3, groups) if powers else RNG.uniform(0.01, 0.05, groups)
    return Quantized("levels", codes, scales.astype(np.float32), (1, 1, 32), 4, table=table, axis=2)


def each(outputs: int, inputs: int, name: str, **options: Any) -> list[Quantized]:
    """Codes of one expert after the other, as checkpoints with a linear layer for each have them."""
    return [scheme(name, **options).quantize(0.2 * numbers(outputs, inputs)) for _ in range(EXPERTS)]


def decoded(layer: Quantized | list[Quantized]) -> Array:
    return layer.dequantize() if isinstance(layer, Quantized) else np.stack([m.dequantize() for m in layer])


def plain(
    x: Array, router: Array, up: Array, down: Array, gate: Array | None, activation: str = "silu", *,
    normalize: bool = True, shares: Array | None = None, biases: tuple[Any, Any, Any] = (0.0, 0.0, 0.0),
    alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf,
) -> Array:  # fmt: skip
    """One token after the other, one expert after the other, in float64."""
    functions = {
        "silu": lambda v: v / (1 + np.exp(-alpha * v)),
        "relu": lambda v: np.maximum(v, 0),
        "gelu": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
        "identity": lambda v: v,
    }
    b_up, b_down, b_gate = (np.broadcast_to(b, (EXPERTS, 1)) if np.ndim(b) == 0 else b for b in biases)
    made = np.zeros_like(x, np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        likes = router[t].astype(np.float64)
        chosen = np.argsort(-likes, kind="stable")[:CHOSEN]
        part = np.exp(likes - likes.max()) if shares is None else shares[t]
        part = part / part.sum() if shares is None else part
        part = part[chosen] / part[chosen].sum() if normalize else part[chosen]
        for share, e in zip(part, chosen):
            line = up[e] @ row + b_up[e]
            if gate is None:
                inner = functions[activation](line)
            else:
                inner = functions[activation](np.minimum(gate[e] @ row + b_gate[e], limit))
                inner = inner * (np.clip(line, -limit, limit) + beta)
            made[t] += share * (down[e] @ inner + b_down[e])
    return made


def check(found: rv.Tensor, wanted: Array, off: float = 2e-4) -> None:
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found.numpy().reshape(wanted.shape), wanted, atol=off * scale)


KINDS = {
    "4 bits": lambda n, k: stack(n, k),
    "zeros between codes": lambda n, k: stack(n, k, zeros="between"),
    "2 bits in groups of 16": lambda n, k: stack(n, k, bits=2, group=16),
    "8 bits of rows": lambda n, k: each(n, k, "int8", granularity="channel"),
    "3 bits": lambda n, k: stack(n, k, bits=3),
    "5 bits": lambda n, k: stack(n, k, bits=5, zeros="between"),
    "6 bits in groups of 16": lambda n, k: stack(n, k, bits=6, group=16),
    "float4": lambda n, k: levels(n, k, FLOAT4, powers=True),
    "float4 with other scales": lambda n, k: levels(n, k, FLOAT4, powers=False),
    "levels of 8 bits": lambda n, k: levels(n, k, np.linspace(-120, 120, 16).round().astype(np.float32), powers=False),
    "float8": lambda n, k: each(n, k, "fp8"),
    "float8 in squares": lambda n, k: each(n, k, "fp8", granularity="block", group=32),
    "ternary": lambda n, k: each(n, k, "ternary"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gated_experts(kind: str) -> None:
    make = KINDS[kind]
    up, gate, down = make(INNER, FEATURES), make(INNER, FEATURES), make(FEATURES, INNER)
    layer = nn.QuantizedExperts(up, down, gate, top_k=CHOSEN)
    compiled = rv.jit(lambda x, router: layer(x, router))
    for shape in ((1,), (5,), (3, 7)):
        x, router = numbers(*shape, FEATURES), numbers(*shape, EXPERTS)
        flat = x.reshape(-1, FEATURES), router.reshape(-1, EXPERTS)
        wanted = plain(*flat, decoded(up), decoded(down), decoded(gate)).reshape(*shape, FEATURES)
        for run in (layer, compiled):
            check(run(rv.Tensor(x), rv.Tensor(router)), wanted)
    assert layer.nbytes < 0.4 * 4 * 3 * EXPERTS * FEATURES * INNER
    assert f"num_experts={EXPERTS}, top_k={CHOSEN}" in repr(layer)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_keep_their_bits(bits: int) -> None:
    up, down = stack(INNER, FEATURES, bits, zeros="between"), stack(FEATURES, INNER, bits)
    layer = nn.QuantizedExperts(up, down, top_k=CHOSEN, activation="relu")
    assert layer.fc1_codes.shape == (EXPERTS, INNER, FEATURES * bits // 8)
    assert layer.fc2_codes.shape == (EXPERTS, FEATURES, INNER * bits // 8)
    assert layer.fc2_zeros.shape == (EXPERTS, FEATURES, -(-INNER // 32 * bits // 8))
    signed = replace(down, codes=(down.codes - (1 << (bits - 1))).astype(np.int8), zeros=None)
    assert nn.QuantizedExperts(up, signed, top_k=CHOSEN, activation="relu")._buffers.get("fc2_zeros") is None


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_activations_and_shares(activation: str, gated: bool, normalize: bool) -> None:
    up, down = stack(INNER, FEATURES), stack(FEATURES, INNER, bits=8, group=16)
    gate = stack(INNER, FEATURES, zeros="between") if gated else None
    layer = nn.QuantizedExperts(up, down, gate, top_k=CHOSEN, activation=activation, normalize=normalize)
    x, router, shares = numbers(4, FEATURES), numbers(4, EXPERTS), RNG.uniform(0.1, 1, (4, EXPERTS)).astype(np.float32)
    weights = decoded(up), decoded(down), None if gate is None else decoded(gate)
    check(layer(x, router), plain(x, router, *weights, activation, normalize=normalize))
    check(layer(x, router, shares), plain(x, router, *weights, activation, normalize=normalize, shares=shares))


@pytest.mark.parametrize("fused", [None, "turns", "halves"])
@pytest.mark.parametrize("kind", ["float4", "4 bits"])
def test_swiglu_of_gpt_oss(fused: Any, kind: str) -> None:
    both, down = KINDS[kind](2 * INNER, FEATURES), KINDS[kind](FEATURES, INNER)
    biases = numbers(EXPERTS, 2 * INNER), numbers(EXPERTS, FEATURES)
    first = slice(0, None, 2) if fused != "halves" else slice(0, INNER)
    second = slice(1, None, 2) if fused != "halves" else slice(INNER, None)
    form = {"alpha": 1.702, "beta": 1.0, "limit": 2.0}
    if fused:
        layer = nn.QuantizedExperts(
            both, down, top_k=CHOSEN, fused=fused, up_bias=biases[0], down_bias=biases[1], **form
        )
    else:
        gate, up = (
            replace(
                both,
                codes=both.codes[:, rows],
                scales=both.scales[:, rows],
                zeros=None if both.zeros is None else both.zeros[:, rows],
            )
            for rows in (first, second)
        )
        apart = {"gate_bias": biases[0][:, first], "up_bias": biases[0][:, second], "down_bias": biases[1]}
        layer = nn.QuantizedExperts(up, down, gate, top_k=CHOSEN, **apart, **form)
    x, router, weight = numbers(5, FEATURES), numbers(5, EXPERTS), decoded(both)
    given = (biases[0][:, second], biases[1], biases[0][:, first])
    wanted = plain(x, router, weight[:, second], decoded(down), weight[:, first], biases=given, **form)
    check(layer(x, router), wanted)


def test_experts_of_a_checkpoint_of_gpt_oss(tmp_path: Path) -> None:
    """Its tensors as they are in the file, read by their names, against numbers made of the bytes here."""
    held, numbers_of = {}, {}
    for name, outputs, inputs in (("gate_up_proj", 2 * INNER, FEATURES), ("down_proj", FEATURES, INNER)):
        blocks = RNG.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16)).astype(np.uint8)
        exponents = RNG.integers(120, 124, (EXPERTS, outputs, inputs // 32)).astype(np.uint8)
        held[f"mlp.experts.{name}_blocks"], held[f"mlp.experts.{name}_scales"] = blocks, exponents
        pairs = np.stack([FLOAT4[blocks & 15], FLOAT4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:3], 32)
        numbers_of[name] = (pairs * 2.0 ** (exponents.astype(np.float64) - 127)[..., None]).reshape(
            *blocks.shape[:2], -1
        )
    save_safetensors(tmp_path / "m.safetensors", held)
    layers = quantized_layers(WeightLoader(offline=True).open(tmp_path / "m.safetensors"), {"quant_method": "mxfp4"})
    up, down = (layers[f"mlp.experts.{name}"]() for name in ("gate_up_proj", "down_proj"))
    form = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
    layer = nn.QuantizedExperts(up, down, top_k=CHOSEN, fused="turns", **form)
    assert layer.nbytes < 0.55 * 3 * EXPERTS * FEATURES * INNER  # four bits, and eight for 32
    x, router, both = numbers(5, FEATURES), numbers(5, EXPERTS), numbers_of["gate_up_proj"]
    check(layer(x, router), plain(x, router, both[:, 1::2], numbers_of["down_proj"], both[:, ::2], **form))


def test_a_gate_of_another_kind_is_a_layer_of_its_own() -> None:
    up, gate, down = stack(INNER, FEATURES), stack(INNER, FEATURES, bits=8), stack(FEATURES, INNER)
    form = {"alpha": 1.5, "beta": 0.5, "limit": 1.0}
    layer = nn.QuantizedExperts(up, down, gate, top_k=CHOSEN, **form)
    assert layer.fc3_codes.shape[2] == FEATURES // 2 and layer.fc1_codes.shape[2] == FEATURES
    x, router = numbers(5, FEATURES), numbers(5, EXPERTS)
    check(layer(x, router), plain(x, router, decoded(up), decoded(down), decoded(gate), **form))


@pytest.mark.parametrize(("bits", "zeros"), [(4, ""), (3, ""), (5, "between"), (6, "")])
def test_gradients_go_through_to_inputs_router_and_biases(bits: int, zeros: str) -> None:
    """The codes are inputs of the graph, whose bits it takes apart."""
    shapes = (INNER, FEATURES), (FEATURES, INNER), (INNER, FEATURES)
    layers = [stack(*shape, bits, zeros=zeros) for shape in shapes]
    layer = nn.QuantizedExperts(*layers, top_k=CHOSEN, down_bias=numbers(EXPERTS, FEATURES))
    x, router, along = numbers(3, FEATURES), 3 * numbers(3, EXPERTS), numbers(3, FEATURES)
    weights = [decoded(each) for each in layers]
    biases = (0.0, layer.fc2_bias.numpy().astype(np.float64), 0.0)

    def value(x: Array, router: Array, added: Array | float = 0.0) -> float:
        given = (0.0, biases[1] + added, 0.0)
        return float((plain(x, router, weights[0], weights[1], weights[2], biases=given) * along).sum())

    for run in (lambda f: f, rv.jit):
        found = run(rv.grad(lambda x, r: (layer(x, r) * along).sum(), argnums=(0, 1)))(rv.Tensor(x), rv.Tensor(router))
        for k, (given, got) in enumerate(zip((x, router), found)):
            step = np.zeros(given.shape)
            step[1, 2] = 1e-4
            moved = [(x + s * step, router) if k == 0 else (x, router + s * step) for s in (1, -1)]
            slope = (value(*moved[0]) - value(*moved[1])) / 2e-4
            assert math.isclose(float(got.numpy()[1, 2]), slope, rel_tol=1e-3, abs_tol=1e-3)
    (layer(rv.Tensor(x), rv.Tensor(router)) * along).sum().backward()
    step = np.zeros(layer.fc2_bias.shape)
    step[int(router[0].argmax()), 4] = 1e-4
    slope = (value(x, router, step) - value(x, router, -step)) / 2e-4
    got = layer.fc2_bias.grad.numpy()[int(router[0].argmax()), 4]
    assert math.isclose(float(got), slope, rel_tol=1e-3, abs_tol=1e-3)


def test_a_router_learns_beside_codes_that_stay() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(FEATURES, EXPERTS)
            self.experts = nn.QuantizedExperts(stack(INNER, FEATURES), stack(FEATURES, INNER), top_k=CHOSEN)

        def forward(self, x: Any) -> rv.Tensor:
            return self.experts(x, self.router(x))

    model, x = Mixed(), rv.Tensor(numbers(16, FEATURES))
    wanted = rv.Tensor(0.1 * numbers(16, FEATURES))
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    opt = optim.Adam(model.parameters(), lr=0.05)

    @rv.jit
    def step(x: rv.Tensor, wanted: rv.Tensor) -> rv.Tensor:
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), wanted)
        loss.backward()
        opt.step()
        return loss

    losses = [float(step(x, wanted)) for _ in range(20)]
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.state_dict().items() if not np.array_equal(value.numpy(), before[name])}
    assert changed == {"router.weight", "router.bias"}


def test_8_bit_activations() -> None:
    layers = stack(INNER, FEATURES), stack(FEATURES, INNER), stack(INNER, FEATURES)
    exact, rounded = (nn.QuantizedExperts(*layers, top_k=CHOSEN, activations=a) for a in ("float32", "int8"))
    x, router = numbers(8, FEATURES), numbers(8, EXPERTS)
    wanted, found = exact(x, router).numpy(), rounded(x, router).numpy()
    assert 1e-4 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.03


def test_16_bits() -> None:
    layers = [stack(INNER, FEATURES), stack(FEATURES, INNER), stack(INNER, FEATURES)]
    layer = nn.QuantizedExperts(*layers, top_k=CHOSEN, down_bias=numbers(EXPERTS, FEATURES))
    x, router = numbers(4, FEATURES), np.round(numbers(4, EXPERTS), 1)
    wanted = layer(x, router).numpy()
    found = layer.half()(rv.Tensor(x.astype(np.float16)), rv.Tensor(router.astype(np.float16)))
    assert found.dtype.name == "float16" and layer.fc1_codes.dtype.name == "uint8"
    off = found.numpy().astype(np.float32) - wanted
    assert np.abs(off).max() < 0.02 * np.abs(wanted).max()


def test_copies_and_saved_states() -> None:
    layers = [stack(INNER, FEATURES), stack(FEATURES, INNER)]
    first = nn.QuantizedExperts(*layers, top_k=CHOSEN, up_bias=numbers(EXPERTS, INNER))
    second = nn.QuantizedExperts(
        stack(INNER, FEATURES), stack(FEATURES, INNER), top_k=CHOSEN, up_bias=numbers(EXPERTS, INNER)
    )
    x, router = numbers(3, FEATURES), numbers(3, EXPERTS)
    wanted = first(x, router).numpy()
    assert not np.allclose(second(x, router).numpy(), wanted)
    second.load_state_dict(first.state_dict())
    for made in (second, copy.deepcopy(first)):
        np.testing.assert_array_equal(made(x, router).numpy(), wanted)


@pytest.mark.parametrize("kind", ["4 bits", "8 bits of rows", "3 bits", "6 bits in groups of 16"])
def test_exported_experts_are_one_operator_that_others_read(kind: str, tmp_path: Path) -> None:
    layers = [KINDS[kind](*shape) for shape in ((INNER, FEATURES), (FEATURES, INNER), (INNER, FEATURES))]
    layer, path = nn.QuantizedExperts(*layers, top_k=CHOSEN), tmp_path / "experts.onnx"
    example = rv.Tensor(numbers(3, FEATURES)), rv.Tensor(numbers(3, EXPERTS))
    names = ["x", "router"]
    rv.export(layer.eval(), example, path, input_names=names, dynamic_axes={name: {0: "tokens"} for name in names})
    assert "QMoE" in {node.op_type for node in onnx.load(path).graph.node}
    x, router = numbers(9, FEATURES), numbers(9, EXPERTS)
    wanted, feeds = layer(x, router).numpy(), {"x": x, "router": router}
    (found,) = rv.load(path).run(feeds).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    (found,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)  # beside 8-bit codes it rounds activations


def test_what_does_not_fit() -> None:
    up, down = stack(INNER, FEATURES), stack(FEATURES, INNER)

    def made(
        up: Any = up, down: Any = down, gate: Any = None, top_k: int = CHOSEN, **options: Any
    ) -> nn.QuantizedExperts:
        return nn.QuantizedExperts(up, down, gate, top_k=top_k, **options)

    matrix = each(INNER, FEATURES, "int8")[0]
    wider = each(INNER, FEATURES + 32, "int8")[0]
    threes = Integers(4, True, "group", 3).quantize(numbers(INNER, FEATURES))
    of_rows = {"up": each(INNER, FEATURES, "fp8", granularity="channel"), "down": each(FEATURES, INNER, "fp8")}
    for refused, options, said in (
        (ShapeMismatch, {"up": matrix}, "experts, out, in"),
        (ShapeMismatch, {"up": stack(INNER + 32, FEATURES)}, "which"),
        (ShapeMismatch, {"up": stack(INNER, FEATURES, experts=5)}, "which"),
        (ShapeMismatch, {"gate": stack(INNER, FEATURES + 32)}, "one shape"),
        (ShapeMismatch, {"up": [*each(INNER, FEATURES, "int8")[1:], wider]}, "one shape"),
        (ShapeMismatch, {"up_bias": numbers(INNER)}, "a bias of shape"),
        (InvalidInput, {"top_k": 0}, "0 of 6"),
        (InvalidInput, {"top_k": 7}, "7 of 6"),
        (InvalidInput, {"activation": "swish"}, "swish"),
        (InvalidInput, {"fused": "both"}, "both"),
        (InvalidInput, {"fused": "turns", "gate": up}, "second time"),
        (InvalidInput, {"limit": 7.0}, "with a gate"),
        (InvalidInput, {"gate_bias": numbers(EXPERTS, INNER)}, "no gate"),
        (InvalidInput, {"gate": up, "up_bias": numbers(EXPERTS, INNER)}, "both a bias"),
        (InvalidInput, {"activations": "int4"}, "int4"),
        (InvalidConfig, {"up": each(INNER, FEATURES, "nf4", group=64)}, "no integers"),
        (InvalidConfig, {"up": [threes] * EXPERTS}, "multiple of"),
        (InvalidConfig, of_rows, "squares"),
    ):
        with pytest.raises(refused, match=said):
            made(**options)
    layer = made()
    with pytest.raises(DTypeMismatch):
        layer(np.zeros((2, FEATURES), np.int64), numbers(2, EXPERTS))
    with pytest.raises(ShapeMismatch, match="features"):
        layer(numbers(2, FEATURES + 1), numbers(2, EXPERTS))
    with pytest.raises(ShapeMismatch, match="router"):
        layer(numbers(2, FEATURES), numbers(3, EXPERTS))
    with pytest.raises(ShapeMismatch, match="shares"):
        layer(numbers(2, FEATURES), numbers(2, EXPERTS), numbers(2, EXPERTS - 1))
