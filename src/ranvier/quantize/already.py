"""Which layers of a model have weights in codes already, and which are in float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ranvier.graph.ir import Graph, Node, Value

# where the weights of a layer stand among its inputs
_WEIGHTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "MatMul": (0, 1),
    "Gemm": (0, 1),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "MoE": (2, 4, 6),
}
_CODED = frozenset(
    (
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "MatMulInteger16",
        "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "QGemm",
        "QAttention",
        "QMoE",
        "MatMulNBits",
        "MatMulBnb4",
        "MatMulFpQ4",
        "MatMulBlockQuantizedFp8Weight",
        "MatMulBlockQuantizedFp4Weight",
        "BitLinear",
    )
)
_MOVES = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))  # weights on their way


def told(graph: Graph) -> str:
    """What is to be said of a model whose layers have codes already; nothing where none has."""
    coded = Counter(_called(node) for node in _nodes(graph) if _is_coded(node))
    if not coded:
        return ""
    kinds = ", ".join(f"{count} {name}" for name, count in coded.most_common())
    left = sum(_in_float(node) for node in _nodes(graph))
    return (
        f"it is quantized already: {_layers(coded.total())} in codes ({kinds}), {left or 'none'} left in float; "
        "quantize the model it was made from"
    )


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _nodes(graph: Graph) -> Iterator[Node]:
    return (node for each in graph.all_graphs() for node in each)


def _called(node: Node) -> str:
    return node.op if node.op in _CODED else f"{node.op} behind DequantizeLinear"


def _is_coded(node: Node) -> bool:
    return node.op in _CODED or any(_is_read_back(value) for value in _weights(node))


def _in_float(node: Node) -> bool:
    return not _is_coded(node) and any(value.const is not None for value in map(_origin, _weights(node)))


def _weights(node: Node) -> list[Value]:
    return [value for at in _WEIGHTS.get(node.op, ()) if (value := node.input(at)) is not None]


def _origin(value: Value) -> Value:
    """What a value is before it is turned and cast."""
    while value.producer is not None and value.producer.op in _MOVES:
        before = value.producer.inputs[0]
        if before is None:
            break
        value = before
    return value


def _is_read_back(value: Value) -> bool:
    """Whether these are constant codes, or constants made codes of, that are numbers again."""
    value = _origin(value)
    for op in ("DequantizeLinear", "QuantizeLinear"):
        if value.producer is None or value.producer.op != op:
            return False
        before = value.producer.inputs[0]
        if before is None:
            return False
        value = _origin(before)
        if value.const is not None:
            return True
    return False
