"""What a narrower precision must leave alone, found out on a sample of inputs; see docs/precision.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ranvier.config import SessionConfig
from ranvier.graph.ir import Graph
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.compiled import Compiled

__all__ = ["calibrated"]


def calibrated(
    graph: Graph,
    providers: Sequence[ExecutionProvider],
    config: SessionConfig,
    compile_graph: Callable[[SessionConfig], Compiled],
) -> tuple[Compiled, SessionConfig, str]:
    """The graph compiled, the options with more in ``keep_f32`` where a sample asks for it, and what was found, for
    people."""
    if config.precision == "float32" or not config.calibration:
        return compile_graph(config), config, ""
    from ranvier.runtime.narrowing.calibrate import searched  # most sessions have no sample

    return searched(graph, providers, config, compile_graph)
