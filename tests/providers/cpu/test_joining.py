"""Products of one tensor: what they share is made once, and as one step they give what they give apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import ranvier as rv
from ranvier.codegen import tuning_store
from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm.joined import PARTS, Part, joined
from ranvier.codegen.storage import Storage
from ranvier.codegen.tuning import Table
from ranvier.errors import InvalidConfig
from ranvier.providers.cpu.joining import Choice, made_once, pays, together
from ranvier.runtime.tuning.variant import Variant
from tests.codegen.harness import ISAS

Array = np.ndarray[Any, Any]
LONG = 40e5  # operations that are worth a second thread


def spec(name: str) -> KernelSpec:
    return KernelSpec(name, (name,), lambda module, symbol, isa: None)


def launch(name: str, reads: list[Storage], writes: list[Storage], number: int = 0, flops: float = LONG) -> Launch:
    buffers = tuple(At(storage) for storage in (*reads, *writes))
    return Launch(spec(name), buffers, (number,), 4, tuple(writes), flops=flops, label=f"{name} {number}")


# -- an interpreter of launches: what a storage holds is how it came about --------------------------------------------


def parts_of(each: Launch) -> list[tuple[KernelSpec, tuple[Any, ...], tuple[int, ...]]]:
    """Kernel, buffers and numbers of what a step consists of."""
    if each.spec != joined([each]).spec:
        return [(each.spec, each.buffers, each.dims)]
    count = each.dims[PARTS]
    table = [each.dims[1 + len(Part) * k : 1 + len(Part) * (k + 1)] for k in range(count)]
    ends = [*table[1:], (0, 0, 0, len(each.buffers), len(each.dims))]
    found = []
    for k, (row, end) in enumerate(zip(table, ends)):
        code = each.buffers[k]
        assert isinstance(code, Code)
        buffers = each.buffers[row[Part.BUFS] : end[Part.BUFS]]
        found.append((code.spec, buffers, each.dims[row[Part.DIMS] : end[Part.DIMS]]))
    return found


def interpreted(launches: list[Launch]) -> dict[Storage, Any]:
    held: dict[Storage, Any] = {}
    for each in launches:
        before = dict(held)  # parts of a step see nothing of each other
        for code, buffers, numbers in parts_of(each):
            own = [b.storage for b in buffers if b.storage in each.writes]
            read = tuple(before.get(b.storage, b.storage.name if b.storage.kind != "temp" else None) for b in buffers)
            for storage in own:
                held[storage] = hash((code.name, numbers, read, own.index(storage)))
    return held


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Launch], set[int], list[Storage]]:
    """Launches over a few storages: products, copies and whatever else, many of them alike."""
    inputs = [Storage("input", 64, index=k, name=f"in{k}") for k in range(2)]
    weights = [Storage("const", 64, name=f"w{k}") for k in range(2)]
    outputs = [Storage("output", 64, index=k, name=f"out{k}") for k in range(2)]
    held = [*inputs]
    launches: list[Launch] = []
    products: set[int] = set()
    for k in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["product", "copy", "map", "onto"]))
        source = draw(st.sampled_from([inputs[0], inputs[0], *held]))
        target = Storage("temp", 64, name=f"t{k}")
        if kind == "product":
            products.add(k)
            beside = draw(st.sampled_from([None, held[-1], *held]))
            read = [source, draw(st.sampled_from(weights)), *([beside] if beside is not None else [])]
            target = draw(st.sampled_from([target, target, *outputs]))
            launches.append(launch("product", read, [target], draw(st.integers(0, 1))))
        elif kind == "copy":
            beside_it = [Storage("temp", 64, name=f"s{k}")] if draw(st.booleans()) else []  # codes, and their scales
            launches.append(launch("copy", [source], [target, *beside_it], draw(st.integers(0, 1)), 0.0))
            held += beside_it
        elif kind == "map":
            launches.append(launch("map", [source, draw(st.sampled_from(held))], [target], flops=10.0))
        else:  # another launch writes what is there already, as into a slice of it
            target = draw(st.sampled_from([target, *outputs, *(s for s in held if s.kind == "temp")]))
            launches.append(launch("onto", [source], [target], k))
        held.append(target)
    return launches, products, [s for s in held if s.kind != "input"]


@settings(deadline=None, max_examples=300)
@given(programs())
def test_what_is_made_stays_the_same(program: tuple[list[Launch], set[int], list[Storage]]) -> None:
    launches, products, made = program
    expected = interpreted(launches)
    once, places = made_once(launches, set(range(len(launches))), set())
    kept = {storage for each in once for storage in each.writes}
    found = interpreted(once)
    assert all(found[s] == expected[s] for s in made if s in kept)
    assert all(s.kind == "temp" for s in made if s not in kept)
    moved = {places[k] for k in products}
    steps, order, names = together(once, moved, Choice(once, 2, None))
    found = interpreted(steps)
    assert all(found[s] == expected[s] for s in made if s in kept)
    assert len(steps) == len(once) - sum(len(each) - 1 for each in names)
    for k, each in enumerate(once):
        assert each.label in steps[order[k]].label


def test_a_copy_that_is_there_is_not_made_again() -> None:
    x, copies = Storage("input", 64), [Storage("temp", 64) for _ in range(3)]
    outs = [Storage("output", 64, index=k) for k in range(3)]
    launches = []
    for copy, out in zip(copies, outs):
        launches += [launch("copy", [x], [copy], flops=0.0), launch("product", [copy], [out])]
    found, places = made_once(launches, {0, 2, 4}, set())
    assert [each.spec.name for each in found] == ["copy", "product", "product", "product"]
    assert places == [0, 1, 0, 2, 0, 3]
    assert all(each.buffers[0] == At(copies[0]) for each in found[1:])
    assert made_once(launches, {0, 2, 4}, set(copies))[0] == launches  # somebody else looks at them
    assert made_once(launches, set(), set())[0] == launches  # they prepare nothing


def test_a_copy_of_what_changed_meanwhile_is_made_again() -> None:
    x, y, first, second = (Storage("temp", 64) for _ in range(4))
    copies = [launch("copy", [x], [first]), launch("copy", [x], [second])]
    changed = [launch("map", [], [x]), copies[0], launch("map", [y], [x], 1), copies[1]]
    assert made_once(changed, {1, 3}, set())[0] == changed
    twice = [*copies, launch("map", [y], [second], 1)]  # what is written over is nobody else's
    assert made_once(twice, {0, 1}, set())[0] == twice


@pytest.mark.parametrize("size, between", [(1 << 20, 20), (64, 60)])
def test_a_copy_is_not_held_for_long(size: int, between: int) -> None:
    """A small one for longer than a large one."""
    x, copies = Storage("input", size), [Storage("temp", size) for _ in range(2)]
    others = [launch("map", [x], [Storage("output", size, index=k)], k) for k in range(between)]
    launches = [launch("copy", [x], [copies[0]]), *others, launch("copy", [x], [copies[1]])]
    assert made_once(launches, {0, between + 1}, set())[0] == launches
    assert len(made_once([*launches[: between // 2], launches[-1]], {0, between // 2}, set())[0]) == between // 2


def test_codes_and_scales_are_made_once() -> None:
    """Products of one tensor that is rounded first are one step."""
    x, outs = Storage("temp", 64), [Storage("output", 64, index=k) for k in range(3)]
    launches = []
    for out in outs:
        codes, scales = Storage("temp", 64), Storage("temp", 8)
        launches += [launch("round", [x], [codes, scales], flops=0.0), launch("product", [codes, scales], [out])]
    found, places = made_once(launches, {0, 2, 4}, set())
    assert [each.spec.name for each in found] == ["round", "product", "product", "product"]
    assert len({each.buffers[:2] for each in found[1:]}) == 1
    steps, _, names = together(found, {places[k] for k in (1, 3, 5)}, lambda members: True)
    assert len(steps) == 2 and len(names[0]) == 3


@pytest.mark.parametrize("size, between, apart", [(1 << 20, 20, True), (64, 20, False), (64, 60, True)])
def test_products_are_not_moved_far(size: int, between: int, apart: bool) -> None:
    x, outs = Storage("temp", 64), [Storage("temp", size) for _ in range(2)]
    others = [launch("map", [outs[0]], [Storage("output", 64, index=k)], k) for k in range(between)]
    launches = [launch("product", [x], [outs[0]]), *others, launch("product", [x], [outs[1]], 1)]
    steps, _, _ = together(launches, {0, between + 1}, lambda members: True)
    assert (steps == launches) == apart


def test_what_a_product_needs_moves_with_it() -> None:
    x, scale, q, k = (Storage("temp", 64) for _ in range(4))
    weights = [Storage("const", 64) for _ in range(2)]
    launches = [
        launch("product", [x, weights[0]], [q]),
        launch("map", [q], [Storage("output", 64)], flops=10.0),
        launch("map", [weights[1]], [scale], 1, flops=10.0),
        launch("product", [x, weights[1], scale], [k], 1),
    ]
    steps, places, names = together(launches, {0, 3}, lambda members: True)
    assert [each.label for each in steps] == ["map 1", "product 0 + product 1", "map 0"]
    assert places == [1, 2, 0, 1] and names == [("product 0", "product 1")]


def test_a_product_of_a_product_stays_apart() -> None:
    x, q, k = (Storage("temp", 64) for _ in range(3))
    launches = [launch("product", [x], [q]), launch("product", [x, q], [k], 1)]
    assert together(launches, {0, 1}, lambda members: True) == (launches, [0, 1], [])


def test_when_it_pays() -> None:
    x = Storage("temp", 64)

    def each(flops: float) -> Launch:
        return launch("product", [x], [Storage("temp", 64)], flops=flops)

    assert pays([each(LONG), each(LONG)], 2)
    assert not pays([each(LONG), each(LONG)], 1)  # nobody to share it with
    assert not pays([each(LONG)], 2)
    assert not pays([each(LONG / 100), each(LONG / 100)], 2)  # one thread takes both anyway
    assert pays([each(LONG / 3)] * 3, 2)  # too little alone, enough together


# -- sessions ---------------------------------------------------------------------------------------------------------


def block(
    rows: int, hidden: int, heads: int, kv_heads: int, *, bias: bool = False, past: int = 0, codes: bool = False
) -> tuple[bytes, dict[str, Array]]:
    """Attention over projections of one tensor, with a mask, and what it is called with."""
    rng = np.random.default_rng(rows + hidden)
    size = hidden // heads
    weights, nodes, given = [], [], []
    feeds: dict[str, Array] = {}

    def constant(name: str, array: Array) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    def input_(name: str, shape: list[int]) -> str:
        feeds[name] = rng.standard_normal(shape).astype(np.float32)
        given.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    x, mask = input_("x", [1, rows, hidden]), input_("mask", [rows, past + rows])
    nodes.append(helper.make_node("Mul", [x, x], ["square"]))
    if codes:
        nodes.append(helper.make_node("DynamicQuantizeLinear", ["square"], ["codes", "step", "zero"]))
    for name, count in zip("qkv", (heads, kv_heads, kv_heads)):
        shape = (hidden, count * size)
        if codes:
            factor = constant(f"{name}.w", rng.integers(-127, 128, shape).astype(np.int8))
            nodes.append(helper.make_node("MatMulInteger", ["codes", factor, "zero"], [f"{name}.sums"]))
            nodes.append(helper.make_node("Cast", [f"{name}.sums"], [f"{name}.wide"], to=TensorProto.FLOAT))
            step = constant(f"{name}.step", np.asarray(rng.uniform(1e-3, 2e-3), np.float32))
            nodes.append(helper.make_node("Mul", ["step", step], [f"{name}.scale"]))
            nodes.append(helper.make_node("Mul", [f"{name}.wide", f"{name}.scale"], [name]))
            continue
        factor = constant(f"{name}.w", (rng.standard_normal(shape) / np.sqrt(hidden)).astype(np.float32))
        nodes.append(helper.make_node("MatMul", ["square", factor], [f"{name}.product" if bias else name]))
        if bias:
            more = constant(f"{name}.b", rng.standard_normal(shape[1]).astype(np.float32))
            nodes.append(helper.make_node("Add", [f"{name}.product", more], [name]))
    operands = ["q", "k", "v", mask]
    if past:
        operands += [input_(f"past.{name}", [1, kv_heads, past, size]) for name in "kv"]
    nodes.append(helper.make_node("Attention", operands, ["y"], q_num_heads=heads, kv_num_heads=kv_heads))
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, rows, hidden])
    graph = helper.make_graph(nodes, "block", given, [out], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return model.SerializeToString(), feeds


def results(
    data: bytes, feeds: dict[str, Array], *, joined_products: bool = True, isa: str = "", **options: Any
) -> tuple[Array, list[tuple[str, ...]]]:
    how = {"cpu": {"joined_products": joined_products, "isa": isa}}
    with rv.load(data, providers=["cpu"], threads=2, provider_options=how, **options) as session:
        return session.run(feeds)["y"], session.report.joined


CASES = {
    "rows": {"rows": 24, "hidden": 256, "heads": 4, "kv_heads": 4},
    "biases": {"rows": 24, "hidden": 256, "heads": 4, "kv_heads": 4, "bias": True},
    "fewer keys": {"rows": 24, "hidden": 256, "heads": 8, "kv_heads": 2},
    "one row": {"rows": 1, "hidden": 768, "heads": 12, "kv_heads": 4, "past": 9},
    "codes": {"rows": 24, "hidden": 384, "heads": 6, "kv_heads": 6, "codes": True},
}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_by_one_projection(case: dict[str, Any], isa: Any, precision: str) -> None:
    data, feeds = block(**case)
    whole, names = results(data, feeds, isa=isa.name, precision=precision)
    apart, none = results(data, feeds, isa=isa.name, precision=precision, joined_products=False)
    assert np.array_equal(whole, apart) and not none
    if precision == "f32":
        assert [len(each) for each in names] == [3] and "q" in names[0][0] and "v" in names[0][2]
        with rv.load(data, providers=["reference"]) as session:
            np.testing.assert_allclose(whole, session.run(feeds)["y"], rtol=1e-3, atol=1e-3)


def test_measurements_may_say_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_store, "folder", lambda: tmp_path)  # nothing is known
    data, feeds = block(**CASES["rows"])
    with rv.load(data, providers=["cpu"], threads=2) as session:
        usual = Variant(session, Table(), feeds)
        expected = usual.run()
        (decision,) = [d for d in usual.decisions().values() if d.site == "product joining"]
        assert decision.others == ("apart",) and decision.end - decision.first == 1
        other = Variant(session, Table({decision.key: "apart"}), feeds)
        found = other.run()
        (decision,) = [d for d in other.decisions().values() if d.site == "product joining"]
        assert decision.chosen == "apart" and decision.end - decision.first == 3
        assert np.array_equal(found[0], expected[0])
        usual.close()
        other.close()


def test_one_thread_takes_them_one_by_one() -> None:
    data, feeds = block(**CASES["rows"])
    with rv.load(data, providers=["cpu"], threads=1) as session:
        session.run(feeds)
        assert session.report.joined == []


def test_the_report_says_what_is_one_step() -> None:
    data, _ = block(**CASES["rows"])
    with rv.load(data, providers=["cpu"], threads=2) as session:
        assert "products of one tensor taken as one step: 1 times" in str(session.report)


def test_the_option_is_a_switch() -> None:
    with pytest.raises(InvalidConfig, match="joined_products"):
        rv.load(block(**CASES["rows"])[0], provider_options={"cpu": {"joined_products": "no"}})
