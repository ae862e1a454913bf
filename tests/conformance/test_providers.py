"""One suite over the providers that somebody names: each takes what it can, the reference the rest, and the reference
alone is the oracle. (``cpu`` and ``reference`` run all cases in ``test_onnx.py``.)

By itself a sample that has every operator; ``make conformance-providers`` runs all cases.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, NodeProto, TensorProto

import ranvier as rv
from ranvier import errors
from ranvier.dtypes import DType
from ranvier.graph.ir import Graph
from ranvier.graph.tensors import ConstTensor
from ranvier.graph.types import Symbol, TensorType
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.session import Session
from tests.conformance.cases import WAITING, Case, all_cases, check
from tests.conformance.deviations import DEVIATIONS, SEEN_WITH

PROVIDERS = ("onnxruntime", "openvino", "mlx", "sim", "remote")
FULL = os.environ.get("RANVIER_CONFORMANCE") == "full"
_ORDINARY = {TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL}  # which every provider has


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attr in node.attribute:
            if attr.g.node:
                yield from _nodes(attr.g)


def _is_ordinary(case: Case) -> bool:
    return all(i.type.tensor_type.elem_type in _ORDINARY for i in case.model().graph.input)


def _is_of_floats(case: Case) -> bool:
    return all(i.type.tensor_type.elem_type == TensorProto.FLOAT for i in case.model().graph.input)


@functools.cache
def _cases() -> tuple[Case, ...]:
    """All cases, or for every operator the first one, the first with ordinary types, the plainest, the last, the first
    and the last with floats only, and the first one with ordinary types of every opset that it occurs in: others take
    some versions only."""
    cases = [case for case in all_cases() if case.kind != "light" and case.name not in WAITING]
    if FULL:
        return tuple(cases)
    by_operator: dict[tuple[Any, ...], list[Case]] = {}
    effort: dict[tuple[Any, ...], int] = {}  # operands and attributes of an operator in a case
    for case in cases:
        model = case.model()
        opsets = {each.domain: each.version for each in model.opset_import}
        for node in _nodes(model.graph):
            by_operator.setdefault((node.domain, node.op_type), []).append(case)
            effort[node.domain, node.op_type, case.name] = len(node.input) + len(node.attribute)
            by_operator.setdefault((node.domain, node.op_type, opsets.get(node.domain)), []).append(case)
    chosen: set[str] = set()
    for key, found in by_operator.items():
        simple = [case for case in found if "_expanded" not in case.name] or found
        chosen.add(next((case for case in simple if _is_ordinary(case)), simple[0]).name)
        if len(key) == 2:
            plainest = min(simple, key=lambda case: effort[*key, case.name])
            chosen.update((simple[0].name, plainest.name, simple[-1].name))
            floats = [case.name for case in simple if _is_of_floats(case)]
            chosen.update([*floats[:1], *floats[-1:]])
    return tuple(case for case in cases if case.name in chosen)


def _version(provider: str) -> str:
    try:
        return importlib.metadata.version(provider)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _parameters() -> list[Any]:
    found = []
    for provider in PROVIDERS:
        strict = _version(provider).startswith(SEEN_WITH.get(provider, ""))
        listed = DEVIATIONS.get(provider, {})
        for case in _cases():
            reason = listed.get(case.name)
            marks = [pytest.mark.xfail(reason=reason, strict=strict)] if reason else []
            found.append(pytest.param(provider, case, id=f"{provider}-{case.name}", marks=marks))
    return found


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Something for ``remote`` to reach; one for all sessions."""
    pytest.importorskip("grpc")
    from ranvier.runtime.worker.network import Worker, WorkerSettings

    made = Worker(WorkerSettings(providers=("reference",)))
    yield made
    made.close(0.1)


@pytest.fixture(scope="module")
def options(request: pytest.FixtureRequest) -> Any:
    """What a provider must be told, by its name; skips where its library is absent."""

    @functools.cache
    def needed(provider: str) -> dict[str, Any]:
        if provider == "remote":
            return {"provider_options": {"remote": {"address": request.getfixturevalue("worker").address}}}
        try:
            REGISTRY.get(provider)
        except errors.ProviderUnavailable as error:
            pytest.skip(str(error))
        return {}

    return needed


@pytest.fixture(scope="module")
def oracle() -> Iterator[Any]:
    """The inputs of a case and what the reference makes of them."""
    answers: dict[str, list[tuple[list[Any], list[Any]]]] = {}

    def wanted(case: Case) -> list[tuple[list[Any], list[Any]]]:
        if case.name not in answers:
            model = case.model()
            with rv.load(model, optimization="none", providers=["reference"]) as session:
                found = [(inputs, list(session.run(inputs).values())) for inputs, _ in case.data(model)]
            answers[case.name] = found
        return answers[case.name]

    yield wanted
    answers.clear()


