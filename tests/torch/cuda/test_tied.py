"""Runs tied to tensors: the same memory every time, results in the place of operands, and what cannot be tied."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier.errors import InvalidConfig, InvalidInput  # noqa: E402
from tests.torch.device import options  # noqa: E402

STEP = """<ir_version: 10, opset_import: ["" : 20]>
g (float[n, 3] x, float[n, 3] state) => (float[n, 3] y, float[n, 3] new)
<float[3] w = {1.0, 2.0, 3.0}> { scaled = Mul(x, w) new = Add(state, scaled) y = Relu(new) }"""


def _session(text: str = STEP, *, graphs: bool = True, providers: tuple[str, ...] = ("cuda", "reference")) -> Any:
    given = options(cuda_graphs=graphs)
    return rv.load(onnx.parser.parse_model(text), providers=list(providers), provider_options=given)


def _tensor(session: Any, array: Any) -> Any:
    """A tensor in the memory of the session's provider."""
    provider = session.providers[0]
    return provider.hand_out(provider.upload([array]))[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_call_reads_and_writes_the_same_memory_every_time(graphs: bool) -> None:
    with _session(graphs=graphs) as session:
        x, state = (_tensor(session, np.full((2, 3), v, np.float32)) for v in (1, 0))
        run = session.tied({"x": x, "state": state})
        first = run()
        assert first["y"].tolist() == [[1, 2, 3]] * 2
        x.fill_(-1)
        again = run()
        assert again["new"].tolist() == [[-1, -2, -3]] * 2
        assert again["y"].tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("graphs", [False, True])
def test_a_result_takes_the_place_of_an_operand(graphs: bool) -> None:
    with _session(graphs=graphs) as session:
        x, state = (_tensor(session, np.full((2, 3), v, np.float32)) for v in (1, 0))
        run = session.tied({"x": x, "state": state}, {"new": "state"})
        state.zero_()  # preparing has run it
        for count in range(1, 4):
            found = run()
            assert found["new"].data_ptr() == state.data_ptr()
            assert state.tolist() == [[count, 2 * count, 3 * count]] * 2


def test_arrays_are_brought_there_once() -> None:
    with _session() as session:
        given = {name: np.ones((2, 3), np.float32) for name in ("x", "state")}
        assert session.tied(given)()["y"].tolist() == [[2, 3, 4]] * 2


def test_names_are_checked() -> None:
    with _session() as session:
        given = {name: np.ones((2, 3), np.float32) for name in ("x", "state")}
        with pytest.raises(InvalidInput, match=r"no output 'knew'.*new"):
            session.tied(given, {"knew": "state"})
        with pytest.raises(InvalidInput, match=r"no input 'stat'.*state"):
            session.tied(given, {"new": "stat"})


def test_a_model_in_parts_cannot_be_tied() -> None:
    with _session(providers=("reference",)) as session:
        given = {name: np.ones((2, 3), np.float32) for name in ("x", "state")}
        with pytest.raises(InvalidConfig, match="reference"):
            session.tied(given)
