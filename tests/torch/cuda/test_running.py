"""Variants by size, runs through static memory, threads, wrong inputs, precision."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from ranvier.providers.cuda.options import CudaOptions  # noqa: E402
from ranvier.providers.cuda.provider import CudaProvider  # noqa: E402
from ranvier.runtime.session import Session  # noqa: E402
from tests.torch.cuda.models import expected, inputs, load, rows_graph  # noqa: E402
from tests.torch.device import options  # noqa: E402


@pytest.mark.parametrize("graphs", [False, True])
def test_sizes_come_and_go(graphs: bool) -> None:
    with load(cuda_graphs=graphs, graphs_kept=2) as session:
        assert {node.provider for node in session.report.nodes} == {"cuda"}
        for rows in (1, 5, 3, 5, 5, 5, 1, 1, 1, 1, 3):
            given = inputs(rows)
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert not session.report.fallbacks


def _kernel(session: Session) -> Any:
    (part,) = session._compiled.parts
    return part.kernel


def test_a_run_that_repeats_is_captured_and_reads_fresh_inputs() -> None:
    with load(cuda_graphs=True) as session:
        seen = []
        for k in range(6):
            given = inputs(4)
            given["x"] = given["x"] + np.float32(k)
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
            seen.append(_kernel(session).graph_report())
        assert "captured" not in seen[0][0] and "captured" in seen[-1][0]


def test_captured_results_are_the_callers_own() -> None:
    with load(cuda_graphs=True) as session:
        one = {**inputs(4), "x": np.ones((4, 8), np.float32)}
        two = {**inputs(4), "x": -np.ones((4, 8), np.float32)}
        for _ in range(4):
            first = session.run(one)["y"]
            kept = first.copy()
            session.run(two)
            np.testing.assert_array_equal(first, kept)


def test_as_many_variants_are_kept_as_the_option_says() -> None:
    with load(graphs_kept=2) as session:
        for rows in range(1, 6):
            session.run(inputs(rows))
        assert len(_kernel(session).graph_report()) == 2


@pytest.mark.parametrize("graphs", [False, True])
def test_several_threads_at_once(graphs: bool) -> None:
    wrong: list[BaseException] = []

    def work(session: Session, first: int) -> None:
        try:
            for k in range(15):
                given = inputs(1 + (first + k) % 4)
                np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    with load(cuda_graphs=graphs) as session:
        threads = [threading.Thread(target=work, args=(session, k)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and not session.report.fallbacks


@pytest.mark.parametrize("graphs", [False, True])
def test_an_index_outside_is_a_typed_error_and_breaks_nothing(graphs: bool) -> None:
    with load(cuda_graphs=graphs) as session:
        for _ in range(4):
            with pytest.raises(errors.InvalidValue, match="an index is outside an axis of 2"):
                session.run({"x": np.ones((2, 8), np.float32), "chosen": np.array([0, 2])})
            right = inputs(2)
            np.testing.assert_allclose(session.run(right)["y"], expected(right), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "bits"), [("f16", 10), ("bf16", 7)])
def test_products_of_fewer_bits_where_the_options_allow_it(precision: str, bits: int) -> None:
    given = inputs(6)
    exact = expected(given)
    with load(precision=precision) as session:
        found = session.run(given)["y"]
    assert found.dtype == np.float32
    assert 0 < np.abs(found - exact).max() < 2.0**-bits * 64


def test_memory_is_told_and_trimmed() -> None:
    with load() as session:
        session.run(inputs(3))
        assert session.memory().pools["cuda"].failures == 0
        session.trim()
        given = inputs(3)
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"device": "gpu"}, "device"),
        ({"device": -1}, "device"),
        ({"device": True}, "device"),
        ({"precision": "f8"}, "precision"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"graphs_kept": 0}, "graphs_kept"),
        ({"cuda_graphs": "perhaps"}, "cuda_graphs"),
    ],
)
def test_wrong_options(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=wrong):
        CudaOptions(**options)


def test_options_as_text() -> None:
    found = CudaOptions(device="cuda:1", cuda_graphs="off", memory_limit="1000", triton="auto")  # type: ignore[arg-type]
    assert (found.device, found.cuda_graphs, found.memory_limit, found.triton) == (1, False, 1000, None)
    assert str(CudaProvider(found).device) == "cuda:1"


def test_nobody_gets_the_twin_who_did_not_ask() -> None:
    reason = CudaProvider().available()
    if reason is None:
        pytest.skip("this machine has a GPU")
    assert reason.strip()
    with pytest.raises(errors.ProviderUnavailable):
        rv.load(rows_graph(), providers=["cuda"])


def test_torch_is_not_imported_before_the_provider_is_used() -> None:
    code = (
        "import sys, ranvier as rv\n"
        "from ranvier.providers.registry import REGISTRY\n"
        "from ranvier.providers.cuda.provider import CudaProvider\n"
        "CudaProvider().capability()\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_report_says_what_is_captured_and_why_not() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[n, 3] x) => (float[n, 3] y) { r = RandomNormalLike(x) y = Add(x, r) }"""
    )
    given = options(cuda_graphs=True)
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=given) as session:
        (before,) = session.report.captures()
        assert (before.part, before.provider) == (0, "cuda") and before.text.startswith("any sizes: ")
        for _ in range(4):
            session.run({"x": np.zeros((2, 3), np.float32)})
        (after,) = session.report.captures()
        assert after.text.startswith("float32[2, 3]: ")
        assert after.text.partition(": ")[2] == before.text.partition(": ")[2]  # the reason
        assert after.text in str(session.report)
        assert session.report.to_dict()["captures"] == [{"part": 0, "provider": "cuda", "text": after.text}]
    with load(cuda_graphs=True) as session:
        assert session.report.captures() == []
        for _ in range(4):
            session.run(inputs(2))
        assert [each.text for each in session.report.captures()] == ["float32[2, 8], int64[2]: captured"]


def test_random_numbers_with_a_seed_do_not_keep_a_run_from_being_captured() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        g (float[n, 3] x) => (float[n, 3] y) { r = RandomNormalLike<seed = 3.0>(x) y = Add(x, r) }"""
    )
    x = np.zeros((2, 3), np.float32)
    with rv.load(model, optimization="none", providers=["reference"]) as oracle:
        wanted = oracle.run({"x": x})["y"]
    given = options(cuda_graphs=True)
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=given) as session:
        for k in range(4):
            np.testing.assert_allclose(session.run({"x": x + k})["y"], wanted + k, rtol=1e-6, atol=1e-6)
        assert [each.text for each in session.report.captures()] == ["float32[2, 3]: captured"]
