"""Placement by cost in sessions: what is fast gets the work, pins bind, and plain sessions measure nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import ranvier as rv
from ranvier import errors
from ranvier.codegen.llvm import cache
from ranvier.runtime.calibration import lazy, store
from ranvier.runtime.calibration.table import Figures
from ranvier.runtime.report import report_for
from tests.runtime.small_models import model_of

BIG, SMALL = 256, 4
FAST = {"gflops": 1e6, "latency": 0.0, "bandwidth": 1e12}


@pytest.fixture(autouse=True)
def nominal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared and nominal speeds: what is measured differs from machine to machine."""
    monkeypatch.setenv(lazy.VARIABLE, "off")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(store, "_read", {})


def products() -> ModelProto:
    """A large product, and a small one that does not depend on it."""
    rng = np.random.default_rng(3)
    weights = {
        "w": rng.standard_normal((BIG, BIG)).astype(np.float32) / BIG,
        "v": rng.standard_normal((SMALL, SMALL)).astype(np.float32),
    }
    return model_of(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="big"),
            helper.make_node("Relu", ["a"], ["y"], name="after"),
            helper.make_node("MatMul", ["s", "v"], ["z"], name="small"),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [BIG, BIG]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [SMALL, SMALL]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [BIG, BIG]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [SMALL, SMALL]),
        ],
        weights,
    )


def session(sim: dict[str, Any] | None = None, **options: Any) -> rv.Session:
    given: dict[str, Any] = {"providers": ("cpu", "sim"), "policy": "cost", "provider_options": {"sim": sim or FAST}}
    return rv.load(products(), **{**given, **options})


def where(made: rv.Session) -> dict[str, str]:
    return {node.name: node.provider for node in made.report.nodes}


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    return {
        "x": rng.standard_normal((BIG, BIG)).astype(np.float32),
        "s": rng.standard_normal((SMALL, SMALL)).astype(np.float32),
    }


def test_a_fast_device_gets_large_products_and_small_ones_stay() -> None:
    with session() as made, rv.load(products(), providers="reference") as oracle:
        assert where(made) == {"big": "sim", "after": "sim", "small": "cpu"}
        found, expected = made.run(inputs()), oracle.run(inputs())
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5)


def test_nothing_goes_to_a_device_that_is_far_away() -> None:
    with session({**FAST, "latency": 1.0}) as made:
        assert set(where(made).values()) == {"cpu"}
        assert len(made.report.parts) == 1


def test_nothing_goes_to_a_device_that_is_slow() -> None:
    with session({**FAST, "gflops": 0.01}) as made:
        assert set(where(made).values()) == {"cpu"}


def test_weights_that_do_not_fit_stay() -> None:
    with session({**FAST, "memory": BIG * BIG}) as made:
        assert where(made)["big"] == "cpu"


def test_priority_ignores_costs() -> None:
    with session({**FAST, "latency": 0.5}, providers=("sim", "cpu"), policy="priority") as made:
        assert set(where(made).values()) == {"sim"}
        assert made.report.predicted is None


def test_a_list_of_providers_is_a_priority_and_auto_is_not() -> None:
    assert rv.SessionConfig().placing == "cost"
    assert rv.SessionConfig(providers=("cpu", "reference")).placing == "priority"
    assert rv.SessionConfig(providers=("cpu", "reference"), policy="cost").placing == "cost"
    assert rv.SessionConfig(policy="priority").placing == "priority"
    with pytest.raises(errors.InvalidConfig, match="did you mean 'cost'"):
        rv.SessionConfig(policy="costs")


@pytest.mark.parametrize("policy", ["cost", "priority"])
def test_pins_are_honoured(policy: str) -> None:
    with session(policy=policy, pins={"op:MatMul": "cpu", "small": "sim"}) as made:
        placed = where(made)
        assert placed["big"] == "cpu"
        assert placed["small"] == "sim"
        declined = {node.name: dict(node.declined) for node in made.report.nodes}
        if policy == "cost":
            assert declined["big"]["sim"] == "pinned elsewhere by 'op:MatMul'"
    with session(
        policy=policy, pins={"re:(big|after)": ["reference", "sim"]}, providers=("cpu", "sim", "reference")
    ) as made:
        placed = where(made)
        assert placed["big"] == placed["after"] == "sim"
        assert placed["small"] == "cpu"


