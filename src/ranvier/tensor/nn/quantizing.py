"""Modules with weights in few bits: made of a module's own numbers, or read from a checkpoint."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ranvier.devices import usable_cores
from ranvier.errors import InvalidConfig, InvalidInput, ShapeMismatch
from ranvier.quantize.base import Quantized
from ranvier.quantize.rows import Rows
from ranvier.records import dataclass
from ranvier.tensor.nn.modules.base import Loaded, Module
from ranvier.tensor.nn.modules.coded import Reader
from ranvier.tensor.nn.modules.linear import Embedding, Linear
from ranvier.tensor.nn.modules.quantized import QuantizedEmbedding, QuantizedLinear

if TYPE_CHECKING:
    from ranvier.weights.progress import Progress
    from ranvier.weights.quantized.tensors import Layer

_Layer = Linear | Embedding | QuantizedLinear | QuantizedEmbedding
_PLAIN: tuple[type[Module], ...] = (Linear, Embedding)
_CODED: tuple[type[Module], ...] = (QuantizedLinear, QuantizedEmbedding)  # of a checkpoint that was read before
_LABEL = "layers with codes"
_AT_ONCE = 4  # layers that are read, each of which has its codes as bytes for a moment
_LEAST = 8  # inputs: with fewer, scales take what codes save


def quantize_(
    module: Module,
    scheme: str = "int4",
    *,
    group: int = 32,
    keep: Sequence[str] = (),
    activations: str = "float32",
) -> list[str]:
    """Put :class:`QuantizedLinear` in place of the linear layers of a module, and return their names.

    ``scheme``: as ``ranvier quantize`` has them for weights alone; "ternary" rounds tokens to 8 bits, as BitNet does.
    ``group``: weights that share a scale. ``keep``: patterns of names of layers that stay as they are.
    """
    from ranvier.runtime.quantizing.sites import named_in_errors  # only here: they take time
    from ranvier.runtime.quantizing.weight_only import CALIBRATED, scheme_names

    if scheme in CALIBRATED:
        raise InvalidConfig(f"{scheme} needs samples of the inputs: export the model, and use `ranvier quantize`")
    if scheme not in scheme_names():
        known = ", ".join(name for name in scheme_names() if name not in CALIBRATED)
        raise InvalidConfig(f"no scheme for weights alone is called {scheme!r} (known: {known})")
    done: dict[int, Module] = {}
    names = []
    for name, holder, own, layer in list(_places(module)):
        kept = any(fnmatch.fnmatchcase(name, pattern) for pattern in keep)
        if kept or not isinstance(layer, Linear) or layer.in_features < _LEAST:
            continue
        if id(layer) not in done:
            with named_in_errors(name):
                done[id(layer)] = _made(layer, _codes(layer.weight.numpy(), scheme, group), activations)
        holder.add_module(own, done[id(layer)])
        names.append(name)
    return names


def load_quantized_(
    module: Module,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    activations: str = "float32",
    progress: Progress | None = None,
) -> Loaded:
    """Take over the weights of a checkpoint: GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt, bitsandbytes, float8,
    BitNet or GGUF.

    What the checkpoint has in codes becomes a :class:`QuantizedLinear` or :class:`QuantizedEmbedding`; all
    else is loaded as by ``load_state_dict``. ``tensors``: what ``WeightLoader().open(...)`` gives; ``config``:
    the checkpoint's ``config.json``, or its ``quantization_config``. With ``strict`` all names must be the same.
    Layers that have codes already get those of this checkpoint: where a part of one could not be read, it may be read
    once more.
    ``progress`` is told about the bytes of layers with codes: ``ranvier.weights.Bars()`` shows them.
    """
    from ranvier.weights.progress import Silent  # only here
    from ranvier.weights.quantized import layer_of, quantized_layers

    places = {name: (holder, own, layer) for name, holder, own, layer in _places(module, (*_PLAIN, *_CODED))}
    saved = {name for name, _ in module._saved()}
    layers = {
        name: read
        for name, read in quantized_layers(tensors, config).items()
        if name in places or f"{name}.weight" not in saved  # others hold numbers
    }
    coded = layers.keys() & places.keys()
    belongs = {name: layer_of(name, layers) for name in tensors}
    rest = {name: each for name, each in tensors.items() if belongs[name] is None}
    own_names = {name for name in saved if layer_of(name, coded) is None}
    missing = sorted(own_names - rest.keys())
    unexpected = sorted({*(rest.keys() - own_names), *(layers.keys() - places.keys())})
    loaded = Loaded(missing, unexpected)
    if strict and (missing or unexpected):
        raise InvalidInput(f"the checkpoint does not fit {type(module).__name__}; {loaded.told()}")
    sizes = dict.fromkeys(sorted(coded), 0)
    for name, of in belongs.items():
        if of in sizes:
            sizes[of] += int(getattr(getattr(tensors[name], "info", None), "nbytes", 0))
    told = Silent() if progress is None else progress
    told.begin(_LABEL, sum(sizes.values()))

    def read(name: str) -> Module:
        layer = places[name][2]
        return _made(layer, _Fitting(name, _shape(layer), layers[name]), activations)

    try:
        with ThreadPoolExecutor(min(_AT_ONCE, usable_cores())) as pool:
            for (name, size), made in zip(sizes.items(), pool.map(read, sizes)):
                holder, own, _ = places[name]
                holder.add_module(own, made)
                told.advance(_LABEL, size)
    finally:
        told.end(_LABEL)
    values = {name: np.asarray(each.read()) for name, each in rest.items() if name in own_names}
    module.load_state_dict(values, strict=False)
    return loaded


def _places(module: Module, kinds: tuple[type[Module], ...] = _PLAIN) -> Iterator[tuple[str, Module, str, _Layer]]:
    """Linear layers and tables: their names, who holds them and as what; shared ones in each of their places."""
    for path, holder in module.named_modules():
        for own, layer in holder._modules.items():
            if type(layer) in kinds:
                yield (f"{path}.{own}" if path else own), holder, own, layer  # type: ignore[misc]


def _codes(matrix: np.ndarray[Any, Any], name: str, group: int) -> Quantized:
    """One scale for a ternary layer: the integers of its sums are exact then."""
    from ranvier.quantize.ternary import Ternary  # only here
    from ranvier.runtime.quantizing.weight_only import codes_of

    plain = np.ascontiguousarray(matrix, np.float32)
    return Ternary().quantize(plain) if name == "ternary" else codes_of(plain, name, group).codes


@dataclass(frozen=True)
class _Fitting:
    """Codes of a checkpoint in place of a weight, read when it is called."""

    name: str
    shape: tuple[int, ...]
    layer: Layer

    def __call__(self) -> Quantized:
        with self.opened() as codes:
            return codes.whole() if isinstance(codes, Rows) else codes

    @contextmanager
    def opened(self) -> Iterator[Quantized | Rows]:
        with self.layer.opened() as codes:
            if codes.shape != self.shape:
                raise ShapeMismatch(f"{self.name}.weight has the shape {list(self.shape)}, not {list(codes.shape)}")
            yield codes

    @property
    def lasting(self) -> bool:
        return self.layer.lasting


def _shape(layer: _Layer) -> tuple[int, ...]:
    """Of the weight that it has, or that its codes stand for."""
    if isinstance(layer, Linear | QuantizedLinear):
        return layer.out_features, layer.in_features
    return layer.num_embeddings, layer.embedding_dim


def _made(layer: _Layer, codes: Quantized | Reader, activations: str) -> Module:
    made: Module
    if isinstance(layer, Embedding | QuantizedEmbedding):
        made = QuantizedEmbedding(codes)
    else:
        made = QuantizedLinear(codes, None if layer.bias is None else layer.bias.value, activations=activations)
    made.training = layer.training
    return made


_OF_TENSORS = True
