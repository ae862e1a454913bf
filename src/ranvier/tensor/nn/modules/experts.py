"""Layers of experts whose weights stay in few bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ranvier.errors import DTypeMismatch, InvalidInput, ShapeMismatch
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Experts, Rows, any_of
from ranvier.tensor.core import Tensor, as_tensor, call
from ranvier.tensor.expr import spec
from ranvier.tensor.manipulate import astype, reshape, stack
from ranvier.tensor.nn.functional import softmax
from ranvier.tensor.nn.modules.coded import Array, Coded, Reader, again, held, let_go, level_of, opened
from ranvier.tensor.state import Parameter

if TYPE_CHECKING:
    from ranvier.runtime.quantizing.expert_forms import ExpertsForm

Weights = Quantized | Sequence[Quantized] | Reader
Parts = Sequence[Experts]  # of a layer: one, or two whose rows stand in turns
Layers = dict[str, Parts]
_ACTIVATIONS = ("relu", "gelu", "silu", "identity")
_FUSIONS = {"turns": 1, "halves": 2}
_PARTS = ("codes", "scales", "bias", "zeros", "whole")  # of each linear layer, in the operator's order


class QuantizedExperts(Coded):
    """A layer of experts, of which each token visits the few that its router likes best; weights in codes.

    ``up`` and ``down``, and ``gate`` where there is one, are codes [experts, out, in], or those of one expert after the
    other, or functions that read them, which are asked again where codes are needed once more:
    ``down(activation(gate(x)) * up(x))``, without a gate ``down(activation(up(x)))``. Activations are "silu", "gelu"
    (by tanh), "relu" and "identity". ``fused``: ``up`` has the rows of both, in "turns" (a row of the gate, one of its
    own) or as "halves", the gate's first. With silu and a gate, ``alpha``, ``beta`` and ``limit`` are as gpt-oss has
    them: ``gate * sigmoid(alpha * gate) * (up + beta)`` of numbers that are held within the limit.

    ``normalize``: shares of the chosen experts add up to one. ``activations``: what inputs may be rounded to, at most:
    "int8" is fastest. Codes do not learn; the gradient goes through to the input and to the router, and biases learn.
    """

    def __init__(
        self,
        up: Weights,
        down: Weights,
        gate: Weights | None = None,
        *,
        top_k: int,
        activation: str = "silu",
        fused: Literal["turns", "halves"] | None = None,
        up_bias: Any = None,
        down_bias: Any = None,
        gate_bias: Any = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float | None = None,
        normalize: bool = True,
        activations: str = "float32",
    ) -> None:
        super().__init__()
        shaped = (alpha, beta, limit) != (1.0, 0.0, None)
        _check_hidden(activation, fused, gate is not None, shaped)
        given = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
        with _opened(given, activation) as layers:
            in_turns = gate is not None and "fc3" not in layers
            self.num_experts, self.in_features, self.inner_features = _check_layers(layers, bool(fused or in_turns))
            if not 1 <= top_k <= self.num_experts:
                raise InvalidInput(f"top_k is {top_k} of {self.num_experts} experts")
            if gate is None and gate_bias is not None:
                raise InvalidInput("there is a bias of a gate, and no gate")
            form = _form_of(layers)
        biases = {"fc1": up_bias, "fc2": down_bias}
        if in_turns:
            biases["fc1"], fused = _in_turns(gate_bias, up_bias), "turns"
        elif gate is not None:
            biases["fc1"], biases["fc3"] = gate_bias, up_bias
        self.top_k, self.normalize = top_k, normalize
        self.schemes = tuple(dict.fromkeys(any_of(parts[0]).scheme for parts in layers.values()))
        attrs: dict[str, Any] = {"k": top_k, "activation_type": activation, "normalize_routing_weights": int(normalize)}
        if fused or shaped:
            attrs |= {"activation_type": "swiglu", "activation_alpha": float(alpha), "activation_beta": float(beta)}
            attrs |= {"swiglu_fusion": _FUSIONS[fused]} if fused else {}
            attrs |= {"swiglu_limit": float(limit)} if limit is not None else {}
        make = functools.partial(_read_again, given, activation) if all(map(again, given.values())) else None
        self._hold(form, make, attrs, level_of(activations))
        for name, bias in biases.items():
            self._add(f"{name}_bias", bias, _shape(layers[name])[:2])
        for parts in layers.values():
            for part in parts:
                let_go(part)

    def _hold(
        self, form: ExpertsForm, make: Callable[[], Sequence[Array]] | None, attrs: dict[str, Any], level: int
    ) -> None:
        arrays = form.arrays
        for name, constant in zip(arrays, held(list(arrays.values()), make), strict=True):
            self.register_buffer(name, constant)
        attrs |= form.attrs
        attrs |= {"accuracy_level": level} if level else {}
        self._op = spec("com.microsoft::QMoE", tuple(sorted(attrs.items())))

    def _add(self, name: str, bias: Any, shape: tuple[int, ...]) -> None:
        held = None if bias is None else Parameter(as_tensor(bias))
        if held is not None and held.shape != shape:
            raise ShapeMismatch(f"a bias of shape {list(held.shape)} for experts that have {list(shape)}")
        self.register_parameter(name, held)

    def forward(self, input: Any, router: Any, shares: Any = None) -> Tensor:
        """``router``: how much each token likes each expert, [..., experts]. Its softmax is what the chosen ones are
        added up by, or ``shares`` where they are given, of the same shape."""
        x, likes = as_tensor(input), as_tensor(router)
        if not x.dtype.is_float or not likes.dtype.is_float:
            raise DTypeMismatch(f"experts and their router read floats, not {x.dtype} and {likes.dtype}")
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ShapeMismatch(f"inputs of shape {list(x.shape)} do not fit {self.in_features} features")
        wanted = (*x.shape[:-1], self.num_experts)
        parts = [likes] if shares is None else [likes, as_tensor(shares)]
        if any(each.shape != wanted for each in parts):
            raise ShapeMismatch(f"a router of shape {list(likes.shape)}, and shares, are to be {list(wanted)}")
        if shares is None and not self.normalize:
            parts.append(softmax(likes, -1))
        rows = math.prod(x.shape[:-1])
        flat = [astype(reshape(each, (rows, self.num_experts)), x.dtype) for each in parts]
        found = self._compiled()(reshape(x, (rows, self.in_features)), *flat)
        return reshape(found, x.shape)

    def _computed(self, *operands: Tensor) -> Tensor:
        from ranvier.ops.contrib.quantized_moe import PLACES, ROUTER_WEIGHTS  # only here

        x, likes, *shares = operands
        given: dict[int, Any] = {0: x, 1: likes}
        if shares:
            given[ROUTER_WEIGHTS] = shares[0]
        for layer, places in PLACES.items():
            for part, place in zip(_PARTS, places):
                held = (self._parameters if part == "bias" else self._buffers).get(f"{layer}_{part}")
                if held is not None and place is not None:
                    given[place] = astype(held, x.dtype) if part == "bias" else held
        absent = tuple((place, None) for place in range(max(given)) if place not in given)
        return call(spec(*self._op[:2], absent), tuple(given[place] for place in sorted(given)), x.dtype, x.shape)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, top_k={self.top_k}, in_features={self.in_features}, "
            f"inner_features={self.inner_features}, schemes={self.schemes}"
        )


@contextmanager
def _opened(given: Mapping[str, Weights], activation: str) -> Iterator[Layers]:
    """Codes of experts, by QMoE's names for its layers; gates and what they open are one of them if they can."""
    from ranvier.runtime.quantizing.expert_forms import of_experts, take_turns  # only here: it takes time

    with ExitStack() as stack:
        own = {name: of_experts(stack.enter_context(opened(each))) for name, each in given.items()}
        layers: Layers = {"fc1": [own["up"]], "fc2": [own["down"]]}
        if "gate" in own:
            _check_sizes([own["gate"]], [own["up"]])
            together = activation == "silu" and take_turns(own["gate"], own["up"])
            layers |= {"fc1": [own["gate"], own["up"]]} if together else {"fc1": [own["gate"]], "fc3": [own["up"]]}
        yield layers


