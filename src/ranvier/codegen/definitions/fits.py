"""Do the operands of a node belong together?

Generated code trusts the sizes it was made for: an operand smaller than another one promises would be read beyond its
end. So shapes are looked at before a node is lowered. What does not fit is left to the reference, which refuses it in
its own words; nothing here needs to say more than that something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ranvier.codegen.definitions.defs import Shape
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.ops.nn.window import output_sizes, per_axis, resolve_pads
from ranvier.varying import varies

Rule = Callable[[NodeView], bool]
_RULES: dict[tuple[str, str], Rule] = {}
# operators whose axes count otherwise than those of the first operand, or do not matter
_OWN_AXES = frozenset({"OneHot", "Flatten", "Unsqueeze", "QuantizeLinear", "DequantizeLinear", "QLinearConcat"})


def fits(n: NodeView) -> bool:
    """False where shapes or axes contradict each other."""
    if not _axes_exist(n):
        return False
    rule = _RULES.get((n.node.domain, n.op))
    return rule is None or rule(n)


def _rule(*ops: str, domain: str = "") -> Callable[[Rule], Rule]:
    def declare(rule: Rule) -> Rule:
        _RULES.update({(domain, op): rule for op in ops})
        return rule

    return declare


def _is(n: NodeView, k: int, *shape: int) -> bool:
    """Is operand ``k`` of this shape, or left out?"""
    return not n.has(k) or n.shape(k) == shape


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# -- axes -----------------------------------------------------------------------------------------------------------


def _axes_exist(n: NodeView) -> bool:
    if not n.has(0) or n.op in _OWN_AXES:
        return True
    rank = n.rank(0)
    for name in ("axis", "axes"):
        given = n.attrs.get(name)
        if given is None:
            continue
        axes = [int(a) for a in (given if isinstance(given, Sequence) else [given])]
        if any(not -rank <= a < rank for a in axes) or len({a % max(1, rank) for a in axes}) < len(axes):
            return False
    return True


@_rule(
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare", "Squeeze"),
)
def _axes_operand(n: NodeView) -> bool:
    axes, rank = n.axes(), n.rank(0)
    if axes is None:
        return True
    return all(-rank <= a < rank for a in axes) and len({a % rank for a in axes}) == len(axes)


@_rule("Transpose")
def _transpose(n: NodeView) -> bool:
    perm = n.attr("perm")
    return perm is None or sorted(perm) == list(range(n.rank(0)))


@_rule("Reshape")
def _reshape(n: NodeView) -> bool:
    asked = n.ints(1) if n.has(1) else n.attr("shape", n.out_shape())
    return math.prod(n.shape(0)) == math.prod(n.out_shape()) and len(asked) == len(n.out_shape())


@_rule("ArgMax", "ArgMin", "GlobalMaxPool", "GlobalAveragePool")
def _not_empty(n: NodeView) -> bool:
    return 0 not in n.shape(0) or 0 in n.out_shape()  # of no images at all there is nothing to find


@_rule("SpaceToDepth")
def _blocks(n: NodeView) -> bool:
    size = int(n.attr("blocksize", 0))
    return n.rank(0) == 4 and size > 0 and n.shape(0)[2] % size == n.shape(0)[3] % size == 0


@_rule("DepthToSpace")
def _depth(n: NodeView) -> bool:
    size = int(n.attr("blocksize", 0))
    return n.rank(0) == 4 and size > 0 and n.shape(0)[1] % (size * size) == 0


@_rule("Range")
def _range(n: NodeView) -> bool:
    numbers = [n.need(k).reshape(-1)[0] for k in range(3)]
    return all(varies(x) or math.isfinite(float(x)) for x in numbers) and bool(numbers[2] != 0)


@_rule("Split")
def _split(n: NodeView) -> bool:
    sizes = n.axes(1, "split")
    axis = n.attr("axis", 0)
    return sizes is None or (len(sizes) == len(n.outputs) and min(sizes) >= 0 and sum(sizes) == n.shape(0)[axis])


@_rule("Einsum")
def _einsum(n: NodeView) -> bool:
    """A letter means one size, apart from those of size 1."""
    terms = _text(n.attr("equation", "")).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for k, term in enumerate(terms):
        letters, dots, after = term.partition("...")
        here = dict.fromkeys(term.replace("...", ""))
        if dots:
            places = [*zip(letters, n.shape(k)), *zip(reversed(after), reversed(n.shape(k)))]
            known = len(letters) + len(after) <= n.rank(k)
        else:
            places, known = list(zip(term, n.shape(k))), len(term) == n.rank(k)
        own: dict[str, int] = {}
        if not known or any(own.setdefault(letter, size) != size for letter, size in places) or len(own) != len(here):
            return False
        if any(1 not in (sizes.setdefault(x, d), d) and sizes[x] != d for x, d in own.items()):
            return False
    return True


# -- gathering ------------------------------------------------------------------------------------------------------


@_rule("GatherElements")
def _gather_elements(n: NodeView) -> bool:
    if n.rank(0) != n.rank(1) or n.rank(0) == 0:
        return False
    axis = n.attr("axis", 0) % n.rank(0)
    return all(k == axis or i <= d for k, (d, i) in enumerate(zip(n.shape(0), n.shape(1))))


@_rule("GatherND")
def _gather_nd(n: NodeView) -> bool:
    batch = int(n.attr("batch_dims", 0))
    data, index = n.shape(0), n.shape(1)
    if not index or not 0 <= batch < min(len(data), len(index)) or data[:batch] != index[:batch]:
        return False
    return index[-1] <= len(data) - batch


# -- windows --------------------------------------------------------------------------------------------------------


def _filters(n: NodeView, k: int) -> bool:
    """Are the filters of the image's rank, with sizes as said and, for each group, the image's channels?"""
    filters, kernel = n.shape(k), n.shape(k)[2:]
    given, group = n.attr("kernel_shape"), int(n.attr("group", 1))
    if n.rank(0) != len(filters) or group < 1:
        return False
    channels = filters[0] if n.op == "ConvTranspose" else filters[1] * group
    if n.shape(0)[1] != channels or filters[0] % group:
        return False
    return bool(kernel) and 0 not in kernel and (given is None or tuple(given) == kernel)


@_rule("Conv", "ConvTranspose", "DeformConv")
@_rule("FusedConv", domain="com.microsoft")
def _conv(n: NodeView) -> bool:
    if n.op == "DeformConv" and not _is(n, 3, n.shape(1)[0]):
        return False
    return _filters(n, 1)


@_rule("ConvInteger")
def _conv_integer(n: NodeView) -> bool:
    return _filters(n, 1) and _single(n, 2) and _per_filter(n, 3, n.shape(1)[0])


@_rule("QLinearConv")
def _qlinear_conv(n: NodeView) -> bool:
    filters = n.shape(3)[0]
    singles = all(_single(n, k) for k in (1, 2, 6, 7))
    return (
        _filters(n, 3) and singles and _per_filter(n, 4, filters) and _per_filter(n, 5, filters) and _is(n, 8, filters)
    )


def _single(n: NodeView, k: int) -> bool:
    return not n.has(k) or math.prod(n.shape(k)) == 1


def _per_filter(n: NodeView, k: int, filters: int) -> bool:
    return _single(n, k) or n.shape(k) == (filters,)


@_rule("MaxUnpool")
def _unpool(n: NodeView) -> bool:
    return n.shape(0) == n.shape(1) and _is(n, 2, n.rank(0))


@_rule("MaxPool", "AveragePool", "LpPool")
@_rule("NhwcMaxPool", "QLinearAveragePool", domain="com.microsoft")
def _pool(n: NodeView) -> bool:
    """Raises what the reference would, where a window does not fit."""
    rank = n.rank(0) - 2
    first = 1 if n.op == "NhwcMaxPool" or n.attr("channels_last", 0) else 2
    kernel = per_axis(n.attr("kernel_shape"), rank, "kernel_shape", n.op)
    strides = per_axis(n.attr("strides"), rank, "strides", n.op)
    dilations = per_axis(n.attr("dilations"), rank, "dilations", n.op)
    spatial = n.shape(0)[first : first + rank]
    auto = _text(n.attr("auto_pad", "NOTSET"))
    pads = resolve_pads(auto, n.attr("pads"), spatial, kernel, strides, dilations, op=n.op)
    sizes = output_sizes(spatial, kernel, strides, dilations, pads, ceil_mode=bool(n.attr("ceil_mode", 0)), op=n.op)
    return n.out_shape()[first : first + rank] == sizes


# -- normalization, losses, updates ---------------------------------------------------------------------------------


@_rule("InstanceNormalization", "BatchNormalization")
def _per_channel(n: NodeView) -> bool:
    if n.rank(0) < 2:
        return n.op == "BatchNormalization"
    return all(_is(n, k, n.shape(0)[1]) for k in range(1, len(n.inputs)))


@_rule("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def _loss(n: NodeView) -> bool:
    scores = n.shape(0)
    return len(scores) > 1 and n.shape(1) == (scores[0], *scores[2:]) and _is(n, 2, scores[1])


@_rule("Adagrad", domain="ai.onnx.preview.training")
def _adagrad(n: NodeView) -> bool:
    return _groups(n, 3)


@_rule("Momentum", domain="ai.onnx.preview.training")
def _momentum(n: NodeView) -> bool:
    return _groups(n, 3)


@_rule("Adam", domain="ai.onnx.preview.training")
def _adam(n: NodeView) -> bool:
    return _groups(n, 4)


def _groups(n: NodeView, kinds: int) -> bool:
    """The rate and the count of steps, then variables, gradients and states in the same order."""
    count, left = divmod(len(n.inputs) - 2, kinds)
    if left or not count or not _single(n, 0) or not _single(n, 1):
        return False
    return all(n.shape(2 + k) == n.shape(2 + k + count * kind) for k in range(count) for kind in range(1, kinds))


# -- quantization ---------------------------------------------------------------------------------------------------


@_rule("QuantizeLinear", "DequantizeLinear")
def _quantized(n: NodeView) -> bool:
    return all(_spread(n, n.shape(k)) for k in (1, 2) if n.has(k))


def _spread(n: NodeView, parameter: Shape) -> bool:
    shape, block = n.shape(0), int(n.attr("block_size", 0))
    if math.prod(parameter) == 1 and len(parameter) <= 1 and block == 0:
        return True
    axis = int(n.attr("axis", 1))
    if not -len(shape) <= axis < len(shape) or block < 0:
        return False
    axis %= len(shape)
    if block:
        return parameter == (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    return parameter == (shape[axis],)


@_rule("MatMulInteger")
def _matmul_integer(n: NodeView) -> bool:
    left, right = n.shape(0), n.shape(1)
    rows, columns = left[-2] if len(left) > 1 else 1, right[-1] if right else 1
    of_rows = _per_filter(n, 2, rows) or (len(left) > 1 and n.shape(2) == (*left[:-1], 1))
    return of_rows and (_per_filter(n, 3, columns) or (len(right) > 1 and n.shape(3) == (*right[:-2], 1, columns)))


# -- sequences ------------------------------------------------------------------------------------------------------


@_rule("LSTM", "GRU", "RNN")
@_rule("LSTMTraining", domain="ranvier")
def _recurrent(n: NodeView) -> bool:
    gates = {"GRU": 3, "RNN": 1}.get(n.op, 4)
    if not all(n.rank(k) == 3 for k in range(3)):
        return False
    directions = 2 if _text(n.attr("direction", "forward")) == "bidirectional" else 1
    hidden = int(n.attr("hidden_size", n.shape(2)[2]))
    batch = n.shape(0)[0 if n.attr("layout", 0) else 1]
    state = (batch, directions, hidden) if n.attr("layout", 0) else (directions, batch, hidden)
    return (
        n.shape(1) == (directions, gates * hidden, n.shape(0)[2])
        and n.shape(2) == (directions, gates * hidden, hidden)
        and _is(n, 3, directions, 2 * gates * hidden)
        and _is(n, 4, batch)
        and _is(n, 5, *state)
        and _is(n, 6, *state)
        and _is(n, 7, directions, 3 * hidden)
    )


@_rule("LSTMSlopes", domain="ranvier")
def _lstm_slopes(n: NodeView) -> bool:
    if n.rank(2) != 4:
        return False
    steps, directions, batch, hidden = n.shape(2)
    return (
        directions == (2 if _text(n.attr("direction", "forward")) == "bidirectional" else 1)
        and n.shape(0) == (directions, 4 * hidden, hidden)
        and n.shape(1) == (steps, directions, batch, 4 * hidden)
        and _is(n, 4, directions, 3 * hidden)
        and _is(n, 5, *n.shape(2))
        and all(_is(n, k, directions, batch, hidden) for k in (3, 6, 7))
    )


def _heads(shape: Shape, heads: int) -> Shape | None:
    """[batch, heads, time, size] of a tensor that may have its heads side by side."""
    if len(shape) == 4:
        return shape if heads in (0, shape[1]) else None
    if len(shape) != 3 or heads < 1 or shape[2] % heads:
        return None
    return (shape[0], heads, shape[1], shape[2] // heads)


@_rule("Attention")
def _attention(n: NodeView) -> bool:
    kv_heads = int(n.attr("kv_num_heads", 0))
    q = _heads(n.shape(0), int(n.attr("q_num_heads", 0)))
    k, v = _heads(n.shape(1), kv_heads), _heads(n.shape(2), kv_heads)
    if q is None or k is None or v is None or n.has(4) != n.has(5) or (n.has(4) and n.has(6)):
        return False
    past = 0
    if n.has(4):
        before = [n.shape(4), n.shape(5)]
        if any(len(p) != 4 or (*p[:2], p[3]) != (*x[:2], x[3]) for p, x in zip(before, (k, v))):
            return False
        past = before[0][2]
        if before[1][2] + v[2] != past + k[2]:
            return False
    total = past + k[2]
    if not (q[0] == k[0] == v[0] and k[1] == v[1] > 0 and q[1] % k[1] == 0 and q[3] == k[3]):
        return False
    if not n.has(4) and k[2] != v[2]:
        return False
    return _is(n, 6, q[0]) and (not n.has(3) or _mask(n.shape(3), (*q[:3], total)))


def _mask(mask: Shape, scores: Shape) -> bool:
    """A mask may end early: what it does not mention is forbidden, so that a single column is not one for all."""
    if len(mask) > 4 or (mask and (mask[-1] > scores[-1] or mask[-1] == 1 != scores[-1])):
        return False
    return all(m in (1, s) for m, s in zip(mask[-2::-1], scores[-2::-1]))


@_rule("RotaryEmbedding")
def _rotary(n: NodeView) -> bool:
    x = _heads(n.shape(0), int(n.attr("num_heads", 0)))
    if x is None:
        return False
    size = int(n.attr("rotary_embedding_dim", 0)) or x[3]
    if size % 2 or not 0 <= size <= x[3]:
        return False
    if n.has(3):
        rows = {n.rank(k) == 2 and n.shape(k)[1] == size // 2 for k in (1, 2)}
        return rows == {True} and n.shape(1) == n.shape(2) and n.shape(3) == (x[0], x[2])
    return _is(n, 1, x[0], x[2], size // 2) and _is(n, 2, x[0], x[2], size // 2)


@_rule("DFT")
def _dft(n: NodeView) -> bool:
    return n.rank(0) > 1 and n.shape(0)[-1] in (1, 2) and 0 not in n.shape(0) and 0 not in n.out_shape()


@_rule("STFT")
def _stft(n: NodeView) -> bool:
    signal = n.shape(0)
    return (len(signal) == 2 or (len(signal) == 3 and signal[2] in (1, 2))) and (not n.has(2) or n.rank(2) == 1)