def test_a_pin_that_fits_nothing_says_so() -> None:
    with pytest.raises(errors.InvalidConfig, match="matches no node"):
        session(pins={"bigger": "cpu"})
    with pytest.raises(errors.InvalidConfig, match=r"unknown provider 'sum'.*did you mean 'sim'"):
        session(pins={"big": "sum"})
    with pytest.raises(errors.UnsupportedOp, match="pinned elsewhere"):
        session({**FAST, "ops": "Relu"}, pins={"big": "sim"})


def test_a_pin_whose_node_was_optimised_away_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(
        [helper.make_node("Identity", ["x"], ["a"], name="gone"), helper.make_node("Relu", ["a"], ["y"], name="kept")],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    with rv.load(model, pins={"gone": "cpu"}) as made:
        assert [node.name for node in made.report.nodes] == ["kept"]
    assert "the optimizer left no node" in caplog.text


def test_a_pin_does_not_stand_in_the_way_of_fallback() -> None:
    with session({**FAST, "faults": "fail/1"}, pins={"big": "sim"}) as made:
        found = made.run(inputs())
        assert np.isfinite(found["y"]).all()
        assert made.health["sim"].fallbacks == 1


def test_nodes_that_failed_to_compile_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from ranvier.providers.sim.provider import SimProvider

    def refuse(self: SimProvider, part: Any, ctx: Any) -> Any:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(SimProvider, "compile", refuse)
    with session() as made:
        assert set(where(made).values()) == {"cpu"}
        assert any("no compiler today" in text for text in made.report.fallbacks)


def test_nested_graphs_follow_the_same_rules() -> None:
    branch = [
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], [f"{name}_out"], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [BIG, BIG])],
        )
        for name in ("yes", "no")
    ]
    model = model_of(
        [helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch[0], else_branch=branch[1])],
        [
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [BIG, BIG]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [BIG, BIG])],
        {"w": np.eye(BIG, dtype=np.float32)},
    )
    options: dict[str, Any] = {
        "providers": ("cpu", "sim", "reference"),
        "provider_options": {"sim": {**FAST, "faults": "fail/1"}},
        "fallback": "on",
    }
    feed = {"c": np.array(True), "x": inputs()["x"]}
    with rv.load(model, policy="cost", **options) as made:
        np.testing.assert_allclose(made.run(feed)["y"], feed["x"], rtol=1e-5)
    with rv.load(model, policy="cost", pins={"yes": "cpu", "no": "cpu"}, **options) as made:
        np.testing.assert_allclose(made.run(feed)["y"], feed["x"], rtol=1e-5)
        assert made.health["sim"].failed == 0  # the body was tied to another provider


def test_the_report_says_what_each_provider_would_have_cost() -> None:
    with session() as made:
        predicted = made.report.predicted
        assert predicted is not None
        assert predicted.sources == {"cpu": "nominal", "sim": "nominal"}
        assert {part.provider for part in predicted.parts} == {"cpu", "sim"}
        assert sum(t.bytes for t in predicted.transfers) == 2 * 4 * BIG * BIG
        names = [node.name for node in made.report.nodes]
        options = dict(zip(names, predicted.options))
        assert [o.reason for o in options["big"] if o.provider == "sim"] == ["chosen"]
        assert all(o.seconds is not None for o in options["small"])
        assert predicted.seconds <= predicted.compute + predicted.transfer + predicted.launch + 1e-12
        data = made.report.to_dict()["predicted"]
        assert data["parts"][0]["provider"] in ("cpu", "sim")
        assert len(data["options"]) == len(names)
        assert "predicted" in str(made.report)