def _form_of(layers: Layers) -> ExpertsForm:
    from ranvier.runtime.quantizing.expert_forms import experts_form  # only here: it takes time

    return experts_form(layers)


def _read_again(given: Mapping[str, Weights], activation: str) -> list[Array]:
    with _opened(given, activation) as layers:
        return list(_form_of(layers).arrays.values())


def _check_hidden(activation: str, fused: str | None, gated: bool, shaped: bool) -> None:
    if activation not in _ACTIVATIONS:
        raise InvalidInput(f"an activation is one of {', '.join(_ACTIVATIONS)}, not {activation!r}")
    if fused is not None and (fused not in _FUSIONS or gated or activation != "silu"):
        raise InvalidInput(
            f"fused is {fused!r}: rows of a gate with silu may stand with those of up in {' or '.join(_FUSIONS)}, "
            "and are not given a second time"
        )
    if shaped and (activation != "silu" or not (gated or fused)):
        raise InvalidInput("alpha, beta and limit belong to silu with a gate")


def _check_sizes(*layers: Parts) -> tuple[int, int, int]:
    """How many experts, their outputs and inputs: the same of all."""
    shapes = {shape for parts in layers for part in parts for shape in _shapes(part)}
    if len(shapes) != 1:
        raise ShapeMismatch(f"experts have matrices of one shape, not {sorted(map(list, shapes))}")
    (shape,) = shapes
    if len(shape) != 3:
        raise ShapeMismatch(f"the weights of an expert are [out, in], not {list(shape[1:])}")
    return shape


def _shapes(part: Experts) -> set[tuple[int, ...]]:
    return {part.shape} if isinstance(part, Rows) else {(len(part), *matrix.shape) for matrix in part}


def _shape(parts: Parts) -> tuple[int, int, int]:
    """Of a layer with all of its parts."""
    experts, outputs, inputs = _check_sizes(parts)
    return experts, outputs * len(parts), inputs


def _check_layers(layers: Layers, fused: bool) -> tuple[int, int, int]:
    """How many experts, what the first layers read, and the last one: they make what that reads, and it as much as they
    read."""
    last = _shape(layers["fc2"])
    experts, features, inner = last
    wanted = {"fc1": (experts, inner * (2 if fused else 1), features), "fc3": (experts, inner, features)}
    for name in layers.keys() & wanted.keys():
        found = _shape(layers[name])
        if found != wanted[name]:
            raise ShapeMismatch(f"experts {list(found)} before ones of {list(last)}, which {list(wanted[name])} fit")
    return last[0], features, inner


def _in_turns(gate: Any, up: Any) -> Any:
    if gate is None and up is None:
        return None
    if gate is None or up is None:
        raise InvalidInput("the gate and up have both a bias, or none")
    one, other = as_tensor(gate), as_tensor(up)
    return reshape(stack([one, other], axis=-1), (one.shape[0], -1))


_OF_TENSORS = True
