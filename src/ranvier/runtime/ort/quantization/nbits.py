"""Weights of products in 2, 4 or 8 bits, activations as they are: MatMulNBits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, NotSupported
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.logs import warn_once
from ranvier.quantize import Gptq, InputMoments
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.quantization.chosen import Chosen
from ranvier.runtime.ort.quantization.files import as_declared, checked_target, config_of, read_model, write_model
from ranvier.runtime.ort.quantization.kinds import QuantFormat, kind_of
from ranvier.runtime.ort.quantization.readers import CalibrationDataReader, read_feeds
from ranvier.runtime.ort.quantization.weights import named
from ranvier.runtime.quantizing.maker import finish, prepared
from ranvier.runtime.quantizing.options import Quantization
from ranvier.runtime.quantizing.samples import visit
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.weight_only import Coded, Known, codes_of, quantize_weights

_BITS = (2, 4, 8)
_PRODUCTS = ("MatMul", "Gemm")
_LEVELS = range(5)  # of accuracy_level


class WeightOnlyQuantConfig:
    """How codes of weights are found."""

    def __init__(
        self,
        algorithm: str,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        customized_weight_config: Mapping[str, Any] | None = None,
    ) -> None:
        hint = "weights are stored as MatMulNBits has them"
        self.algorithm = algorithm
        self.quant_format = kind_of(QuantFormat, "quant_format", quant_format, (QuantFormat.QOperator,), hint)
        self.op_types_to_quantize = tuple(op_types_to_quantize or ("MatMul",))
        self.quant_axes = dict(quant_axes or {"MatMul": 0})
        self.customized_weight_config = customized_weight_config
        other = next((op for op in self.op_types_to_quantize if op not in _PRODUCTS), None)
        if other is not None:
            raise InvalidConfig(f"op_types_to_quantize: {other} is not supported, weights of products are coded alone")
        if any(axis != 0 for op, axis in self.quant_axes.items() if op in _PRODUCTS):
            raise InvalidConfig(f"quant_axes = {quant_axes!r} is not supported: groups lie along the axis of sums, 0")
        if customized_weight_config:
            raise InvalidConfig("customized_weight_config is not supported; leave nodes out by nodes_to_exclude")


class DefaultWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """The nearest codes, with ranges of groups cut where that lessens the error."""

    @raises_ort
    def __init__(
        self,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        bits: int = 4,
        channel_wised_quantize: bool = False,
    ) -> None:
        super().__init__("DEFAULT", quant_format, op_types_to_quantize, quant_axes)
        self.block_size, self.is_symmetric = _checked_group(block_size), bool(is_symmetric)
        self.bits, self.accuracy_level = _checked_bits(bits), _checked_level(accuracy_level)
        self.channel_wised_quantize = channel_wised_quantize
        if channel_wised_quantize:
            raise InvalidConfig("channel_wised_quantize is not supported: block_size weights share a scale")


class RTNWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """The same, with the quantizer's own block size and symmetry."""

    @raises_ort
    def __init__(
        self,
        ratios: Mapping[str, float] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        customized_weight_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("RTN", quant_format, op_types_to_quantize, None, customized_weight_config)
        self.ratios = ratios or {}
        if ratios:
            raise InvalidConfig("ratios is not supported: ranges are cut where that lessens the error")


class GPTQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Codes that make up for what those before them lost, by samples of what layers read."""

    @raises_ort
    def __init__(
        self,
        calibration_data_reader: CalibrationDataReader | None = None,
        percdamp: float = 0.01,
        block_size: int = 128,
        actorder: bool = False,
        mse: bool = False,
        perchannel: bool = True,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
    ) -> None:
        super().__init__("GPTQ", quant_format, op_types_to_quantize)
        self.calibration_data_reader = calibration_data_reader
        self.percdamp, self.block_size, self.actorder = percdamp, block_size, actorder
        self.mse, self.perchannel = mse, perchannel
        if not perchannel:
            raise InvalidConfig("perchannel = False is not supported: groups of a channel have scales of their own")


class HQQWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Not to be had; it says so when it is made."""

    @raises_ort
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_algorithm("HQQ")


class KQuantWeightOnlyQuantConfig(WeightOnlyQuantConfig):
    """Not to be had; it says so when it is made."""

    @raises_ort
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_algorithm("k-quant")


def _no_algorithm(name: str) -> NotSupported:
    return NotSupported(
        f"{name} is not supported; DefaultWeightOnlyQuantConfig needs no samples either and cuts ranges where that "
        "lessens the error, GPTQWeightOnlyQuantConfig goes by samples"
    )


class QuantizedModel:
    """A model under the names that scripts reach it by."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @property
    def model(self) -> ModelProto:
        """As a message with all weights inside."""
        return onnx_format.to_proto(as_declared(self._graph))

    @raises_ort
    def save_model_to_file(self, output_path: str | os.PathLike[str], use_external_data_format: bool = False) -> None:
        write_model(self._graph, checked_target(output_path, "output_path"), use_external_data_format)


class MatMulNBitsQuantizer:
    """``process`` puts MatMulNBits in place of products with constant weights; ``model`` is the result then."""

    @raises_ort
    def __init__(
        self,
        model: str | os.PathLike[str] | ModelProto,
        bits: int = 4,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Iterable[str] | None = None,
        nodes_to_include: Sequence[str] | None = None,
        quant_format: QuantFormat = QuantFormat.QOperator,
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        channel_wised_quantize: bool = False,
        algo_config: WeightOnlyQuantConfig | None = None,
    ) -> None:
        if algo_config is not None and not isinstance(algo_config, WeightOnlyQuantConfig):
            raise InvalidConfig(f"algo_config must be a config of this module, got {type(algo_config).__name__}")
        self.block_size, self.is_symmetric = _checked_group(block_size), bool(is_symmetric)
        self.bits, self.accuracy_level = _checked_bits(bits), _checked_level(accuracy_level)
        self.algo_config = algo_config or DefaultWeightOnlyQuantConfig(
            block_size,
            is_symmetric,
            accuracy_level,
            quant_format,
            op_types_to_quantize,
            quant_axes,
            bits,
            channel_wised_quantize,
        )
        excluded = tuple(nodes_to_exclude or ())
        self._chosen = Chosen(self.algo_config.op_types_to_quantize, None, excluded)
        self._included = Chosen(_PRODUCTS, nodes_to_include, excluded)  # beside the others
        self._config = config_of()
        graph = read_model(model, self._config, "model")
        self._included.check(graph)
        self._graph = prepared(graph, self._config)
        self.model = QuantizedModel(self._graph)

    @raises_ort
    def process(self) -> None:
        graph, own = self._graph, self.algo_config
        original = list(graph.values())
        sites = [site for site in find_sites(graph, products_only=True) if self._is_chosen(site)]
        if not sites:
            warn_once(
                f"nothing to quantize: {id(self)}", "no product of this model can be quantized, or none was chosen"
            )
        plain, level = (own, own.accuracy_level) if isinstance(own, DefaultWeightOnlyQuantConfig) else (self, None)
        level = self.accuracy_level if level is None else level
        known = _gptq(graph, sites, own, self, self._config) if isinstance(own, GPTQWeightOnlyQuantConfig) else {}
        for site in sites:
            key = (site.weight.name, site.outputs)
            if key not in known:
                scheme = f"{'int' if plain.is_symmetric else 'uint'}{plain.bits}"
                with named(site):
                    known[key] = codes_of(np.ascontiguousarray(site.matrix), scheme, plain.block_size)
        quantize_weights(graph, sites, "int4", group=plain.block_size, level=level or 0, known=known)
        finish(graph, original, self._config)

    def _is_chosen(self, site: Site) -> bool:
        return site.node in self._chosen or (self._included.named and site.node in self._included)


def _gptq(
    graph: Graph,
    sites: Sequence[Site],
    own: GPTQWeightOnlyQuantConfig,
    quantizer: MatMulNBitsQuantizer,
    config: SessionConfig,
) -> Known:
    """Codes by samples; layers that share weights are looked at together."""
    feeds = read_feeds(own.calibration_data_reader, graph)
    moments = {site.data.name: InputMoments(site.matrix.shape[1]) for site in sites}
    visit(graph, list(moments), feeds, config, lambda name, x: moments[name].update(x))
    sharing: dict[tuple[str, int], list[Site]] = {}
    for site in sites:
        sharing.setdefault((site.weight.name, site.outputs), []).append(site)
    known: Known = {}
    for key, those in sharing.items():
        matrix = np.ascontiguousarray(those[0].matrix)
        scheme = Gptq(
            quantizer.bits,
            quantizer.block_size,
            quantizer.is_symmetric,
            reorder=own.actorder,
            damping=own.percdamp,
            fit="mse" if own.mse else "minmax",
        )
        joined = InputMoments.joined([moments[name] for name in dict.fromkeys(site.data.name for site in those)])
        with named(those[0]):
            if joined.count:
                known[key] = Coded(scheme.quantize(matrix, joined))
            else:  # it reads no rows in any sample
                known[key] = Coded(scheme.nearest(matrix.shape[1]).quantize(matrix))
    return known


def _checked_bits(bits: Any) -> int:
    if isinstance(bits, bool) or bits not in _BITS:
        raise InvalidConfig(f"bits must be 2, 4 or 8, got {bits!r}")
    return int(bits)


def _checked_group(size: Any) -> int:
    try:
        return int(Quantization.RULES["group"].check(size))
    except ValueError as error:
        raise InvalidConfig(f"block_size {error}") from None


def _checked_level(level: Any) -> int | None:
    if level is not None and level not in _LEVELS:
        raise InvalidConfig(f"accuracy_level must be None or a number from 0 to {_LEVELS[-1]}, got {level!r}")
    return None if level is None else int(level)


__all__ = [
    "DefaultWeightOnlyQuantConfig",
    "GPTQWeightOnlyQuantConfig",
    "HQQWeightOnlyQuantConfig",
    "KQuantWeightOnlyQuantConfig",
    "MatMulNBitsQuantizer",
    "QuantizedModel",
    "RTNWeightOnlyQuantConfig",
    "WeightOnlyQuantConfig",
]