def test_other_sizes_have_alternatives_too() -> None:
    rng = np.random.default_rng(3)
    model = model_of(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="big"),
            helper.make_node("Relu", ["a"], ["y"], name="after"),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", BIG])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", BIG])],
        {"w": rng.standard_normal((BIG, BIG)).astype(np.float32)},
    )
    with rv.load(model, providers=("cpu", "sim"), policy="cost", provider_options={"sim": FAST}) as made:
        few, many = (report_for(made, {"rows": rows}).predicted for rows in (1, 10_000))
    assert few is not None and many is not None
    for less, more in zip(few.options, many.options, strict=True):
        for a, b in zip(less, more, strict=True):
            assert a.seconds is not None and b.seconds is not None
            assert a.seconds < b.seconds
    assert [[part.nodes for part in each.parts] for each in (few, many)] == [[(0, 1)]] * 2


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The providers that are measured from here on; nothing keeps them from it."""
    monkeypatch.delenv(lazy.VARIABLE)
    asked: list[str] = []
    genuine = lazy.measure

    def noted(provider: Any, *given: Any, **how: Any) -> Any:
        asked.append(provider.name)
        return genuine(provider, *given, **{**how, "budget": 0.05})

    monkeypatch.setattr(lazy, "measure", noted)
    yield asked


def test_plain_sessions_measure_nothing(measured: list[str]) -> None:
    for options in ({}, {"providers": ("cpu", "reference"), "policy": "cost"}, {"providers": ("cpu", "sim")}):
        with rv.load(products(), **options) as made:
            assert made.report.predicted is None
    assert measured == []


def test_a_session_that_must_weigh_measures_once(measured: list[str]) -> None:
    for _ in range(2):
        with session() as made:
            assert made.report.predicted is not None
            assert all(each.startswith("measured in haste") for each in made.report.predicted.sources.values())
    assert sorted(measured) == ["cpu", "sim"]
    with session({**FAST, "gflops": 5.0}) as made:  # other options, another device
        made.run(inputs())
    assert sorted(measured) == ["cpu", "sim", "sim"]


def test_work_is_divided_only_where_that_saves_more_than_predictions_err(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two providers on the host, one better at products, the other at what follows them."""
    pytest.importorskip("onnxruntime")

    def figures(product: float, elementwise: float) -> Figures:
        rates = {"product": product, "product.thin": product, "elementwise.fused": elementwise, "movement": 1e-15}
        return Figures("", launch=1e-6, points={f"{kind} float32": ((1.0, each),) for kind, each in rates.items()})

    def placed(product: float) -> dict[str, str]:
        """With these seconds for one operation of a product on the second provider; on the first it takes 1e-12."""
        known = {"cpu": figures(1e-12, 1e-10), "onnxruntime": figures(product, 1e-15)}
        monkeypatch.setattr(lazy, "figures_for", lambda providers, config, **how: known)
        with rv.load(products(), providers=("cpu", "onnxruntime"), policy="cost") as made:
            return where(made)

    assert placed(3e-12) == {"big": "cpu", "after": "onnxruntime", "small": "cpu"}
    assert set(placed(1.2e-12).values()) == {"onnxruntime"}  # a tenth is not worth it
    monkeypatch.setattr("ranvier.runtime.placement.MARGIN", 0.0)
    assert placed(1.2e-12)["big"] == "cpu"


def branches() -> ModelProto:
    """Two chains of products that meet at the end; the host's comes first in the file."""
    rng = np.random.default_rng(11)
    weights = {name: rng.standard_normal((BIG, BIG)).astype(np.float32) / BIG for name in ("w_here", "w_there")}
    nodes = []
    for name in ("here", "there"):
        value = "x"
        for k in range(3):
            nodes.append(helper.make_node("MatMul", [value, f"w_{name}"], [f"{name}{k}"], name=f"{name}/{k}"))
            value = f"{name}{k}"
    nodes.append(helper.make_node("Add", ["here2", "there2"], ["y"], name="meet"))
    kind = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [BIG, BIG]) for name in "xy"]
    return model_of(nodes, kind[:1], kind[1:], weights)


def test_a_device_is_given_its_work_before_the_host_begins_its_own() -> None:
    options: dict[str, Any] = {
        "providers": ("cpu", "sim"),
        "policy": "cost",
        "pins": {"here/*": "cpu", "there/*": "sim", "meet": "cpu"},
        "provider_options": {"sim": {"gflops": 50.0, "latency": 1e-6, "bandwidth": 1e12}},
    }
    with rv.load(branches(), **options) as made, rv.load(branches(), providers="reference") as oracle:
        assert [part.provider for part in made.report.parts] == ["sim", "cpu", "cpu"]
        predicted = made.report.predicted
        assert predicted is not None
        assert predicted.seconds < predicted.compute + predicted.transfer + predicted.launch
        assert [part.provider for part in predicted.parts] == ["sim", "cpu", "cpu"]
        feed = {"x": inputs()["x"]}
        np.testing.assert_allclose(made.run(feed)["y"], oracle.run(feed)["y"], rtol=1e-4, atol=1e-6)
