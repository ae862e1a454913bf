"""A part taken out computes what it computed inside, and the original stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from ranvier.config import SessionConfig
from ranvier.formats import onnx as onnx_format
from ranvier.graph.extract import extract
from ranvier.graph.ir import Graph
from ranvier.graph.verify import verify
from ranvier.runtime.partition import subgraph_of
from ranvier.runtime.session import Session
from tests.conformance.cases import Case, all_cases, check
from tests.strategies import build, tapes

_KINDS = ("test_loop", "test_scan", "test_if", "test_lstm_with", "test_sequence_map", "test_range", "test_nllloss_NCd")
NESTED = [case for case in all_cases() if case.name.startswith(_KINDS)][::3]
PLAIN = SessionConfig(providers=("reference",), optimization="none")


def whole(graph: Graph) -> Graph:
    part = subgraph_of(graph, list(graph))
    return extract(part.nodes, [*graph.inputs, *graph.constants.values()], graph.outputs, opsets=graph.opsets)


@pytest.mark.parametrize("case", NESTED, ids=lambda case: case.name)
def test_the_whole_taken_out_is_the_same_model(case: Case) -> None:
    model = case.model()
    graph = onnx_format.read(model)
    before = str(graph)
    taken = whole(graph)
    verify(taken)
    verify(graph)
    assert str(graph) == before
    with Session(taken, PLAIN) as session:
        for inputs, expected in case.data(model):
            check(list(session.run(inputs).values()), expected, case)


@settings(max_examples=40, deadline=None)
@given(tapes())
def test_two_halves_compute_what_the_whole_does(numbers: list[int]) -> None:
    graph, inputs, _ = build(numbers)
    expected = Session(whole(graph), PLAIN).run(inputs)
    nodes = list(graph)
    halves = [subgraph_of(graph, nodes[: len(nodes) // 2]), subgraph_of(graph, nodes[len(nodes) // 2 :])]
    known = dict(zip(graph.inputs, inputs))
    for half in halves:
        if not half.nodes:
            continue
        taken = extract(half.nodes, half.inputs, half.outputs, opsets=graph.opsets)
        verify(taken)
        given_values = [known[v] for v in half.inputs if v.const is None]
        made = Session(taken, PLAIN).run(given_values)
        known.update(zip(half.outputs, made.values()))
    for value, want in zip(graph.outputs, expected.values()):
        got = known[value] if value in known else value.const.numpy()
        np.testing.assert_array_equal(got, want)


def test_names_are_unique_even_where_the_original_repeats_them() -> None:
    graph = Graph("twice")
    x = graph.add_input("x")
    first = graph.add("Neg", [x], version=13)
    first.output.name = "x"
    second = graph.add("Abs", [first.output], version=13)
    second.output.name = "x"
    graph.outputs = [second.output]
    taken = whole(graph)
    names = [v.name for v in taken.values()]
    assert len(set(names)) == len(names)
    assert taken.inputs[0].name == "x"
