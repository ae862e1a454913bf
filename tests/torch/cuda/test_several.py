"""Several GPUs in one session: each a provider with a name, a memory and a health of its own. Twins stand for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from ranvier.providers.cuda.steps import NodeStep  # noqa: E402
from ranvier.providers.registry import REGISTRY  # noqa: E402
from ranvier.runtime.session import Session  # noqa: E402
from tests.torch.cuda.models import expected, inputs, rows_graph  # noqa: E402

TWINS = {"cuda:0": {"device": "cpu"}, "cuda:1": {"device": "cpu"}}


def split(**more: Any) -> Session:
    """The product on one GPU, what follows on the other."""
    given = {name: {**options, **more} for name, options in TWINS.items()}
    pins = {"positive": "cuda:1", "result": "cuda:1"}
    return rv.load(
        rows_graph(),
        optimization="none",
        providers=["cuda:0", "cuda:1", "reference"],
        provider_options=given,
        pins=pins,
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_a_graph_over_two_gpus(graphs: bool) -> None:
    with split(cuda_graphs=graphs) as session:
        report = session.report
        assert [node.provider for node in report.nodes] == ["cuda:0", "cuda:1", "cuda:1"]
        assert [part.memory for part in report.parts] == ["cuda:0", "cuda:1"]
        ways = [(t.source, t.target) for t in report.transfers]
        assert ("cuda:0", "cpu") in ways and ("cpu", "cuda:1") in ways  # from one to the other by way of the host
        for rows in (3, 3, 3, 5, 3):
            given = inputs(rows)
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert not report.fallbacks
        told = {(each.provider, each.text.rpartition(": ")[2]) for each in report.captures()}
        state = "captured" if graphs else "CUDA graphs are off"
        assert ("cuda:0", state) in told and ("cuda:1", state) in told
        assert {"cuda:0", "cuda:1"} <= set(session.memory().pools)


def test_a_tensor_of_one_gpu_is_not_taken_for_one_of_the_other() -> None:
    with split() as session:
        given = inputs(2)
        y = session.run_in_place(given)["y"]  # made by the second one, read by the first
        np.testing.assert_allclose(y.numpy(), expected(given), rtol=1e-5, atol=1e-5)
        again = {**given, "x": y}
        wanted = expected({**given, "x": y.numpy()})
        moved = {(m.source, m.target): m.transfers for m in session.report.moved()}
        np.testing.assert_allclose(session.run(again)["y"], wanted, rtol=1e-5, atol=1e-5)
        after = {(m.source, m.target): m.transfers for m in session.report.moved()}
        assert after["cpu", "cuda:0"] == moved["cpu", "cuda:0"] + 1


def test_one_that_is_lost_leaves_the_other_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    original = NodeStep.run

    def run(step: NodeStep, env: Any) -> None:
        if step.node.op == "Relu" and not lost:
            lost.append(step)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        original(step, env)

    lost: list[Any] = []
    monkeypatch.setattr(NodeStep, "run", run)
    with rv.load(
        rows_graph(),
        optimization="none",
        providers=["cuda:1", "cuda:0", "reference"],
        provider_options=TWINS,
    ) as session:
        for _ in range(2):
            given = inputs(3)
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        first, second, _ = session.providers
        assert "was lost" in str(first.available()) and second.available() is None
        assert "cuda:1" in session.report.fallbacks[0]
        assert session.health["cuda:1"].failures > 0 and session.health["cuda:0"].failures == 0


def test_names() -> None:
    assert REGISTRY.resolve("cuda:1") == REGISTRY.resolve("gpu:01") == "cuda:1"
    assert not REGISTRY.automatic("cuda:3")
    for name in ("cuda:", "cuda:x", "cpu:1", "cuda:-1", ":1"):
        with pytest.raises(errors.InvalidConfig, match="unknown provider"):
            REGISTRY.resolve(name)
    with pytest.raises(errors.ProviderUnavailable, match="cuda:77"):
        REGISTRY.get("cuda:77")


def test_options_that_contradict_the_name() -> None:
    with pytest.raises(errors.InvalidConfig, match="'cuda:1' cannot have device=2"):
        rv.load(rows_graph(), providers=["cuda:1"], provider_options={"cuda:1": {"device": 2}})
    twins = {"cuda": {"device": "cpu"}, "cuda:0": {"device": "cpu"}}
    with pytest.raises(errors.InvalidConfig, match="'cuda' and 'cuda:0' are both on cuda:0"):
        rv.load(rows_graph(), providers=["cuda", "cuda:0"], provider_options=twins)
