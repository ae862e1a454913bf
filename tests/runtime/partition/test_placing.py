"""From a graph, providers and a cost model to parts: claims, pins, policies, and the reasons given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranvier.devices import Device
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, UnsupportedOp
from ranvier.graph import ConstTensor, Graph, TensorType
from ranvier.graph.ir import Node, Value
from ranvier.providers.base import Claim, Decline, ProviderCapability
from ranvier.runtime.partition import Partitioner
from ranvier.runtime.partition.costs import pose, size_of
from ranvier.runtime.partition.pins import resolve_pins
from ranvier.runtime.partition.placing import Placed, place
from ranvier.runtime.partition.problem import CANNOT, OUTSIDE, Link


class Takes:
    """A provider of some operators."""

    def __init__(self, name: str, ops: str, device: str = "cpu", aliases: tuple[str, ...] = ()) -> None:
        self.name, self.ops, self.device, self.aliases = name, ops.split(), Device(device), aliases

    def capability(self) -> ProviderCapability:
        return ProviderCapability()

    def claim(self, view: Any) -> Any:
        for node in view:
            yield Claim((node,), "gladly") if node.op in self.ops else Decline(node, "not mine")


class Costs:
    """Seconds by operator and provider."""

    def __init__(self, seconds: dict[str, dict[str, float]], latency: float = 1.0, launch: float = 0.0) -> None:
        self.seconds, self.latency, self.start = seconds, latency, launch

    def node_seconds(self, node: Node, provider: Any) -> float | None:
        return self.seconds.get(node.op, {}).get(provider.name)

    def nbytes(self, value: Value) -> float:
        return size_of(value, {})

    def transfer(self, source: str, target: str) -> Link:
        return Link(self.latency)

    def launch(self, provider: Any) -> float:
        return self.start

    def capacity(self, provider: Any) -> float | None:
        return None

    def memory(self, provider: Any) -> str:
        return str(provider.device)

    def engine(self, provider: Any) -> tuple[int | None, int]:
        return None, 1


CPU, GPU = Takes("cpu", "Exp Neg Abs", aliases=("CPUExecutionProvider",)), Takes("gpu", "Exp Neg", "sim")
FAST_EXP = Costs({"Exp": {"cpu": 9.0, "gpu": 1.0}, "Neg": {"cpu": 1.0, "gpu": 1.0}, "Abs": {"cpu": 1.0}})


def graph_of(*ops: str) -> Graph:
    graph = Graph("g")
    value: Value = graph.add_input("x", TensorType(DType.float32, (3,)))
    for k, op in enumerate(ops):
        value = graph.add(op, [value], {}, 1, version=13, name=f"layer{k}/{op.lower()}").output
        value.type = TensorType(DType.float32, (3,))
    graph.outputs = [value]
    return graph


def placed(graph: Graph, model: Costs = FAST_EXP, providers: tuple[Takes, ...] = (CPU, GPU), **options: Any) -> Placed:
    return place(graph, providers, model, **options)  # type: ignore[arg-type]


def owners(found: Placed) -> list[str]:
    return [each.provider for each in found.partitioning.placements]


def test_cost_decides() -> None:
    found = placed(graph_of("Abs", "Exp", "Neg", "Abs"))
    assert owners(found) == ["cpu", "gpu", "cpu", "cpu"]  # Neg costs the same: no reason to leave the first provider
    assert [part.provider.name for part in found.partitioning.parts] == ["cpu", "gpu", "cpu"]
    assert [(str(v), a, b) for v, a, b in found.partitioning.transfers] == [
        ("%v1", "cpu", "sim:0"),
        ("%v2", "sim:0", "cpu"),
    ]
    assert found.cost.total == pytest.approx(1 + 1 + 1 + 1 + 2)


def test_priority_is_what_the_partitioner_does() -> None:
    graph = graph_of("Abs", "Exp", "Neg", "Abs")
    for order in ((CPU, GPU), (GPU, CPU)):
        found = placed(graph, providers=order, policy="priority")
        expected = Partitioner(order).partition(graph)  # type: ignore[arg-type]
        assert owners(found) == [each.provider for each in expected.placements]
        assert [p.subgraph for p in found.partitioning.parts] == [p.subgraph for p in expected.parts]


def test_an_unknown_policy_raises() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown policy 'prioriy' \(did you mean 'priority'\?\)"):
        placed(graph_of("Exp"), policy="prioriy")


@pytest.mark.parametrize(
    "rule",
    ["layer1/exp", "name:layer1/exp", "Exp", "op:Exp", "layer1*", "glob:*/exp", "re:layer\\d/e.*"],
)
def test_a_pin_wins_over_cost(rule: str) -> None:
    graph = graph_of("Abs", "Exp", "Neg", "Abs")
    assert owners(placed(graph, pins={rule: "cpu"})) == ["cpu"] * 4
    assert owners(placed(graph, pins={rule: ["CPUExecutionProvider"]})) == ["cpu"] * 4
    assert owners(placed(graph, pins={rule: ["cpu", "gpu"]})) == ["cpu", "gpu", "cpu", "cpu"]


def test_the_last_pin_that_matches_counts() -> None:
    nodes = list(graph_of("Abs", "Exp", "Exp"))
    found = resolve_pins({"Exp": "gpu", "layer2/exp": "cpu"}, nodes, [CPU, GPU])
    assert found == {1: (frozenset([1]), "Exp"), 2: (frozenset([0]), "layer2/exp")}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"op:Expp": "cpu"}, r"pin 'op:Expp' matches no node \(did you mean 'Exp'\?\)"),
        ({"layer1/ex": "cpu"}, r"pin 'layer1/ex' matches no node \(did you mean 'layer1/exp'\?\)"),
        ({"Exp": "gpuu"}, r"pin 'Exp': unknown provider 'gpuu' \(did you mean 'gpu'\?\)"),
        ({"Exp": []}, "pin 'Exp' names no provider"),
        ({"re:(": "cpu"}, r"pin 're:\(' is no regular expression"),
    ],
)
def test_pins_that_cannot_be_meant_raise(pins: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        placed(graph_of("Abs", "Exp"), pins=pins)


def test_a_pin_to_a_provider_that_declines_raises() -> None:
    with pytest.raises(UnsupportedOp, match="gpu: not mine") as raised:
        placed(graph_of("Abs"), pins={"Abs": "gpu"})
    assert "pinned elsewhere by 'Abs'" in str(raised.value)


def test_every_reason_is_told() -> None:
    found = placed(graph_of("Abs", "Exp", "Neg", "Abs"), pins={"layer3/abs": "cpu"})
    told = found.explain()
    assert [each.chosen for each in told] == owners(found)
    reasons = [{option.provider: option.reason for option in each.options} for each in told]
    assert reasons[0] == {"cpu": "chosen", "gpu": "not mine"}
    assert reasons[1] == {"cpu": "slower", "gpu": "chosen"}
    saved = told[1].options[0]
    assert (saved.seconds, saved.transfer, saved.total) == (9.0, pytest.approx(-2.0), pytest.approx(6.0))
    assert reasons[2]["gpu"] == "costs another launch, or no less"
    dear = placed(graph_of("Exp"), Costs({"Exp": {"cpu": 2.0, "gpu": 1.0}}))
    option = dear.explain()[0].options[1]
    assert (option.reason, option.total) == ("transfers cost more than it saves", pytest.approx(1.0))


def test_a_time_nobody_knows_never_wins() -> None:
    model = Costs({"Exp": {"gpu": 1.0, "cpu": 2.0}, "Neg": {"cpu": 5.0}}, latency=0.0)
    found = placed(graph_of("Exp", "Neg"), model, (CPU, GPU))
    assert found.posed.problem.seconds[1] == [5.0, 5.0]
    assert found.posed.unknown == {(1, 1)}


def test_the_problem_of_a_graph() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.float32, (2, 3)))
    weight = graph.add_constant(ConstTensor.of(np.ones((2, 3), np.float32)), "w")
    first = graph.add("Add", [x, weight], {}, 1, version=14)
    first.output.type = TensorType(DType.float32, (2, 3))
    draws = [graph.add("RandomNormalLike", [first.output], {}, 1, version=1) for _ in range(2)]
    second = graph.add("Add", [first.output, weight], {}, 1, version=14)
    graph.outputs = [second.output, first.output, *(node.output for node in draws)]
    everything = Takes("cpu", "Add RandomNormalLike")
    posed = pose(graph, [everything, GPU], Costs({}))  # type: ignore[list-item]
    problem = posed.problem
    assert [(f.producer, f.consumers, f.nbytes, f.output) for f in problem.flows[:2]] == [
        (OUTSIDE, (0,), 24.0, False),
        (0, (1, 2, 3), 24.0, True),
    ]
    assert problem.weights == [24.0, 0.0, 0.0, 0.0]  # the second reader shares it
    assert problem.order == [(1, 2)]  # random numbers are drawn in their order
    assert problem.seconds == [[0.0, CANNOT]] * 4
    assert posed.devices == ["cpu", "sim:0"]


def test_sizes_of_values() -> None:
    from ranvier.graph.types import Symbol

    value = Value("v", TensorType(DType.float32, (Symbol("n"), 4)))
    assert size_of(value, {"n": 8}) == 128.0
    assert size_of(value, {}) == 16.0
    assert size_of(Value("v"), {}) == 0.0
