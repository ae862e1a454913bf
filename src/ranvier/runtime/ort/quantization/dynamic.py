"""Weights in 8 bits, and activations by the range they have when they come."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from onnx import ModelProto

from ranvier.logs import warn_once
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.quantization.chosen import Chosen
from ranvier.runtime.ort.quantization.extra import with_bodies
from ranvier.runtime.ort.quantization.files import checked_target, config_of, read_model, write_model
from ranvier.runtime.ort.quantization.kinds import QuantType, kind_of
from ranvier.runtime.quantizing.dynamic import dynamic_sites
from ranvier.runtime.quantizing.dynamic import quantize_dynamic as put_codes
from ranvier.runtime.quantizing.maker import finish, prepared
from ranvier.runtime.quantizing.recurrent import find_recurrent, quantize_recurrent
from ranvier.runtime.quantizing.sites import find_sites


@raises_ort
def quantize_dynamic(
    model_input: str | os.PathLike[str] | ModelProto,
    model_output: str | os.PathLike[str],
    op_types_to_quantize: Sequence[str] | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    weight_type: QuantType = QuantType.QInt8,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
) -> None:
    """Write the model with codes for weights of products, convolutions and LSTM; what they read is rounded as it
    comes."""
    bytes_only = (QuantType.QInt8, QuantType.QUInt8)
    weights = kind_of(QuantType, "weight_type", weight_type, bytes_only, "MatMulNBitsQuantizer has fewer bits")
    bodies = with_bodies(extra_options)
    chosen = Chosen(op_types_to_quantize, nodes_to_quantize, nodes_to_exclude, gemm_too=True)
    target, config = checked_target(model_output), config_of()
    graph = read_model(model_input, config)
    chosen.check(graph)
    graph = prepared(graph, config)
    original = list(graph.values())
    # a convolution of few terms gains nothing, but may be asked for by its name
    every = (find_sites if chosen.named else dynamic_sites)(graph, bodies=bodies)
    sites = [site for site in every if site.node in chosen]
    recurrent = [node for node in find_recurrent(graph, bodies=bodies) if node in chosen]
    if not sites and not recurrent:
        warn_once(f"nothing to quantize: {target}", "no layer of this model can be quantized, or none was chosen")
    signed, bits = weights is QuantType.QInt8, 7 if reduce_range else 8
    put_codes(sites, bits=bits, signed=signed, per_channel=bool(per_channel))
    quantize_recurrent(recurrent)
    finish(graph, original, config)
    write_model(graph, target, use_external_data_format)


__all__ = ["quantize_dynamic"]
