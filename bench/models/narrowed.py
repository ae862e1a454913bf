"""A model of float32 turned into one of 16-bit floats, as exporters of half-precision models leave it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto, numpy_helper

KINDS = {"fp16": (TensorProto.FLOAT16, np.float16), "bf16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16)}


def narrowed(model: Any, kind: str) -> Any:
    """The same graph with every float32 tensor and every cast to float32 in ``kind``; changes ``model``.

    Numbers that the narrow type has no room for (the lowest float of masks) become its own largest.
    """
    code, dtype = KINDS[kind]
    graph = model.graph
    for info in [*graph.input, *graph.output, *graph.value_info]:
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = code
    for tensor in graph.initializer:
        _narrow(tensor, code, dtype)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = code
            elif attribute.HasField("t"):
                _narrow(attribute.t, code, dtype)
    return model


def _narrow(tensor: Any, code: int, dtype: Any) -> None:
    if tensor.data_type != TensorProto.FLOAT:
        return
    array = numpy_helper.to_array(tensor)
    most = float(ml_dtypes.finfo(dtype).max)
    small = np.clip(array, -most, most).astype(dtype)
    name = tensor.name
    tensor.Clear()
    tensor.name, tensor.data_type = name, code
    tensor.dims.extend(small.shape)
    tensor.raw_data = small.tobytes()
