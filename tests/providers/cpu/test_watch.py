"""Runs that may be ended early: those of milliseconds are watched while they last, shorter ones are asked before."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import ranvier as rv
from ranvier.errors import Cancelled
from ranvier.providers.cpu import specialise
from ranvier.providers.cpu.watch import Watch

X = np.ones((4, 8), np.float32)


def relu() -> rv.Session:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])],
    )
    return rv.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize("predicted, watched", [(specialise._WATCHED_NS, 0), (-1.0, 1)])
def test_a_thread_watches_long_runs_alone(monkeypatch: pytest.MonkeyPatch, predicted: float, watched: int) -> None:
    begun: list[Watch] = []

    class Counted(Watch):
        def __enter__(self) -> Watch:
            begun.append(self)
            return super().__enter__()

    monkeypatch.setattr(specialise, "Watch", Counted)
    monkeypatch.setattr(specialise, "_WATCHED_NS", predicted)
    with relu() as session:
        np.testing.assert_array_equal(session.run({"x": X}, options=rv.RunOptions())["y"], X)
        assert len(begun) == watched
        stopped = rv.RunOptions()
        stopped.terminate = True
        with pytest.raises(Cancelled):
            session.run({"x": X}, options=stopped)
