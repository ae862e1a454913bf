"""Models from a script's path or message, and to the file it names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnx import ModelProto

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.runtime.ort.providers import parse_providers


def read_model(model: Any, config: SessionConfig, option: str = "model_input") -> Graph:
    if not isinstance(model, str | os.PathLike | ModelProto):
        raise InvalidConfig(f"{option} must be a path or a ModelProto, got {type(model).__name__}")
    return onnx_format.read(model, limits=config.limits)


def checked_target(path: Any, option: str = "model_output") -> Path:
    """Where a model is to be written; refused before anything is computed for it."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidConfig(f"{option} must be a path, got {type(path).__name__}")
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise InvalidConfig(f"{option}: {str(path)!r} is no file in a folder that exists")
    return target


def write_model(graph: Graph, target: Path, external: bool) -> None:
    """Weights go beside the model where that is asked for, or where they are too large for one file."""
    onnx_format.save(as_declared(graph), target, external_data=True if external else None)


def as_declared(graph: Graph) -> Graph:
    """The graph, with names of dims of its outputs as the model had them: others may be known to be equal, but scripts
    ask for these."""
    for value in graph.outputs:
        declared = graph.metadata.get("declared_outputs", {}).get(value.name)
        if declared is not None:
            value.type = declared.merge(value.type)
    return graph


def config_of(providers: Any = None) -> SessionConfig:
    """Of sessions that look at samples; ``providers`` are calibration_providers."""
    if providers is None:
        return SessionConfig.default()
    names, options = parse_providers(providers, None)
    return SessionConfig.default(providers=names, provider_options=options)


__all__ = ["as_declared", "checked_target", "config_of", "read_model", "write_model"]
