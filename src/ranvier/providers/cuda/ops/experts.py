"""Layers of experts, of which each token visits a few. Where there are kernels, they read the weights of those alone
and decode them as they go; routing is theirs too, so nothing of it comes to the host and a run can be captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.dtypes import DType
from ranvier.errors import ShapeMismatch
from ranvier.graph.ir import Node, Value
from ranvier.graph.types import TensorType
from ranvier.ops.contrib.moe import PLACES as MOE
from ranvier.ops.contrib.moe import Hidden, check_experts
from ranvier.ops.contrib.quantized_moe import PLACES, ROUTER_WEIGHTS, Layer, Stored, shares_add_up
from ranvier.ops.contrib.weight_only import WIDER, WIDTHS, raised_by
from ranvier.providers.cuda.library import functional, installed, torch
from ranvier.providers.cuda.ops.weight_only import packed, unpacked
from ranvier.providers.cuda.table import CONTRIB, FLOATS, Call, lowers

if TYPE_CHECKING:
    from ranvier.providers.cuda.kernels.expert_weights import Experts

_ON_PROCESSOR = False  # whether the kernels are used there too, interpreted: for tests
_MOST_EXPERTS = 512  # that a program of the kernels' routing looks at
_FLOATS = FLOATS - {DType.float64}
_TYPES = _FLOATS | {DType.uint8, DType.float8_e4m3fn, DType.float8_e8m0fnu}
_ACTIVATIONS = {
    "relu": lambda x: torch.relu(x),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": lambda x: functional.silu(x),
    "identity": lambda x: x,
}


def _mixture(
    call: Call, x: Any, router: Any, layers: Mapping[str, Experts], normalize: bool, weigher: Any = None
) -> Any:  # fmt: skip
    name, k = call.node.op, call.attr("k", 1)
    tokens = x.reshape(-1, x.shape[-1]).contiguous()
    experts = router.shape[-1] if router.ndim == 2 else 0
    if tuple(router.shape) != (len(tokens), experts) or not 1 <= k <= experts:
        raise ShapeMismatch(f"{name}: top {k} of a router {list(router.shape)} does not fit {len(tokens)} tokens")
    if weigher is not None and weigher.shape != router.shape:
        raise ShapeMismatch(f"{name}: router_weights {list(weigher.shape)} for a router {list(router.shape)}")
    _fit(call, x.shape[-1], layers)
    if not tokens.numel():
        return torch.empty_like(x)
    has_kernels = (tokens.is_cuda or _ON_PROCESSOR) and installed("triton") and experts <= _MOST_EXPERTS
    way = _by_kernels if has_kernels and all(layer.suits_kernels for layer in layers.values()) else _by_torch
    router, weigher = router.contiguous(), None if weigher is None else weigher.contiguous()
    return way(call, tokens, router, weigher, k, normalize, layers).reshape(x.shape)


def _fit(call: Call, features: int, layers: Mapping[str, Experts]) -> None:
    """Layers take what those before them make."""
    name, fc1 = call.node.op, layers["fc1"]
    inner = fc1.n // 2 if _pairs(call) else fc1.n
    if _pairs(call) and fc1.n % 2:
        raise ShapeMismatch(f"{name}: fc1 makes {fc1.n} features, of which swiglu needs two halves")
    wanted = {"fc1": (features, fc1.n), "fc2": (inner, features)}
    if not _pairs(call):  # what swiglu of one layer has no need of may be anything
        wanted["fc3"] = (features, inner)
    for which, (taken, made) in wanted.items():
        layer = layers.get(which)
        if layer is not None and (layer.k, layer.n) != (taken, made):
            sizes = f"makes {layer.n} features of {layer.k} and not {made} of {taken}"
            raise ShapeMismatch(f"{name}: {which} {sizes}")


def _pairs(call: Call) -> int:
    """How swiglu's two parts come from one layer: in turn (1) or in halves (2); 0: they do not."""
    hidden = _hidden(call.node)
    return hidden.fusion if hidden.activation == "swiglu" and hidden.fusion in (1, 2) else 0


def _hidden(node: Node) -> Hidden:
    return Hidden.of(node.op, node.attrs)


# -- by kernels -------------------------------------------------------------------------------------------------------


