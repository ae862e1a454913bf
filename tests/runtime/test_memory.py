"""The memory planner: no two live buffers overlap, whatever the lifetimes; orders stay topological."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.codegen.arena import ALIGNMENT, Lifetime, plan_memory
from ranvier.dtypes import DType
from ranvier.graph import Graph, TensorType
from ranvier.runtime.order import order_for_memory, peak_bytes


@st.composite
def lifetimes(draw) -> list[Lifetime]:
    found: list[Lifetime] = []
    for _ in range(draw(st.integers(0, 40))):
        first = draw(st.integers(0, 30))
        nbytes = draw(st.integers(0, 5000))
        ending = [k for k, other in enumerate(found) if other.last == first]
        reuse = tuple(draw(st.lists(st.sampled_from(ending), max_size=2, unique=True))) if ending else ()
        found.append(Lifetime(nbytes, first, first + draw(st.integers(0, 10)), reuse))
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lifetimes())
def test_live_buffers_never_overlap(buffers: list[Lifetime]) -> None:
    plan = plan_memory(buffers)
    assert plan.arena >= plan.lower_bound
    assert plan.arena <= plan.total
    spans = [(plan.offsets[k], plan.offsets[k] + max(b.nbytes, 1)) for k, b in enumerate(buffers)]
    for i, a in enumerate(buffers):
        assert plan.offsets[i] % ALIGNMENT == 0 and spans[i][1] <= plan.arena
        for j, b in enumerate(buffers[:i]):
            together = a.first <= b.last and b.first <= a.last
            overlap = spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1]
            handover = (j in a.reuse and b.first < a.first == b.last) or (i in b.reuse and a.first < b.first == a.last)
            assert not (together and overlap) or handover


def test_a_chain_needs_one_place_when_each_takes_over_from_the_last() -> None:
    buffers = [Lifetime(100, k, k + 1, (k - 1,) if k else ()) for k in range(10)]
    plan = plan_memory(buffers)
    assert plan.arena == 128 and plan.shared == 9
    assert plan_memory([Lifetime(100, k, k + 1) for k in range(10)]).arena == 256


def wide_then_narrow() -> Graph:
    """Many large values that each shrink at once: running depth first keeps one alive, breadth first all."""
    graph = Graph()
    x = graph.add_input("x")
    large = []
    for _ in range(8):
        node = graph.add("Exp", [x])
        node.output.type = TensorType(DType.float32, (1000,))
        large.append(node.output)
    small = []
    for value in large:
        node = graph.add("ReduceSum", [value])
        node.output.type = TensorType(DType.float32, (1,))
        small.append(node.output)
    graph.outputs = [graph.add("Concat", small).output]
    graph.outputs[0].type = TensorType(DType.float32, (8,))
    return graph


def nbytes(value) -> int:
    return value.type.nbytes or 0


def test_the_order_keeps_few_bytes_alive() -> None:
    graph = wide_then_narrow()
    before = peak_bytes(graph.nodes, graph, nbytes)
    order = order_for_memory(graph, nbytes)
    assert peak_bytes(order, graph, nbytes) < before / 4
    done = set()
    for node in order:
        assert all(v.producer is None or v.producer in done for v in node.dependencies())
        done.add(node)
    graph.reorder(order)
    assert len(graph) == 17
