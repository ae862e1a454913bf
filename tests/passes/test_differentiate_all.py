"""Every declared operator has a gradient that is tried, or a reason for having none."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path

import pytest

from ranvier.dtypes import DType
from ranvier.errors import NotSupported
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.rewrite import GraphOps
from ranvier.graph.types import TensorType
from ranvier.ops import complete, registry
from ranvier.ops.gradients import has_parts, known_gradients, reason_against, rule_of, without_gradient
from ranvier.ops.gradients.functions import has_definition
from ranvier.ops.gradients.sequences import HOLDERS
from ranvier.passes.differentiate import differentiate
from ranvier.passes.differentiate_control import CONTROL
from tests.passes import (
    test_differentiate,
    test_differentiate_classical,
    test_differentiate_contrib,
    test_differentiate_contrib_attention,
    test_differentiate_contrib_tensor,
    test_differentiate_defined,
    test_differentiate_early,
    test_differentiate_few_bits,
    test_differentiate_recurrent,
    test_differentiate_regions,
    test_differentiate_sampling,
)
from tests.passes.gradient_tools import Case, check

MICROSOFT, CLASSICAL, PREVIEW = "com.microsoft", "ai.onnx.ml", "ai.onnx.preview"
ELSEWHERE = {  # where a test of another form than a case tries it
    ("", "Bernoulli"): "test_what_is_drawn_has_no_gradient",
    ("", "ConcatFromSequence"): "test_differentiate_sequences.py",
    ("", "Dropout"): "test_dropout_keeps_its_mask",
    ("", "DynamicQuantizeLinear"): "test_scales_found_while_running",
    ("", "OptionalGetElement"): "test_differentiate_sequences.py",
    ("", "QuantizeLinear"): "test_differentiate_quantized.py",
    ("", "SequenceAt"): "test_differentiate_sequences.py",
    (MICROSOFT, "QuantizeLinear"): "as the standard's",
    ("ranvier", "After"): "tests/ops/test_own.py",
    ("ranvier", "BitLinear"): "test_ternary_weights_pass_gradients_as_if_tokens_were_not_rounded",
    ("ranvier", "LSTMSlopes"): "second derivatives of LSTM",
    ("ranvier", "LSTMTraining"): "second derivatives of LSTM",
}
FLAT = {"Ceil", "Floor", "IsInf", "IsNaN", "Round", "Shape", "Sign", "Size"}


def named(cases: Iterable[str]) -> set[str]:
    """Cases are called by the operator, and by what is special about them."""
    return {key.split(" ")[0].removesuffix("'s") for key in cases}


def tried() -> set[tuple[str, str]]:
    standard = named(
        [
            *test_differentiate.CASES,
            *test_differentiate_defined.CASES,
            *test_differentiate_early.CASES,
            *test_differentiate_recurrent.CASES,
            *test_differentiate_regions.CASES,
            *test_differentiate_sampling.CASES,
        ]
    )
    fused = named(
        [
            *test_differentiate_contrib.CASES,
            *test_differentiate_contrib_attention.CASES,
            *test_differentiate_contrib_tensor.CASES,
            *test_differentiate_early.FUSED,
            *test_differentiate_few_bits.CASES,
        ]
    )
    found = {("", name) for name in standard | FLAT} | {(MICROSOFT, name) for name in fused | {"CropAndResize"}}
    found |= {(CLASSICAL, name) for name in named(test_differentiate_classical.CASES)} | {(PREVIEW, "FlexAttention")}
    return found | set(ELSEWHERE)


OURS = sorted({(d.domain, d.name) for d in registry.declared() if d.domain in
               ("", MICROSOFT, CLASSICAL, PREVIEW, "ai.onnx.preview.training", "ranvier")})  # fmt: skip


def node_of(domain: str, name: str) -> Node:
    """A node that only has a name, at the newest version."""
    version = registry.get(domain, name).since
    return Graph("g", opsets={"": 26}).add(name, [], {}, 1, domain=domain, version=version)


def is_derived(domain: str, name: str) -> bool:
    if not domain and (name in CONTROL or name in HOLDERS):
        return True
    return rule_of(domain, name) is not None or has_parts(domain, name) or has_definition(node_of(domain, name))


@pytest.mark.parametrize(("domain", "name"), OURS)
def test_an_operator_has_a_gradient_or_a_reason(domain: str, name: str) -> None:
    reason = reason_against(domain, name)
    if reason is not None:
        assert rule_of(domain, name) is None and not has_parts(domain, name)
        return
    assert is_derived(domain, name), "declare a gradient in ops/gradients, or the reason for having none in without.py"
    assert (domain, name) in tried() or (not domain and name in CONTROL | HOLDERS)


def test_what_is_declared_about_gradients_is_about_operators() -> None:
    """A rule or a reason under a name that nobody has would never be found."""
    known = {(d.domain, d.name) for d in registry.declared()}
    assert {*known_gradients(), *((domain, name) for domain, name, _ in without_gradient())} <= known
    assert set(ELSEWHERE) <= known


def test_the_table_of_the_documentation_is_of_today() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "gradient_table.py"))
    page = tool["PAGE"].read_text(encoding="utf-8")
    assert page.partition(tool["BEGIN"])[2] == tool["table"](), "run tools/gradient_table.py"


def test_the_reason_is_what_the_error_says() -> None:
    graph = Graph("g", opsets={"": 21})
    x = graph.add_input("x", TensorType(DType.float64, (3, 3)))
    y = GraphOps(graph, None, "", complete).Hardmax(x)
    with pytest.raises(NotSupported, match=r"no gradient is known of Hardmax \(it is constant between jumps\)"):
        differentiate(graph, [(y, None)], [x])


TWICE = [
    *((test_differentiate_early.CASES, name) for name in ("OneHot", "Range", "TensorScatter around")),
    (test_differentiate_contrib_tensor.CASES, "Inverse"),
    (test_differentiate_contrib_attention.CASES, "RestorePadding"),
    (test_differentiate_few_bits.CASES, "MatMulNBits that learns"),
    (test_differentiate_recurrent.CASES, "LSTM coupled"),
    (test_differentiate_defined.CASES, "Einsum iij,jk->k"),
]


@pytest.mark.parametrize(("cases", "name"), TWICE, ids=[name for _, name in TWICE])
def test_gradients_of_gradients(cases: dict[str, Case], name: str) -> None:
    """Rules are made of operators that have gradients themselves."""
    case = cases[name]

    def first(op: GraphOps, *given: Value) -> Value:
        y = case.build(op, *given)
        kind = TensorType(DType.float64, case.shape)
        y.type = kind if y.type is None else y.type.merge(kind)
        (grad,) = differentiate(op.graph, [(op.ReduceSum(op.Sin(y), keepdims=0), None)], [given[0]])
        assert grad is not None
        return op.Mul(grad, grad)

    check(Case(first, case.inputs, case.others, case.inputs[0].shape), tolerance=2e-4)
