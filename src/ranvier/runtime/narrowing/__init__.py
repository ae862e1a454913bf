"""What a narrower precision must leave alone, found out on a sample of inputs; see docs/precision.md."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.providers.base import ExecutionProvider

__all__ = ["calibrated"]


def calibrated(
    graph: Graph, providers: Sequence[ExecutionProvider], config: SessionConfig
) -> tuple[SessionConfig, str]:
    """The options with more in ``keep_f32`` where the sample asks for it, and what was found, for people."""
    if config.precision == "float32" or not config.calibration:
        return config, ""
    from ranvier.runtime.narrowing.calibrate import searched  # most sessions have no sample

    return searched(graph, providers, config)
