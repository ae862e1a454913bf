"""A model made ready for quantization: normalizations folded into layers, constants folded, what is unused gone."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto

from ranvier.errors import InvalidConfig, NotSupported
from ranvier.runtime.ort.errors import raises_ort
from ranvier.runtime.ort.quantization.files import checked_target, config_of, read_model, write_model
from ranvier.runtime.quantizing.maker import prepared

_DONE = {"onnx.quant.pre_process": "onnxruntime.quant"}  # by which other tools see that it was done


@raises_ort
def quant_pre_process(
    input_model: str | os.PathLike[str] | ModelProto | None = None,
    output_model_path: str | os.PathLike[str] | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = 2**31 - 1,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    **deprecated_kwargs: Any,
) -> None:
    """Write the model as it will be quantized; ``quantize_static`` and ``quantize_dynamic`` do the same by themselves.

    How shapes are inferred has no bearing on it, so the options about that do nothing.
    """
    input_model = deprecated_kwargs.pop("input_model_path", None) if input_model is None else input_model
    if deprecated_kwargs:
        raise InvalidConfig(f"quant_pre_process has no argument {next(iter(deprecated_kwargs))!r}")
    target, config = checked_target(output_model_path, "output_model_path"), config_of()
    if external_data_location not in (None, f"{target.name}.data"):
        raise NotSupported(
            f"external_data_location: weights are written to '{target.name}.data', not to {external_data_location!r}"
        )
    graph = read_model(input_model, config, "input_model")
    if not skip_optimization:
        graph = prepared(graph, config)
    graph.metadata["custom"] = {**graph.metadata.get("custom", {}), **_DONE}
    write_model(graph, target, save_as_external_data)


__all__ = ["quant_pre_process"]
