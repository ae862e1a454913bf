"""Weights and activations in 8 bits, by samples of the inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.graph.ir import Graph
from ranvier.logs import warn_once
from ranvier.passes import default_passes
from ranvier.passes.edit import prune
from ranvier.passes.facts import only_use
from ranvier.passes.manager import PassManager
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.quantization.chosen import Chosen
from ranvier.runtime.ort.quantization.extra import static_extra
from ranvier.runtime.ort.quantization.files import checked_target, config_of, read_model, write_model
from ranvier.runtime.ort.quantization.kinds import CalibrationMethod, QuantFormat, QuantType, kind_of
from ranvier.runtime.ort.quantization.ranges import ranges_and_means
from ranvier.runtime.ort.quantization.readers import CalibrationDataReader, read_feeds
from ranvier.runtime.ort.quantization.weights import NearestCodes
from ranvier.runtime.quantizing.distinct import make_nodes_distinct
from ranvier.runtime.quantizing.maker import finish, prepared
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import coded_values
from ranvier.runtime.quantizing.static import quantize_static as put_codes

_BYTES = (QuantType.QInt8, QuantType.QUInt8)
_METHODS = (CalibrationMethod.MinMax, CalibrationMethod.Entropy, CalibrationMethod.Percentile)


@raises_ort
def quantize_static(
    model_input: str | os.PathLike[str] | ModelProto,
    model_output: str | os.PathLike[str],
    calibration_data_reader: CalibrationDataReader | None = None,
    quant_format: QuantFormat = QuantFormat.QDQ,
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    activation_type: QuantType = QuantType.QInt8,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    calibration_providers: Any = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | os.PathLike[str] | None = None,
) -> None:
    """Write the model with codes for weights and activations of convolutions and products, and for what lies between
    them where it can stay in codes."""
    form = kind_of(QuantFormat, "quant_format", quant_format, tuple(QuantFormat))
    activations = kind_of(QuantType, "activation_type", activation_type, _BYTES)
    kind_of(QuantType, "weight_type", weight_type, (QuantType.QInt8,), "MatMulNBitsQuantizer has fewer bits")
    method = kind_of(CalibrationMethod, "calibrate_method", calibrate_method, _METHODS)
    extra = static_extra(extra_options)
    if calibration_cache_path is not None:
        raise InvalidConfig("calibration_cache_path is not supported: ranges are found from calibration_data_reader")
    operators = form is QuantFormat.QOperator
    chosen = Chosen(op_types_to_quantize, nodes_to_quantize, nodes_to_exclude, gemm_too=operators)
    target, config = checked_target(model_output), config_of(calibration_providers)
    graph = read_model(model_input, config)
    chosen.check(graph)
    graph = prepared(graph, config)
    original = list(graph.values())
    feeds = read_feeds(calibration_data_reader, graph)
    sites = [site for site in find_sites(graph) if site.node in chosen]
    left = chosen.left(graph)
    if not sites:
        warn_once(f"nothing to quantize: {target}", "no layer of this model can be quantized, or none was chosen")
    rounded = _results(sites) if operators else []
    names = [*coded_values(sites, left=left), *rounded]
    ranges, means = ranges_and_means(graph, sites, names, feeds, method, extra, config)
    put_codes(
        graph,
        sites,
        ranges,
        signed=activations is QuantType.QInt8,
        symmetric=extra.symmetric,
        rounding=NearestCodes(per_channel=per_channel, reduce_range=reduce_range),
        means=means,  # with one scale for all channels small ones lose much, and the same in every place
        left=left,
        rounded=rounded,
    )
    if operators:
        _put_operators(graph, config)
    finish(graph, original, config)
    write_model(graph, target, use_external_data_format)


def _results(sites: Sequence[Site]) -> list[str]:
    """What convolutions give, behind what bounds it: QLinearConv has no other results than codes. Sums of products are
    scaled as fast as they are rounded, so theirs need no codes."""
    found = []
    for site in sites:
        if site.inner is None:
            value = site.node.output
            reader = None if value.is_graph_output else only_use(value)
            bounds = reader is not None and reader.op in ("Relu", "Clip") and not reader.domain
            found.append(reader.output.name if bounds and reader is not None else value.name)
    return found


def _put_operators(graph: Graph, config: SessionConfig) -> None:
    """Layers between codes as the standard's operators on codes: QLinearConv and QLinearMatMul where the result is
    rounded, else ConvInteger and MatMulInteger with the sums scaled."""
    PassManager([each for each in default_passes() if each.name == "fuse_quantized"]).run(graph, config)
    for node in graph:
        zero = node.input(3) if node.op in ("ConvInteger", "MatMulInteger") and not node.domain else None
        if zero is not None and zero.const is not None and not zero.const.numpy().any():
            node.set_inputs(node.inputs[:3])  # the default; runtimes refuse a convolution's for each channel
            prune([zero])
    make_nodes_distinct(graph)


__all__ = ["quantize_static"]
