"""Definitions and shared lowerings know no device: neither its kernels nor the provider that runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ranvier.codegen import definitions
from ranvier.codegen.definitions.lower.index import SHARED
from ranvier.codegen.definitions.node_view import NodeView
from ranvier.codegen.definitions.program import Definitions
from ranvier.codegen.definitions.registry import Lowerings
from ranvier.codegen.llvm.isa import chosen
from ranvier.graph.ir import Graph, Value
from ranvier.providers.cpu.products import CpuProducts

FOLDER = Path(definitions.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda p: str(p.relative_to(FOLDER)))
def test_no_device_is_imported(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(n.startswith(("ranvier.codegen.llvm", "ranvier.codegen.triton")) for n in names), names


def _own() -> Lowerings:
    return Lowerings("no.package", {}, parent=SHARED)


def _lowered(lowerings: Lowerings) -> list[str]:
    graph = Graph()
    (y,) = graph.add("Relu", [Value("x")]).outputs
    assert y.producer is not None
    found = lowerings.find(y.producer)
    assert found is not None
    made: list[str] = []
    program = Definitions(CpuProducts(chosen("")))
    program.pointwise = lambda *a, **k: made.append("shared")  # type: ignore[method-assign, assignment, return-value]
    try:
        found.lower(NodeView(y.producer, program), program)
    except KeyError:  # the types of the values are not there: the shared lowering has begun
        made.append("shared")
    return made or ["own"]


def test_an_attempt_goes_before_the_shared_lowering_and_may_leave_it_to_it() -> None:
    taken, left = _own(), _own()
    taken.tries("Relu")(lambda n, b: True)
    left.tries("Relu")(lambda n, b: False)
    assert (_lowered(taken), _lowered(left), _lowered(_own())) == (["own"], ["shared"], ["shared"])


def test_an_attempt_keeps_what_the_shared_lowering_says_about_nodes() -> None:
    own = _own()
    own.tries("Reshape")(lambda n, b: False)
    mine, shared = own.at(("", "Reshape")), SHARED.at(("", "Reshape"))
    assert mine is not None and shared is not None and mine is not shared
    assert (mine.values, mine.dtypes, mine.check, mine.since) == (
        shared.values,
        shared.dtypes,
        shared.check,
        shared.since,
    )


def test_an_operator_is_lowered_once() -> None:
    own = _own()
    own.lowers("Mine")(lambda n, b: None)
    with pytest.raises(AssertionError, match="lowered twice"):
        own.lowers("Mine")(lambda n, b: None)
    with pytest.raises(AssertionError, match="not lowered by the parent"):
        own.tries("Theirs")(lambda n, b: False)


def test_what_the_user_lowers_is_for_operators_that_have_no_lowering() -> None:
    own = _own()
    relu = own.at(("", "Relu"))
    assert relu is not None and own.at(("mine", "Op")) is None
    own.users["mine", "Op"] = relu
    own.users["", "Relu"] = own.users["mine", "Op"]
    assert own.at(("mine", "Op")) is relu and own.at(("", "Relu")) is SHARED.at(("", "Relu"))
