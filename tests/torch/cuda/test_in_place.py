"""Tensors that stay where they are between runs: handed out, given back, exchanged with other libraries."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from tests.torch.cuda.models import expected, inputs, load  # noqa: E402
from tests.torch.device import options  # noqa: E402


def test_results_stay_and_come_back_without_a_transfer() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]>g (float[n, 3] x) => (float[n, 3] y) { y = Add(x, x) }'
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        one = session.run_in_place({"x": x})["y"]
        assert isinstance(one, torch.Tensor)
        moved = sum(count.bytes for count in session._moved.snapshot())
        two = session.run_in_place({"x": one})["y"]
        np.testing.assert_array_equal(torch.from_dlpack(two).cpu().numpy(), x * 4)
        three = session.run({"x": two})["y"]
        np.testing.assert_array_equal(three, x * 8)
        assert isinstance(three, np.ndarray)
        # of the last three runs only the last one's result went to the host
        assert sum(count.bytes for count in session._moved.snapshot()) == moved + x.nbytes


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_handed_out_is_the_callers_own(graphs: bool) -> None:
    with load(cuda_graphs=graphs) as session:
        for _ in range(4):
            given = inputs(4)
            first = session.run_in_place(given)["y"]
            kept = first.clone()
            session.run_in_place({**given, "x": given["x"] + 1})
            assert torch.equal(first, kept)
            first.zero_()
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)


def test_weights_and_inputs_that_are_results_are_copied() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[2] x) => (float[2] y, float[2] z, float[1, 2] v) <float[2] w = {1.0, 2.0}>
        { y = Identity(x) z = Identity(w) axes = Constant<value = int64[1] {0}>() v = Unsqueeze(w, axes) }"""
    )
    x = np.array([3, 4], np.float32)
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        for _ in range(3):
            found = session.run_in_place({"x": x})
            for name, wanted in (("y", [3, 4]), ("z", [1, 2]), ("v", [[1, 2]])):
                assert torch.as_tensor(found[name]).tolist() == wanted
            for tensor in found.values():
                torch.as_tensor(tensor).zero_()
            assert x.tolist() == [3, 4]


def test_a_part_on_the_host_gets_the_elements() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[n] x) => (float[n] y, int64[1, m] z) { y = Add(x, x) z = NonZero(x) }"""
    )
    x = np.array([0, 1, 2], np.float32)
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=options()) as session:
        assert {node.provider for node in session.report.nodes} == {"cuda", "reference"}
        there = session.run_in_place({"x": x})["y"]
        found = session.run({"x": there})
        np.testing.assert_array_equal(found["y"], x * 4)
        np.testing.assert_array_equal(found["z"], [[1, 2]])


def test_wrong_indices_are_told_when_results_are_handed_out() -> None:
    with load() as session, pytest.raises(errors.InvalidValue, match="an index is outside"):
        session.run_in_place({"x": np.ones((2, 8), np.float32), "chosen": np.array([0, 5])})


def test_tensors_of_torch_on_the_host_are_read_without_a_copy() -> None:
    given = inputs(3)
    with load() as session:
        found = session.run({name: torch.from_numpy(x) for name, x in given.items()})["y"]
        np.testing.assert_allclose(found, expected(given), rtol=1e-5, atol=1e-5)