def _by_kernels(
    call: Call, tokens: Any, router: Any, weigher: Any, k: int, normalize: bool, layers: Mapping[str, Experts]
) -> Any:  # fmt: skip
    from ranvier.providers.cuda.kernels import experts as kernels  # Triton is not imported before
    from ranvier.providers.cuda.kernels.expert_weights import in_planes
    from ranvier.providers.cuda.kernels.visits import most_blocks, route, sort

    fc1, fc2, fc3 = layers["fc1"], layers["fc2"], layers.get("fc3")
    visits, count = len(tokens) * k, router.shape[1]
    is_few = visits <= kernels.FEW_VISITS
    if call.low is not None and not is_few and tokens.dtype == torch.float32:
        tokens = tokens.to(call.low)
    chosen = torch.empty(len(tokens), k, dtype=torch.int32, device=tokens.device)
    shares = torch.empty(len(tokens), k, dtype=torch.float32, device=tokens.device)
    laid = torch.empty_like(tokens) if fc1.planes > 1 else None
    route(router, weigher, tokens, chosen, shares, normalize=normalize, laid=laid, planes=fc1.planes)
    rows = tokens if laid is None else laid
    hidden, pairs = _hidden(call.node), _pairs(call)
    activation = {"identity": "", "gelu": "gelu_tanh"}.get(hidden.activation, hidden.activation)
    opening = kernels.Opening(activation, pairs, hidden.alpha, hidden.beta, hidden.limit, fc2.planes)
    product = partial(kernels.few, chosen=chosen, tile=kernels.TILE)
    if not is_few:
        tile = kernels.matrix_tile(visits, count, max(layer.planes for layer in layers.values()), tokens.dtype)
        owners = chosen.new_empty(most_blocks(visits, count, tile.columns))
        order = chosen.new_empty(len(owners) * tile.columns)
        sort(chosen, order, owners, count, tile.columns)
        product = partial(kernels.many, order=order, owners=owners, tile=tile)
    third = None
    if fc3 is not None and not pairs:
        others = rows if fc3.planes == fc1.planes else in_planes(tokens, fc3.planes)
        third = product(others, fc3, out=shares.new_empty(visits, fc3.n), shared=k)
    inner, out = tokens.new_empty(visits, fc2.k), torch.empty_like(tokens)
    product(rows, fc1, out=inner, shared=k, opening=opening, beside=third)
    if is_few:
        return product(inner, fc2, out=out, shares=shares)
    return kernels.added(product(inner, fc2, out=shares.new_empty(visits, fc2.n)), shares, out)


# -- by torch ---------------------------------------------------------------------------------------------------------


