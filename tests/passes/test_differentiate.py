"""Every gradient rule against finite differences in float64, run by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.dtypes import of
from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete
from ranvier.passes.differentiate import differentiate
from tests.passes.gradient_tools import Case, check, op_of, r, run

PLAIN = """Neg Abs Exp Sin Cos Tan Sinh Cosh Tanh Atan Asinh Erf Sigmoid Relu Softplus Softsign Identity"""
BENT = """LeakyRelu ThresholdedRelu Elu Celu Selu HardSigmoid HardSwish Mish Gelu"""
UNARY = {
    **dict.fromkeys(PLAIN.split(), (-1.4, 1.4)),
    **dict.fromkeys(BENT.split(), (-4.1, 4.1)),
    **dict.fromkeys(("Log", "Sqrt", "Reciprocal"), (0.3, 3.0)),
    **dict.fromkeys(("Asin", "Acos", "Atanh"), (-0.8, 0.8)),
    "Acosh": (1.2, 3.0),
}
FOLDS = "Sum Mean Max Min Prod L1 L2 LogSum LogSumExp SumSquare"
REDUCTIONS = [f"Reduce{name}" for name in FOLDS.split()]
I64 = np.int64


CASES: dict[str, Case] = {name: Case(op_of(name), [r(7, low=low, high=high)]) for name, (low, high) in UNARY.items()}
CASES |= {
    "Swish": Case(op_of("Swish", alpha=1.3), [r(7)]),
    "CastLike": Case(op_of("CastLike"), [r(4)], [r(2)]),
    "Gelu tanh": Case(op_of("Gelu", approximate="tanh"), [r(7)]),
    "Add": Case(op_of("Add"), [r(3, 4), r(4)]),
    "Sub": Case(op_of("Sub"), [r(3, 1), r(1, 4)]),
    "Mul": Case(op_of("Mul"), [r(2, 3, 4), r(3, 1)]),
    "Div": Case(op_of("Div"), [r(3, 4), r(4, low=0.5)]),
    "Pow": Case(op_of("Pow"), [r(3, 4, low=0.4), r(4)]),
    "Pow by a constant": Case(op_of("Pow", np.float64(3.0)), [r(3, 4)]),
    "Max": Case(op_of("Max"), [r(3, 4), r(4), r(3, 1, seed=4)]),
    "Min": Case(op_of("Min"), [r(3, 4), r(4)]),
    "Sum": Case(op_of("Sum"), [r(3, 4), r(4), r(1)]),
    "Mean": Case(op_of("Mean"), [r(3, 4), r(4)]),
    "Mod": Case(op_of("Mod", fmod=1), [r(6), r(6, low=0.7, seed=3)]),
    "PRelu": Case(op_of("PRelu"), [r(2, 3, 4), r(3, 1)]),
    "Clip": Case(op_of("Clip"), [r(9), np.array(-1.1), np.array(0.9)]),
    "Where": Case(lambda op, x, y, c: op.Where(c, x, y), [r(3, 4), r(4)], [r(3, 4, seed=5) > 0]),
    "Cast": Case(lambda op, x: op.Cast(op.Cast(x, to=11), to=11), [r(4)]),
    "the same twice": Case(lambda op, x: op.Mul(x, op.Exp(x)), [r(5)]),
    "CumSum": Case(op_of("CumSum", np.array(1, I64)), [r(3, 5)]),
    "CumSum back": Case(op_of("CumSum", np.array(0, I64), reverse=1, exclusive=1), [r(3, 5)]),
    "Softmax": Case(op_of("Softmax", axis=1), [r(3, 5, 2)]),
    "LogSoftmax": Case(op_of("LogSoftmax", axis=-1), [r(3, 5)]),
    "Softmax 11": Case(lambda op, x: op.node("Softmax", [x], {"axis": 1}, version=11).output, [r(2, 3, 2)]),
    "TopK": Case(lambda op, x: op.node("TopK", [x, np.array([2], I64)], {"axis": 1}, outputs=2).outputs[0], [r(3, 6)]),
    "Reshape": Case(op_of("Reshape", np.array([4, 3], I64)), [r(3, 4)]),
    "Flatten": Case(op_of("Flatten"), [r(2, 3, 4)]),
    "Squeeze": Case(op_of("Squeeze", np.array([1], I64)), [r(3, 1, 4)]),
    "Unsqueeze": Case(op_of("Unsqueeze", np.array([0, 2], I64)), [r(3, 4)]),
    "Transpose": Case(op_of("Transpose", perm=[2, 0, 1]), [r(2, 3, 4)]),
    "Expand": Case(op_of("Expand", np.array([2, 3, 4], I64)), [r(3, 1)]),
    "Tile": Case(op_of("Tile", np.array([2, 3], I64)), [r(3, 2)]),
    "Concat": Case(op_of("Concat", axis=1), [r(3, 2), r(3, 4), r(3, 1)]),
    "Split": Case(
        lambda op, x: op.Mul(*op.node("Split", [x, np.array([2, 2], I64)], {"axis": 1}, outputs=2).outputs), [r(3, 4)]
    ),
    "Split of which one is used": Case(
        lambda op, x: op.node("Split", [x, np.array([1, 3], I64)], {"axis": 1}, outputs=2).outputs[1], [r(3, 4)]
    ),
    "Slice": Case(lambda op, x: op.Slice(x, *(np.array(v, I64) for v in ([1, 0], [4, 3], [0, 1]))), [r(5, 4)]),
    "Slice by steps": Case(
        lambda op, x: op.Slice(x, *(np.array(v, I64) for v in ([4, 0], [-9, 4], [0, 1], [-2, 3]))), [r(5, 4)]
    ),
    "Pad": Case(op_of("Pad", np.array([1, 0, 0, 2], I64)), [r(3, 4)]),
    "Pad with a value": Case(lambda op, x, v: op.Pad(x, np.array([1, 0, 0, 2], I64), v), [r(3, 4), np.array(0.7)]),
    "Gather": Case(op_of("Gather", np.array([[0, 2], [2, -1]], I64), axis=1), [r(2, 4, 3)]),
    "Gather rows": Case(op_of("Gather", np.array([3, 0, 3], I64)), [r(4, 3)]),
    "GatherElements": Case(op_of("GatherElements", np.array([[0, 2, 2], [1, 0, 1]], I64), axis=0), [r(3, 3)]),
    "GatherND": Case(op_of("GatherND", np.array([[0, 1], [2, 0], [0, 1]], I64)), [r(3, 2)]),
    "ScatterElements": Case(
        lambda op, x, u: op.ScatterElements(x, np.array([[0, 2], [1, 0]], I64), u, axis=1), [r(3, 4), r(2, 2)]
    ),
    "ScatterElements add": Case(
        lambda op, x, u: op.ScatterElements(x, np.array([[0, 0], [1, 1]], I64), u, axis=1, reduction="add"),
        [r(3, 4), r(2, 2)],
    ),
    "ScatterND": Case(lambda op, x, u: op.ScatterND(x, np.array([[2], [0]], I64), u), [r(4, 3), r(2, 3)]),
    "DepthToSpace": Case(op_of("DepthToSpace", blocksize=2), [r(1, 8, 2, 3)]),
    "DepthToSpace CRD": Case(op_of("DepthToSpace", blocksize=2, mode="CRD"), [r(1, 8, 2, 3)]),
    "SpaceToDepth": Case(op_of("SpaceToDepth", blocksize=2), [r(1, 2, 4, 2)]),
    "Trilu": Case(op_of("Trilu", upper=0), [r(3, 4)]),
    "ReverseSequence": Case(op_of("ReverseSequence", np.array([2, 3], I64)), [r(4, 2)]),
    "MatMul": Case(op_of("MatMul"), [r(3, 4), r(4, 2)]),
    "MatMul of batches": Case(op_of("MatMul"), [r(2, 1, 3, 4), r(5, 4, 2)]),
    "MatMul by one matrix": Case(op_of("MatMul"), [r(2, 3, 4), r(4, 2)]),
    "MatMul of vectors": Case(op_of("MatMul"), [r(4), r(4)]),
    "MatMul by a vector": Case(op_of("MatMul"), [r(2, 3, 4), r(4)]),
    "MatMul of a vector": Case(op_of("MatMul"), [r(4), r(2, 4, 3)]),
    "Einsum": Case(op_of("Einsum", equation="bij,bjk->bik"), [r(2, 3, 4), r(2, 4, 2)]),
    "Einsum that sums": Case(op_of("Einsum", equation="ij,jk->k"), [r(3, 4), r(4, 2)]),
    "Conv": Case(op_of("Conv", pads=[1, 1, 0, 1], strides=[2, 1]), [r(2, 3, 5, 4), r(4, 3, 3, 2), r(4)]),
    "Conv in groups": Case(op_of("Conv", group=2, dilations=[2, 1]), [r(2, 4, 6, 4), r(6, 2, 2, 3)]),
    "Conv that leaves a rest": Case(op_of("Conv", strides=[3, 2]), [r(1, 2, 6, 6), r(3, 2, 2, 3)]),
    "Conv depthwise": Case(op_of("Conv", group=3, pads=[1, 1, 1, 1]), [r(1, 3, 4, 4), r(3, 1, 3, 3)]),
    "Conv SAME": Case(op_of("Conv", auto_pad="SAME_UPPER", strides=[2, 2]), [r(1, 2, 5, 5), r(2, 2, 3, 3)]),
    "Conv 1d": Case(op_of("Conv", pads=[2, 1]), [r(2, 2, 6), r(3, 2, 4)]),
    "ConvTranspose": Case(
        op_of("ConvTranspose", strides=[2, 1], pads=[1, 0, 0, 1]), [r(2, 3, 3, 4), r(3, 2, 3, 2), r(2)]
    ),
    "ConvTranspose in groups": Case(
        op_of("ConvTranspose", strides=[2, 2], group=2, output_padding=[1, 0]), [r(1, 4, 3, 3), r(4, 2, 2, 3)]
    ),
    "GlobalAveragePool": Case(op_of("GlobalAveragePool"), [r(2, 3, 4, 2)]),
    "GlobalMaxPool": Case(op_of("GlobalMaxPool"), [r(2, 3, 4, 2)]),
    "MaxPool": Case(op_of("MaxPool", kernel_shape=[2, 3], strides=[2, 1], pads=[0, 1, 0, 1]), [r(2, 2, 4, 5)]),
    "AveragePool": Case(op_of("AveragePool", kernel_shape=[2, 3], strides=[2, 1], pads=[0, 1, 0, 1]), [r(2, 2, 5, 5)]),
    "AveragePool with its pads": Case(
        op_of("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
        [r(1, 2, 5, 5)],
    ),
    "LayerNormalization": Case(op_of("LayerNormalization", axis=-1), [r(3, 6), r(6), r(6)]),
    "LayerNormalization over two": Case(op_of("LayerNormalization", axis=1), [r(2, 3, 4), r(3, 4), r(3, 4)]),
    "InstanceNormalization": Case(op_of("InstanceNormalization"), [r(2, 3, 5), r(3), r(3)]),
    "GroupNormalization": Case(op_of("GroupNormalization", num_groups=2), [r(2, 4, 3), r(4), r(4)], shape=(2, 4, 3)),
    "BatchNormalization": Case(
        lambda op, x, s, c, m, v: op.BatchNormalization(x, s, c, m, v), [r(3, 4, 2), r(4), r(4), r(4), r(4, low=0.5)]
    ),
    "BatchNormalization in training": Case(
        lambda op, x, s, c, m, v: op.node(
            "BatchNormalization", [x, s, c, m, v], {"training_mode": 1}, outputs=3
        ).outputs[0],
        [r(3, 4, 2), r(4), r(4)],
        [r(4), r(4, low=0.5)],
    ),
    "RMSNormalization": Case(op_of("RMSNormalization"), [r(3, 6), r(6)]),
    "MeanVarianceNormalization": Case(op_of("MeanVarianceNormalization"), [r(2, 2, 3, 2)], shape=(2, 2, 3, 2)),
    "RNN": Case(op_of("RNN", hidden_size=3), [r(4, 2, 3), r(1, 3, 3), r(1, 3, 3, seed=2), r(1, 6)]),
    "GRU": Case(op_of("GRU", hidden_size=2), [r(3, 2, 3), r(1, 6, 3), r(1, 6, 2), r(1, 12)]),
    "GRU after": Case(
        op_of("GRU", hidden_size=2, linear_before_reset=1, direction="reverse"),
        [r(3, 2, 3), r(1, 6, 3), r(1, 6, 2), r(1, 12)],
    ),
    "LSTM": Case(
        op_of("LSTM", hidden_size=2, direction="bidirectional"), [r(3, 2, 3), r(2, 8, 3), r(2, 8, 2), r(2, 16)]
    ),
    "LSTM's last state": Case(
        lambda op, *v: op.node("LSTM", [*v[:4], None, *v[4:]], {"hidden_size": 2}, outputs=3).outputs[2],
        [r(3, 2, 3), r(1, 8, 3), r(1, 8, 2), r(1, 16), r(1, 2, 2), r(1, 2, 2, seed=8), r(1, 6)],
    ),
    "Resize": Case(
        lambda op, x: op.Resize(x, None, np.array([1, 1, 2, 1.5], np.float32), mode="linear"), [r(1, 2, 3, 4)]
    ),
    "Resize nearest": Case(
        lambda op, x: op.Resize(x, None, None, np.array([1, 2, 6, 5], I64), mode="nearest"), [r(1, 2, 3, 4)]
    ),
    "Resize cubic": Case(
        lambda op, x: op.Resize(x, None, np.array([1, 1, 0.5, 2], np.float32), mode="cubic", antialias=1),
        [r(1, 1, 6, 4)],
    ),
    "Attention": Case(
        lambda op, q, k, v: op.Attention(q, k, v, is_causal=1),
        [r(1, 2, 3, 4), r(1, 2, 3, 4, seed=1), r(1, 2, 3, 4, seed=2)],
    ),
    "RotaryEmbedding": Case(
        op_of("RotaryEmbedding"), [r(1, 2, 3, 4)], [r(1, 3, 2), r(1, 3, 2, seed=1)], shape=(1, 2, 3, 4)
    ),
    "SwiGLU": Case(op_of("SwiGLU"), [r(3, 4), r(3, 4, seed=1)], shape=(3, 4)),
    "Shrink": Case(op_of("Shrink", lambd=0.5, bias=0.2), [r(9)]),
    "LpNormalization": Case(op_of("LpNormalization", axis=1), [r(3, 4)]),
    "SoftmaxCrossEntropyLoss": Case(op_of("SoftmaxCrossEntropyLoss", np.array([1, 0, 3], I64)), [r(3, 4)]),
    "SoftmaxCrossEntropyLoss with all": Case(
        lambda op, x, y, w: op.SoftmaxCrossEntropyLoss(x, y, w, ignore_index=2, reduction="mean"),
        [r(3, 4, 2)],
        [np.array([[1, 2], [0, 3], [2, 1]]), r(4, low=0.5)],
    ),
    "NegativeLogLikelihoodLoss": Case(
        op_of("NegativeLogLikelihoodLoss", np.array([1, 0, 3], I64), reduction="none"), [r(3, 4)]
    ),
}  # fmt: skip
CASES |= {
    f"{name} {label}": Case(
        lambda op, x, n=name, a=axes, k=keep: op.node(n, [x, np.array(a, I64)], {"keepdims": k}).output,
        [r(3, 4, 2, low=0.3)],
    )
    for name in REDUCTIONS
    for label, axes, keep in [("rows", [1], 1), ("two axes", [0, -1], 0)]
}  # fmt: skip
CASES |= {
    f"Gemm {a}{b}": Case(op_of("Gemm", alpha=0.7, beta=1.3, transA=a, transB=b),
                         [r(*((4, 3) if a else (3, 4))), r(*((2, 4) if b else (4, 2))), r(2)])
    for a in (0, 1) for b in (0, 1)
}  # fmt: skip
PADS = np.array([1, 0, 2, 1], I64)
CASES |= {
    f"Pad {mode}": Case(op_of("Pad", mode=mode), [r(4, 3)], [PADS]) for mode in ("reflect", "edge", "wrap")
}  # fmt: skip
CASES |= {
    "Pad negative": Case(op_of("Pad"), [r(4, 3)], [np.array([-1, 2, 1, -1], I64)]),
    "GatherND batch": Case(op_of("GatherND", batch_dims=1), [r(2, 3, 4)], [np.array([[[1], [0]], [[2], [2]]], I64)]),
    "ReduceProd zeros": Case(op_of("ReduceProd", keepdims=0), [np.array([[1.5, 0.0, 2.0], [0.0, 3.0, 0.0]])],
                             [np.array([1], I64)]),
    "ReduceProd long": Case(op_of("ReduceProd", keepdims=1), [r(1, 70, low=0.9, high=1.1)], [np.array([1], I64)]),
    "Det": Case(op_of("Det"), [r(2, 3, 3)]),
    "Det one": Case(op_of("Det"), [r(2, 1, 1)]),
    "Det singular": Case(op_of("Det"), [np.array([[1.0, 2.0], [2.0, 4.0]])]),
    "LRN": Case(op_of("LRN", size=3, alpha=0.3, beta=0.6, bias=1.5), [r(1, 5, 2, 2)]),
    "LRN even": Case(op_of("LRN", size=4), [r(1, 5, 2, 2)]),
    "LpPool": Case(op_of("LpPool", kernel_shape=[2, 2], strides=[1, 2], pads=[0, 1, 0, 1]), [r(1, 2, 3, 4)]),
    "LpPool 3": Case(op_of("LpPool", kernel_shape=[2], p=3), [r(1, 2, 5)]),
    "GlobalLpPool": Case(op_of("GlobalLpPool", p=3), [r(2, 2, 3, 2)]),
    "DequantizeLinear": Case(lambda op, s, x, z: op.node("DequantizeLinear", [x, s, z], {"axis": 0}).output,
                             [r(3, low=0.5).astype(np.float32).astype(np.float64)],
                             [np.array([[1, 2], [3, 4], [5, 6]], np.int8), np.array([1, 0, 2], np.int8)]),
    **{f"CumProd {k}{e}": Case(op_of("CumProd", exclusive=e, reverse=k),
                               [np.array([[1.5, 0.0, 2.0, 0.7, -1.2], [0.5] * 5])], [np.array(1, I64)])
       for k in (0, 1) for e in (0, 1)},
    "Compress": Case(op_of("Compress", axis=1), [r(2, 4)], [np.array([True, False, True])], (2, 2)),
    "Compress flat": Case(op_of("Compress"), [r(2, 3)], [np.array([False, True, True, False, True])], (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    check(CASES[name])


def test_gradients_of_gradients() -> None:
    """Second derivatives of a small net, by deriving the derived graph."""
    x = r(4, 3)

    def first(op: GraphOps, v: Value, w: Value) -> Value:
        y = op.ReduceSum(op.Tanh(op.MatMul(v, w)), keepdims=0)
        grad = differentiate(op.graph, [(y, None)], [v])[0]
        assert grad is not None
        return op.Mul(grad, grad)

    check(Case(first, [x, r(3, 2)]))


def test_what_does_not_depend_has_none() -> None:
    graph = Graph("g", opsets={"": 21})
    x, y = (graph.add_input(n, TensorType(of(np.float64(0)), (3,))) for n in "xy")
    op = GraphOps(graph, None, "", complete)
    z = op.Floor(op.Add(x, x))
    assert differentiate(graph, [(z, None)], [x, y]) == [None, None]


def test_what_has_no_rule_is_named() -> None:
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (3, 3)))
    op = GraphOps(graph, None, "", complete)
    y = op.Hardmax(x)
    with pytest.raises(NotSupported, match="no gradient is known of Hardmax"):
        differentiate(graph, [(y, None)], [x])


def test_dropout_keeps_its_mask() -> None:
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (50,)))
    op = GraphOps(graph, None, "", complete)
    y, mask = op.node("Dropout", [x, np.float64(0.25), np.array(True)], {"seed": 3}, outputs=2).outputs
    (grad,) = differentiate(graph, [(y, None)], [x])
    assert grad is not None
    graph.outputs = [mask, grad]
    kept, found = run(graph, {"x": np.ones(50)})
    np.testing.assert_allclose(found, kept / 0.75)


def test_dropout_that_nobody_asked_for_its_mask() -> None:
    """The derived graph drops what its forward half dropped."""
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (50,)))
    op = GraphOps(graph, None, "", complete)
    y = op.node("Dropout", [x, np.float64(0.25), np.array(True)], {}).output
    scaled = op.Mul(y, np.float64(2.0))
    (grad,) = differentiate(graph, [(scaled, None)], [x])
    assert grad is not None
    graph.outputs = [scaled, grad]
    dropped, found = run(graph, {"x": np.ones(50)})
    assert 0 < np.count_nonzero(found) < 50
    np.testing.assert_allclose(found, dropped)


@pytest.mark.parametrize("symbolic", [True, False])
def test_sizes_that_are_open(symbolic: bool) -> None:
    """A batch of any size."""
    from ranvier.graph.types import Symbol

    batch = Symbol("batch") if symbolic else 5
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (batch, 4)))
    w = graph.add_input("w", TensorType(of(np.float64(0)), (4, 3)))
    b = graph.add_input("b", TensorType(of(np.float64(0)), (3,)))
    op = GraphOps(graph, None, "", complete)
    loss = op.ReduceMean(op.Softmax(op.Add(op.MatMul(x, w), b), axis=-1), keepdims=0)
    loss = op.Mul(loss, op.ReduceSum(op.Relu(op.MatMul(x, w)), keepdims=0))
    grads = differentiate(graph, [(loss, None)], [w, b])
    graph.outputs = [g for g in grads if g is not None]
    assert [g.shape for g in run(graph, {"x": r(5, 4), "w": r(4, 3), "b": r(3)})] == [(4, 3), (3,)]


# -- control flow ---------------------------------------------------------------------------------------------------


def body_of(*inputs: tuple[str, Any, tuple[int, ...]]) -> tuple[Graph, list[Value], GraphOps]:
    graph = Graph("body", opsets={"": 21})
    values = [graph.add_input(name, TensorType(of(kind), shape)) for name, kind, shape in inputs]
    return graph, values, GraphOps(graph, None, "", complete)


@pytest.mark.parametrize("chosen", [True, False])
def test_if(chosen: bool) -> None:
    def build(op: GraphOps, x: Value, w: Value) -> Value:
        then, _, a = body_of()
        then.outputs = [a.Mul(x, a.Exp(w))]
        other, _, b = body_of()
        other.outputs = [b.Identity(x)]
        node = op.graph.add(
            "If",
            [op.constant(np.asarray(chosen))],
            {"then_branch": then, "else_branch": other},
            [Value("", x.type)],
            version=21,
        )
        return op.Tanh(node.output)

    check(Case(build, [r(3), r(3, seed=1)]))


def test_loop() -> None:
    """A state that is multiplied by what is captured, and pieces that are put side by side."""

    def build(op: GraphOps, x: Value, w: Value) -> Value:
        body, (_, going, state), b = body_of(("i", I64(0), ()), ("go", np.bool_(True), ()), ("s", np.float64(0), (3,)))
        new = b.Tanh(b.Add(b.Mul(state, w), x))
        body.outputs = [b.Identity(going), new, b.Mul(new, new)]
        node = op.graph.add(
            "Loop", [op.constant(np.asarray(4, I64)), None, x], {"body": body},
            [Value("", x.type), Value("", TensorType(of(np.float64(0)), (4, 3)))], version=21,
        )  # fmt: skip
        return op.Add(op.ReduceSum(node.outputs[1], np.array([0], I64), keepdims=0), node.outputs[0])

    check(Case(build, [r(3), r(3, seed=1)]))


def test_loop_that_stops_by_itself() -> None:
    def build(op: GraphOps, x: Value) -> Value:
        body, (_, _, state), b = body_of(("i", I64(0), ()), ("go", np.bool_(True), ()), ("s", np.float64(0), (2,)))
        new = b.Mul(state, np.float64(1.5))
        body.outputs = [b.Less(b.ReduceSum(b.Abs(new), keepdims=0), np.float64(10.0)), new]
        node = op.graph.add("Loop", [None, None, x], {"body": body}, [Value("", x.type)], version=21)
        return node.output

    check(Case(build, [np.array([0.7, -0.4])]))


@pytest.mark.parametrize("backwards", [0, 1])
def test_scan(backwards: int) -> None:
    def build(op: GraphOps, h: Value, x: Value, w: Value) -> Value:
        body, (state, piece), b = body_of(("h", np.float64(0), (2,)), ("x", np.float64(0), (2,)))
        new = b.Tanh(b.Add(b.MatMul(state, w), piece))
        body.outputs = [new, b.Exp(new)]
        node = op.graph.add(
            "Scan", [h, x], {"body": body, "num_scan_inputs": 1, "scan_input_directions": [backwards]},
            [Value("", h.type), Value("", TensorType(of(np.float64(0)), (5, 2)))], version=21,
        )  # fmt: skip
        return op.Add(node.outputs[1], node.outputs[0])

    check(Case(build, [r(2), r(5, 2), r(2, 2)]))


@pytest.mark.parametrize(("axis", "backwards"), [(0, 1), (1, 0), (-1, 1)])
def test_scan_with_results_laid_out_otherwise(axis: int, backwards: int) -> None:
    def build(op: GraphOps, h: Value, x: Value) -> Value:
        body, (state, piece), b = body_of(("h", np.float64(0), (2,)), ("x", np.float64(0), (2,)))
        new = b.Tanh(b.Mul(state, piece))
        body.outputs = [new, b.Exp(new)]
        attrs = {"body": body, "num_scan_inputs": 1, "scan_output_axes": [axis], "scan_output_directions": [backwards]}
        shape = (3, 2) if axis == 0 else (2, 3)
        results = [Value("", h.type), Value("", TensorType(of(np.float64(0)), shape))]
        node = op.graph.add("Scan", [h, x], attrs, results, version=21)
        return op.Mul(node.outputs[1], op.constant(r(*shape, seed=3)))

    check(Case(build, [r(2), r(3, 2)]))


def test_gradient_of_the_gradient_of_a_loop() -> None:
    def build(op: GraphOps, x: Value) -> Value:
        body, (_, going, state), b = body_of(("i", I64(0), ()), ("go", np.bool_(True), ()), ("s", np.float64(0), (2,)))
        body.outputs = [b.Identity(going), b.Sin(b.Mul(state, state))]
        node = op.graph.add(
            "Loop", [op.constant(np.asarray(2, I64)), None, x], {"body": body}, [Value("", x.type)], version=21
        )
        (grad,) = differentiate(op.graph, [(node.output, None)], [x])
        assert grad is not None
        return grad

    check(Case(build, [np.array([0.7, 0.4])]))


def test_the_gradient_of_a_scan_sums_slices_and_not_wholes() -> None:
    """Each backward iteration makes the gradient of its own piece; none has a state of the size of all of them."""
    graph = Graph("g", opsets={"": 21})
    op = GraphOps(graph, None, "", complete)
    double = of(np.float64(0))
    h, x = graph.add_input("h", TensorType(double, (2,))), graph.add_input("x", TensorType(double, (50, 2)))
    body, (state, piece), b = body_of(("h", np.float64(0), (2,)), ("x", np.float64(0), (2,)))
    body.outputs = [b.Tanh(b.Add(state, piece))]
    node = graph.add("Scan", [h, x], {"body": body, "num_scan_inputs": 1}, [Value("", h.type)], version=21)
    (grad,) = differentiate(graph, [(op.ReduceSum(node.output, keepdims=0), None)], [x])
    assert grad is not None
    backwards = [n for n in graph if n.op == "Loop"][-1]
    shapes = [v.type.shape for v in backwards.attrs["body"].inputs if isinstance(v.type, TensorType)]
    assert (50, 2) not in shapes and (2,) in shapes
    assert [n.op for n in graph].count("ScatterND") == 1


def test_errors_name_the_node() -> None:
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(of(np.float64(0)), (4, 4)))
    times = graph.add_input("times", TensorType(of(I64(0)), (2,)))
    op = GraphOps(graph, None, "", complete)
    for name, operands in (("Tile", [x, times]), ("Hardmax", [x])):
        node = op.node(name, operands, {})
        node.name = f"my {name}"
        with pytest.raises(NotSupported) as caught:
            differentiate(graph, [(node.output, None)], [x])
        assert caught.value.node == f"my {name}"