@pytest.mark.parametrize(("provider", "case"), _parameters())
def test_case(provider: str, case: Case, options: Any, oracle: Any) -> None:
    with rv.load(case.model(), optimization="none", providers=[provider, "reference"], **options(provider)) as session:
        for node in session.report.nodes:
            if node.provider != provider:
                reasons = [reason for who, reason in node.declined if who == provider]
                assert reasons and all(reason.strip() for reason in reasons), f"{node.op} was left without a reason"
        for inputs, wanted in oracle(case):
            check(list(session.run(inputs).values()), wanted, case)
        assert not session.report.fallbacks  # what a provider cannot run it must not claim


def test_lists_name_cases_that_exist() -> None:
    names = {case.name for case in all_cases()}
    for listed in DEVIATIONS.values():
        assert listed.keys() <= names


@pytest.mark.skipif(not FULL, reason="the sample is looked at where all cases run")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_sample_has_every_operator_that_is_claimed(provider: str, options: Any, monkeypatch: Any) -> None:
    def claimed(cases: tuple[Case, ...]) -> set[str]:
        found: set[str] = set()
        for case in cases:
            chain = [provider, "reference"]
            with rv.load(case.model(), optimization="none", providers=chain, **options(provider)) as session:
                found.update(node.op for node in session.report.nodes if node.provider == provider)
        return found

    everything = claimed(_cases())
    monkeypatch.setitem(globals(), "FULL", False)
    assert claimed(_cases.__wrapped__()) == everything


WEIGHTS = np.random.default_rng(5).standard_normal((8, 8)).astype(np.float32)


def _graph() -> Graph:
    """MatMul, Relu, Gather by the second input: of any number of rows."""
    graph = Graph("rows", opsets={"": 21})
    rows = Symbol("rows")
    kind = TensorType(DType.float32, (rows, 8))
    x = graph.add_input("x", kind)
    chosen = graph.add_input("chosen", TensorType(DType.int64, (2,)))
    weights = graph.add_constant(ConstTensor.of(WEIGHTS), "w")
    product = graph.add("MatMul", [x, weights], version=13, name="product").output
    positive = graph.add("Relu", [product], version=14, name="positive").output
    result = graph.add("Gather", [positive, chosen], {"axis": 0}, version=13, name="result").output
    product.type = positive.type = kind
    result.type = TensorType(DType.float32, (2, 8))
    result.name = "y"
    graph.outputs = [result]
    return graph


def _session(provider: str, options: Any) -> Session:
    return rv.load(_graph(), optimization="none", providers=[provider, "reference"], **options(provider))


def _input(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
    return {"x": x, "chosen": np.array([0, -1])}


def _expected(given: dict[str, np.ndarray]) -> np.ndarray:
    return np.maximum(given["x"] @ WEIGHTS, 0)[given["chosen"]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_everything_runs_there(provider: str, options: Any) -> None:
    with _session(provider, options) as session:
        elsewhere = {node.name for node in session.report.nodes if node.provider != provider}
        assert elsewhere == ({"result"} if provider == "openvino" else set())  # which looks at no index
        for rows in (1, 5, 3, 5):
            given = _input(rows)
            found = session.run(given)["y"]
            assert found.dtype == np.float32 and found.shape == (2, 8)
            np.testing.assert_allclose(found, _expected(given), rtol=1e-5, atol=1e-5)
        assert not session.report.fallbacks


@pytest.mark.parametrize("provider", PROVIDERS)
def test_two_sessions_and_several_threads_at_once(provider: str, options: Any) -> None:
    wrong: list[BaseException] = []

    def work(session: Session, first: int) -> None:
        try:
            for k in range(15):
                given = _input(1 + (first + k) % 7)
                np.testing.assert_allclose(session.run(given)["y"], _expected(given), rtol=1e-5, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    with _session(provider, options) as one, _session(provider, options) as other:
        threads = [threading.Thread(target=work, args=(s, k)) for k, s in enumerate((one, other, one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert not one.report.fallbacks and not other.report.fallbacks


_WRONG: dict[str, dict[str, np.ndarray]] = {
    "type": {"x": np.ones((2, 8), np.float64), "chosen": np.array([0, 1])},
    "shape": {"x": np.ones((2, 7), np.float32), "chosen": np.array([0, 1])},
    "index": {"x": np.ones((2, 8), np.float32), "chosen": np.array([0, 2])},  # only looking at it tells
    "missing": {"x": np.ones((2, 8), np.float32)},
    "unknown": {"x": np.ones((2, 8), np.float32), "chosen": np.array([0, 1]), "z": np.ones(1)},
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_inputs_have_typed_errors(provider: str, wrong: str, options: Any) -> None:
    with _session(provider, options) as session:
        with pytest.raises(errors.RanvierError):
            session.run(_WRONG[wrong])
        right = _input(4)  # and nothing is broken afterwards
        np.testing.assert_allclose(session.run(right)["y"], _expected(right), rtol=1e-5, atol=1e-5)