def _by_torch(
    call: Call, tokens: Any, router: Any, weigher: Any, k: int, normalize: bool, layers: Mapping[str, Experts]
) -> Any:  # fmt: skip
    """Nothing here asks the device who goes where: few visits bring the weights of their experts, and where there are
    more visits than experts, every expert meets all tokens."""
    likes, wide = router.float(), tokens.float()
    chosen = torch.sort(-likes, dim=1, stable=True).indices[:, :k]
    shares = torch.gather(torch.softmax(likes, dim=1) if weigher is None else weigher.float(), 1, chosen)
    if normalize:
        shares = shares / shares.sum(dim=1, keepdim=True)
    if chosen.numel() < router.shape[1]:
        flat = chosen.reshape(-1)
        made = [_expert(call, layers, wide[r // k, None], flat[r, None]) for r in range(len(flat))]
        return (torch.cat(made).reshape(len(tokens), k, -1) * shares[:, :, None]).sum(dim=1)
    total = torch.zeros_like(wide)
    for expert in range(router.shape[1]):
        goes = chosen == expert
        share = torch.where(goes, shares, 0.0).sum(dim=1, keepdim=True)
        total += torch.where(goes.any(dim=1, keepdim=True), share * _expert(call, layers, wide, expert), 0.0)
    return total


def _expert(call: Call, layers: Mapping[str, Experts], rows: Any, expert: Any) -> Any:
    """Rows through an expert, whose number may be the device's."""
    hidden, pairs = _hidden(call.node), _pairs(call)
    gate = _linear(layers["fc1"], rows, expert)
    line: Any = None
    if pairs:
        gate, line = (gate[:, 0::2], gate[:, 1::2]) if pairs == 1 else gate.chunk(2, 1)
    elif "fc3" in layers:
        line = _linear(layers["fc3"], rows, expert)
    if hidden.activation != "swiglu":
        inner = _ACTIVATIONS[hidden.activation](gate)
        inner = inner if line is None else inner * line
    else:
        gate, line = gate.clamp(max=hidden.limit), line.clamp(-hidden.limit, hidden.limit)
        inner = gate * torch.sigmoid(gate * hidden.alpha) * (line + hidden.beta)
    return _linear(layers["fc2"], inner, expert)


def _linear(layer: Experts, rows: Any, expert: Any) -> Any:
    def own(table: Any) -> Any:
        return table[expert] if isinstance(expert, int) else table.index_select(0, expert)[0]

    def of_each(table: Any) -> Any:
        """What groups have, for each input."""
        wide = own(table)[:, : layer.groups].float()
        return wide.repeat_interleave(layer.group, dim=1)[:, : layer.k] if layer.groups > 1 else wide

    weights = own(layer.weights)
    if layer.coding == "e4m3":
        weights = weights.view(torch.float8_e4m3fn)
    elif layer.coding:
        weights = unpacked(weights, layer.bits)
    if layer.coding == "e2m1":  # as float16, which has the same fields with more room
        wide = weights.to(torch.int16)
        weights = (((wide & 7) << 9) | ((wide & 8) << 12)).view(torch.float16).float() * 16384
    weights = weights.float()
    if layer.middle:
        weights = weights - (layer.middle if layer.zeros is None else of_each(layer.zeros)[: layer.n])
    if layer.scales is not None:
        scales = of_each(layer.scales)
        weights = weights * (scales.repeat_interleave(layer.square, dim=0)[: layer.n] if layer.square > 1 else scales)
    if layer.whole is not None:
        weights = weights * own(layer.whole).float()
    y = torch.matmul(rows, weights.mT)
    return y if layer.bias is None else y + own(layer.bias).float()


# -- weights as they are ----------------------------------------------------------------------------------------------


def _activates(node: Node) -> str | None:
    """Why what happens inside of an expert is not defined, in the reference's hands."""
    if node.attrs.get("use_sparse_mixer"):
        return "use_sparse_mixer is not lowered to torch"
    hidden = _hidden(node)
    third = MOE["fc3"][0] if node.op == "MoE" else PLACES["fc3"][0]
    if hidden.activation == "swiglu":
        apart = hidden.fusion not in (1, 2)
        return "swiglu without fc3" if apart and node.input(third) is None else None
    return None if hidden.activation in _ACTIVATIONS else f"activation_type {hidden.activation!r} is not known"


@lowers("MoE", domain=CONTRIB, types=_FLOATS, refuses=_activates)
def moe(call: Call, x: Any, router: Any, *operands: Any) -> Any:
    from ranvier.providers.cuda.kernels.expert_weights import Experts

    given = (x, router, *operands, *[None] * 6)
    layers = {}
    for name, (at, bias_at) in MOE.items():
        weights, bias = given[at], given[bias_at]
        if weights is None:
            continue
        experts = router.shape[-1] if router.ndim else 0
        check_experts("MoE", name, experts, weights, bias)
        _, n, k = weights.shape
        bias = None if bias is None else bias.contiguous()
        layers[name] = Experts("", weights.contiguous(), n, k, max(1, k), bias=bias)
    return _mixture(call, x, router, layers, call.flag("normalize_routing_weights"))


# -- weights in a few bits --------------------------------------------------------------------------------------------


def _few_bits(node: Node) -> str | None:
    if node.attrs.get("weights_prepacked", -1) == 1:
        return "weights_prepacked is a layout of one kind of GPU"
    if any(given is not None for given in node.inputs[ROUTER_WEIGHTS + 3 :]):
        return "activations in float8 are not lowered to torch"
    for name, (weights, *_) in PLACES.items():
        stored = Stored.of(node.attrs, name)
        if stored.kind not in _CODINGS or (stored.kind == "int" and stored.bits not in WIDTHS):
            return f"weights of {stored.bits} bits of quant_type {stored.kind!r} are not lowered to torch"
        if stored.kind == "int" and stored.bits == 3 and not _in_threes(node.input(weights)):
            return "weights of 3 bits are lowered to torch where a row is a multiple of 8"
    return _activates(node)


_CODINGS = {"int": "int{}", "fp8": "e4m3", "fp4": "e2m1", "nvfp4": "e2m1"}


def _in_threes(weights: Value | None) -> bool:
    """Whether rows are as many bytes as eight codes of 3 bits or a multiple of that: then they are whole bytes in four
    bits too."""
    if weights is None:
        return True
    shape = weights.type.shape if isinstance(weights.type, TensorType) else None
    width = shape[-1] if shape else None
    return isinstance(width, int) and width % 3 == 0


def _type(node: Node, position: int) -> DType:
    value = node.input(position)
    assert value is not None and isinstance(value.type, TensorType) and value.type.dtype is not None
    return value.type.dtype


def _weights(tensor: Any, node: Node, *, name: str) -> Any:
    """In bits that kernels read."""
    stored = Stored.of(node.attrs, name)
    bits, wide = stored.bits, WIDER.get(stored.bits)
    if stored.kind != "int" or wide is None or tensor.ndim != 3 or not len(tensor):
        return tensor
    # one expert after the other: taking codes apart takes many times as much memory as they do
    return torch.stack([packed(unpacked(codes, bits) + raised_by(bits), wide) for codes in tensor])


def _scales(tensor: Any, node: Node, *, position: int) -> Any:
    """In a type that kernels multiply with, [experts, rows, groups]."""
    kind = _type(node, position)
    if kind is DType.float8_e8m0fnu:  # exponents alone, of which the least is below those that float32 has room for
        bits = tensor.to(torch.int32)
        bits = torch.where(bits == 0, 0x00400000, torch.where(bits == 255, 0x7FC00000, bits << 23))
        tensor = bits.view(torch.float32)
    elif kind is DType.float8_e4m3fn:
        tensor = tensor.float()
    return tensor[:, :, None] if tensor.ndim == 2 else tensor


def _zeros(tensor: Any, node: Node, *, name: str, position: int) -> Any:
    """A byte or a float each, [experts, rows, groups]; those of rows that have one may lie along the rows. They are
    raised as the codes are."""
    bits = Stored.of(node.attrs, name).bits
    if _type(node, position) is DType.uint8:
        return unpacked(tensor.contiguous(), bits) + raised_by(bits)
    return tensor.float() + raised_by(bits) if bits in WIDER else tensor  # halves have less room above


_PREPARES = {
    **{weights: partial(_weights, name=name) for name, (weights, *_) in PLACES.items()},
    **{scales: partial(_scales, position=scales) for _, scales, *_ in PLACES.values()},
    **{zeros: partial(_zeros, name=name, position=zeros) for name, (*_, zeros, _) in PLACES.items()},
}


def _checked(node: Node, name: str, experts: int, operands: Sequence[Any]) -> Layer:
    """Sizes and types are looked at by the reference, in arrays that have nothing else."""
    stored = Stored.of(node.attrs, name)
    weights, _, _, zeros, _ = PLACES[name]
    each = {weights: WIDER.get(stored.bits, stored.bits), zeros: 8}  # bits of those that are prepared

    def like(position: int | None, tensor: Any) -> Any:
        if position is None or tensor is None:
            return None
        shape, dtype = tuple(tensor.shape), _type(node, position)
        if stored.kind == "int" and position in each and dtype is DType.uint8 and shape:  # as they were before
            shape = (*shape[:-1], -(-shape[-1] * 8 // each[position] * stored.bits // 8))
        return np.broadcast_to(np.zeros((), dtype.numpy), shape)

    return stored.layer(name, experts, *map(like, PLACES[name], operands))


@lowers("QMoE", domain=CONTRIB, types=_TYPES, refuses=_few_bits, prepares=_PREPARES)
def qmoe(call: Call, x: Any, router: Any, *operands: Any) -> Any:
    from ranvier.providers.cuda.kernels.expert_weights import Experts

    given = (x, router, *operands, *[None] * (ROUTER_WEIGHTS + 3))
    experts = router.shape[-1] if router.ndim else 0
    layers = {}
    for name, places in PLACES.items():
        own = [None if k is None else given[k] for k in places]
        if own[0] is None:
            continue
        known = _checked(call.node, name, experts, own)
        scales, bias, zeros, whole = (None if each is None else each.contiguous() for each in own[1:])
        zeros = zeros[:, :, None] if zeros is not None and zeros.ndim == 2 else zeros
        kind, bits = known.stored.kind, known.stored.bits
        layers[name] = Experts(
            _CODINGS[kind].format(WIDER.get(bits, bits)),
            own[0].contiguous().view(torch.uint8),
            known.outputs,
            known.inputs,
            known.block,
            scales,
            known.stored.block if kind == "fp8" and scales is not None else 1,
            zeros,
            whole,
            bias,
        )
    weigher = given[ROUTER_WEIGHTS]
    normalize = shares_add_up(call.attr("normalize_routing_weights", 0), weigher is not None)
    return _mixture(call, x, router, layers, normalize, weigher)
