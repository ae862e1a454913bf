"""Machine code for processors that this one is not: what models need is emitted and compiled for every instruction set
of the table, with all of its extensions and with none, wherever the tests run. Only the running is left to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import ranvier
from ranvier.codegen.launch import KernelSpec
from ranvier.codegen.llvm import compiler, isa, program
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.library import Kernel, kernels, source
from ranvier.ops.own.bitlinear import DOMAIN, pack_codes
from tests.runtime.small_models import model_of
from tests.runtime.tuning.test_alternatives import codes, convolutions, products

FLOAT = TensorProto.FLOAT
MICROSOFT = "com.microsoft"


def _foreign() -> list[Isa]:
    """Instruction sets that cannot be tried here."""
    every = [isa.with_extensions(each, frozenset()) for each in isa.TABLE]
    every += [
        isa.with_extensions(each, frozenset(isa.OPTIONAL[each.name])) for each in every if each.name in isa.OPTIONAL
    ]
    here = [each.key for each in isa.available()]
    return [each for each in every if each.triple != isa.architecture() or each.key not in here]


def _normal(*shape: int) -> np.ndarray[Any, Any]:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / 8).astype(np.float32)


def _io(name: str, *shape: int, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def networks() -> ModelProto:
    """Layers of image networks beside plain convolutions: depthwise, pools, norms, resizing."""
    weights = {"d": _normal(16, 1, 3, 3), "s": np.abs(_normal(16)), "b": _normal(16), "t": _normal(16, 4, 2, 2)}
    nodes = [
        helper.make_node("Conv", ["x", "d"], ["c"], group=16, pads=[1, 1, 1, 1]),
        helper.make_node("InstanceNormalization", ["c", "s", "b"], ["i"]),
        helper.make_node("HardSwish", ["i"], ["h"]),
        helper.make_node("MaxPool", ["h"], ["m"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["m", "t"], ["u"], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["m"], ["g"]),
    ]
    return model_of(nodes, [_io("x", 1, 16, 20, 20)], [_io("u", 1, 4, 20, 20), _io("g", 1, 16, 1, 1)], weights)


def sequences() -> ModelProto:
    """Attention, normalization, activations and recurrent layers."""
    weights = {
        "s": np.abs(_normal(64)),
        "w": _normal(1, 4 * 32, 64),
        "r": _normal(1, 4 * 32, 32),
        "gw": _normal(1, 3 * 32, 64),
        "gr": _normal(1, 3 * 32, 32),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "s"], ["n"]),
        helper.make_node("MultiHeadAttention", ["n", "n", "n"], ["a"], domain=MICROSOFT, num_heads=4),
        helper.make_node("Gelu", ["a"], ["g"], domain=MICROSOFT),
        helper.make_node("Transpose", ["g"], ["t"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "w", "r"], ["l"], hidden_size=32),
        helper.make_node("GRU", ["t", "gw", "gr"], ["k"], hidden_size=32),
        helper.make_node("Softmax", ["a"], ["y"], axis=-1),
        helper.make_node("ReduceMax", ["y"], ["z"], keepdims=0),
    ]
    outputs = [_io("l", 50, 1, 1, 32), _io("k", 50, 1, 1, 32), _io("z")]
    return model_of(nodes, [_io("x", 1, 50, 64)], outputs, weights)


def few_bits() -> ModelProto:
    """Weights of 4 and 8 bits, times float32 rows and times rows that become codes."""
    rng = np.random.default_rng(5)
    weights: dict[str, Any] = {}
    nodes = []
    for k, (bits, level) in enumerate(itertools.product((4, 8), (0, 4))):
        weights[f"w{k}"] = rng.integers(0, 256, (96, 4, 32 * bits // 8)).astype(np.uint8)
        weights[f"s{k}"] = np.abs(_normal(96, 4))
        names = [f"x{k}", f"w{k}", f"s{k}"]
        numbers = {"K": 128, "N": 96, "bits": bits, "block_size": 32, "accuracy_level": level}
        nodes.append(helper.make_node("MatMulNBits", names, [f"y{k}"], domain=MICROSOFT, **numbers))
    inputs = [_io(f"x{k}", 1 + 8 * (k % 2), 128) for k in range(4)]
    return model_of(nodes, inputs, [_io(f"y{k}", 1 + 8 * (k % 2), 96) for k in range(4)], weights)


def algorithms() -> ModelProto:
    """What has emitters of its own."""
    weights = {"k": np.array([5], np.int64), "i": np.array([[1], [3]], np.int64), "axis": np.array(1, np.int64)}
    nodes = [
        helper.make_node("TopK", ["x", "k"], ["t", "p"]),
        helper.make_node("ScatterND", ["x", "i", "u"], ["c"]),
        helper.make_node("CumSum", ["c", "axis"], ["s"]),
        helper.make_node("DFT", ["f", "", "axis"], ["d"]),
        helper.make_node("Det", ["q"], ["e"]),
        helper.make_node("Transpose", ["s"], ["v"], perm=[1, 0]),
    ]
    inputs = [_io("x", 9, 40), _io("u", 2, 40), _io("f", 1, 48, 1), _io("q", 3, 5, 5)]
    outputs = [_io("t", 9, 5), _io("v", 40, 9), _io("d", 1, 48, 2), _io("e", 3)]
    return model_of(nodes, inputs, outputs, weights)


def ternary() -> ModelProto:
    """Weights of -1, 0 and 1 times one row, some and many."""
    rng = np.random.default_rng(9)
    weights: dict[str, Any] = {}
    nodes, inputs, outputs = [], [], []
    for k, rows in enumerate((1, 6, 70)):
        weights[f"w{k}"] = pack_codes(rng.integers(-1, 2, (96, 512)).astype(np.int8))
        weights[f"s{k}"] = np.float32(0.5)
        names = [f"x{k}", f"w{k}", f"s{k}"]
        nodes.append(helper.make_node("BitLinear", names, [f"y{k}"], domain=DOMAIN, K=512, N=96))
        inputs.append(_io(f"x{k}", rows, 512))
        outputs.append(_io(f"y{k}", rows, 96))
    return model_of(nodes, inputs, outputs, weights)


MODELS = [convolutions, products, codes, networks, sequences, few_bits, ternary, algorithms]


@pytest.mark.parametrize("target", _foreign(), ids=lambda each: f"{each.triple} {each.key}")
@pytest.mark.parametrize(
    ("model", "precision"), [*((m, "float32") for m in MODELS), (convolutions, "bf16"), (products, "bf16")]
)
def test_kernels_compile(
    model: Callable[[], ModelProto], precision: str, target: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: set[str] = set()
    wrong: list[Exception] = []

    def without_loading(specs: Iterable[KernelSpec], chosen: Isa) -> dict[KernelSpec, Kernel]:
        if chosen is not target:  # the driver, which is the same for all and stays when this test is over
            return kernels(specs, chosen)
        found: dict[KernelSpec, Kernel] = {}
        for spec in specs:
            try:
                code = compiler.compile_object(source(spec, chosen), chosen)
            except Exception as error:
                wrong.append(error)  # the session would go on without machine code
                raise
            assert int.from_bytes(code[18:20], "little") == {"x86_64": 62, "aarch64": 183}[target.triple]
            compiled.add(spec.name)
            found[spec] = Kernel(spec.name, 64, None)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(isa, "chosen", lambda _name: target)
    monkeypatch.setattr(program, "kernels", without_loading)
    with ranvier.load(model(), providers=["cpu"], precision=precision, threads=2) as session:
        assert {each.provider for each in session.report.nodes} == {"cpu"}
        assert not wrong
        assert len(compiled) >= len(session.report.nodes) / 2, "the model was not lowered"
