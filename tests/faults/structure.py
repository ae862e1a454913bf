"""Damage to nodes, attributes and declared types of a model message; it stays a message.

A mutator changes the message in place and returns whether it found anything to change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

Mutator = Callable[[ModelProto, random.Random], bool]

INTS = (-1, 0, 1, 2, 3, 5, -2, -7, 64, 1000, 2**31 - 1, 2**31, -(2**31), 10**9, 10**15, 2**62, 2**63 - 1, -(2**63))
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 0.5, 1e9, 3e38, -3e38, 1e-45, 2.0**63)
DTYPES = (*range(29), 99, -1, 2**31 - 1)
STRINGS = (b"", b"NOTSET", b"linear", b"x", b"\xff\xfe\x00", "ç".encode(), b"(a+)+$", b"A" * 5000, b"ij,jk->ik")
ATTRIBUTE_TYPES = tuple(AttributeProto.AttributeType.values())


def graphs(model: ModelProto) -> list[GraphProto]:
    """The graph and every nested one."""
    found: list[GraphProto] = []
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        found.append(graph)
        for node in graph.node:
            for attr in node.attribute:
                if attr.type == AttributeProto.GRAPH:
                    waiting.append(attr.g)
                waiting.extend(attr.graphs)
    return found


def nodes(model: ModelProto) -> list[NodeProto]:
    return [n for g in graphs(model) for n in g.node] + [n for f in model.functions for n in f.node]


def attributes(model: ModelProto) -> list[AttributeProto]:
    return [a for n in nodes(model) for a in n.attribute]


def tensors(model: ModelProto) -> list[TensorProto]:
    """Initializers and tensors in attributes."""
    found = [t for g in graphs(model) for t in g.initializer]
    found += [s.values for g in graphs(model) for s in g.sparse_initializer]
    found += [s.indices for g in graphs(model) for s in g.sparse_initializer]
    return found + [a.t for a in attributes(model) if a.type == AttributeProto.TENSOR]


def infos(model: ModelProto) -> list[onnx.ValueInfoProto]:
    return [i for g in graphs(model) for i in (*g.input, *g.output, *g.value_info)]


def names(model: ModelProto) -> list[str]:
    found = {name for n in nodes(model) for name in (*n.input, *n.output)}
    return sorted(found | {i.name for i in infos(model)})


# -- nodes and their operands ---------------------------------------------------------------------------------------


def change_op(model: ModelProto, rng: random.Random) -> bool:
    found = nodes(model)
    if not found:
        return False
    node = rng.choice(found)
    schemas = onnx.defs.get_all_schemas()
    node.op_type = rng.choice([rng.choice(schemas).name, rng.choice(found).op_type, "NoSuchOp", ""])
    return True


def change_domain(model: ModelProto, rng: random.Random) -> bool:
    found = nodes(model)
    if not found:
        return False
    rng.choice(found).domain = rng.choice(("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "local", "nowhere"))
    return True


def rename_input(model: ModelProto, rng: random.Random) -> bool:
    """To another value of the model (which may make a cycle), to nothing, or to something that is not there."""
    found = [n for n in nodes(model) if n.input]
    if not found:
        return False
    node = rng.choice(found)
    node.input[rng.randrange(len(node.input))] = rng.choice((*names(model), "", "ghost"))
    return True


def refer_to_itself(model: ModelProto, rng: random.Random) -> bool:
    found = [n for n in nodes(model) if n.input and n.output]
    if not found:
        return False
    node = rng.choice(found)
    node.input[rng.randrange(len(node.input))] = rng.choice(node.output)
    return True


def rename_output(model: ModelProto, rng: random.Random) -> bool:
    found = [n for n in nodes(model) if n.output]
    if not found:
        return False
    node = rng.choice(found)
    node.output[rng.randrange(len(node.output))] = rng.choice((*names(model), "", "ghost"))
    return True


def change_operand_count(model: ModelProto, rng: random.Random) -> bool:
    found = nodes(model)
    if not found:
        return False
    node = rng.choice(found)
    side = rng.choice((node.input, node.output))
    if side and rng.random() < 0.5:
        del side[rng.randrange(len(side))]
    else:
        side.append(rng.choice((*names(model), "", "extra")))
    return True


def swap_inputs(model: ModelProto, rng: random.Random) -> bool:
    found = [n for n in nodes(model) if len(n.input) > 1]
    if not found:
        return False
    node = rng.choice(found)
    a, b = rng.sample(range(len(node.input)), 2)
    node.input[a], node.input[b] = node.input[b], node.input[a]
    return True


def drop_node(model: ModelProto, rng: random.Random) -> bool:
    found = [g for g in graphs(model) if g.node]
    if not found:
        return False
    graph = rng.choice(found)
    del graph.node[rng.randrange(len(graph.node))]
    return True


def repeat_node(model: ModelProto, rng: random.Random) -> bool:
    """Once more as it is (every name twice), or with results of its own."""
    found = [g for g in graphs(model) if g.node]
    if not found:
        return False
    graph = rng.choice(found)
    copy = graph.node.add()
    copy.CopyFrom(rng.choice(graph.node[:-1]))
    if rng.random() < 0.5:
        for k in range(len(copy.output)):
            copy.output[k] = f"again{k}"
    return True


# -- attributes -----------------------------------------------------------------------------------------------------


def change_attribute(model: ModelProto, rng: random.Random) -> bool:
    found = attributes(model)
    if not found:
        return False
    attr = rng.choice(found)
    attr.i = rng.choice(INTS)
    attr.f = rng.choice(FLOATS)
    attr.s = rng.choice(STRINGS)
    if attr.type == AttributeProto.INTS:
        _change_list(attr.ints, INTS, rng)
    elif attr.type == AttributeProto.FLOATS:
        _change_list(attr.floats, FLOATS, rng)
    elif attr.type == AttributeProto.STRINGS:
        _change_list(attr.strings, STRINGS, rng)
    return True


def _change_list(items: object, values: tuple, rng: random.Random) -> None:  # type: ignore[type-arg]
    if items and rng.random() < 0.7:
        items[rng.randrange(len(items))] = rng.choice(values)  # type: ignore[index,arg-type]
    elif items and rng.random() < 0.5:
        del items[rng.randrange(len(items))]  # type: ignore[attr-defined,arg-type]
    else:
        items.extend([rng.choice(values)] * rng.choice((1, 2, 3000)))  # type: ignore[attr-defined]


def change_attribute_type(model: ModelProto, rng: random.Random) -> bool:
    found = attributes(model)
    if not found:
        return False
    rng.choice(found).type = rng.choice(ATTRIBUTE_TYPES)
    return True


def drop_attribute(model: ModelProto, rng: random.Random) -> bool:
    found = [n for n in nodes(model) if n.attribute]
    if not found:
        return False
    node = rng.choice(found)
    del node.attribute[rng.randrange(len(node.attribute))]
    return True


def add_attribute(model: ModelProto, rng: random.Random) -> bool:
    """One the operator knows but the node does not set, or a stranger."""
    found = nodes(model)
    if not found:
        return False
    node = rng.choice(found)
    known: list[str] = []
    if onnx.defs.has(node.op_type, node.domain):
        known = sorted(onnx.defs.get_schema(node.op_type, node.domain).attributes)
    name = rng.choice((*known, "stranger"))
    node.attribute.append(
        helper.make_attribute(
            name,
            rng.choice((rng.choice(INTS), rng.choice(FLOATS), rng.choice(STRINGS), [rng.choice(INTS)] * 3, [0.5, 2.0])),
        )
    )
    return True


def refer_to_function_attribute(model: ModelProto, rng: random.Random) -> bool:
    found = attributes(model)
    if not found:
        return False
    rng.choice(found).ref_attr_name = "alpha"
    return True


# -- types and shapes -----------------------------------------------------------------------------------------------


def change_declared_dtype(model: ModelProto, rng: random.Random) -> bool:
    found = [i for i in infos(model) if i.type.HasField("tensor_type")]
    if not found:
        return False
    rng.choice(found).type.tensor_type.elem_type = rng.choice(DTYPES)
    return True


def change_declared_shape(model: ModelProto, rng: random.Random) -> bool:
    found = [i for i in infos(model) if i.type.HasField("tensor_type")]
    if not found:
        return False
    shape = rng.choice(found).type.tensor_type.shape
    if shape.dim and rng.random() < 0.7:
        dim = rng.choice(shape.dim)
        if rng.random() < 0.3:
            dim.dim_param = rng.choice(("n", "", "?", "batch"))
        else:
            dim.dim_value = rng.choice(INTS)
    elif shape.dim and rng.random() < 0.5:
        del shape.dim[0]
    else:
        for _ in range(rng.choice((1, 2, 70))):
            shape.dim.add().dim_value = rng.choice((1, 2, *INTS))
    return True


def change_declared_kind(model: ModelProto, rng: random.Random) -> bool:
    """A sequence, an optional, a map or nothing instead of a tensor."""
    found = infos(model)
    if not found:
        return False
    info = rng.choice(found)
    inner = TypeProto()
    inner.CopyFrom(info.type)
    kind = rng.choice(("sequence_type", "optional_type", "map_type", "sparse_tensor_type", "none"))
    info.type.Clear()
    if kind in ("sequence_type", "optional_type"):
        for _ in range(rng.choice((1, 1, 3, 20))):
            wrapped = TypeProto()
            getattr(wrapped, kind).elem_type.CopyFrom(inner)
            inner = wrapped
        info.type.CopyFrom(inner)
    elif kind == "map_type":
        info.type.map_type.key_type = rng.choice(DTYPES)
        info.type.map_type.value_type.CopyFrom(inner)
    elif kind == "sparse_tensor_type":
        info.type.sparse_tensor_type.elem_type = 1
    return True


def change_interface(model: ModelProto, rng: random.Random) -> bool:
    """Remove, repeat or rename an input or output of a graph."""
    graph = rng.choice(graphs(model))
    side = rng.choice((graph.input, graph.output, graph.output))
    if not side:
        return False
    choice = rng.randrange(4)
    if choice == 0:
        del side[rng.randrange(len(side))]
    elif choice == 1:
        del side[:]
    elif choice == 2:
        side.add().CopyFrom(side[0])
    else:
        rng.choice(side).name = rng.choice((*names(model), "", "ghost"))
    return True


NODE_MUTATORS: tuple[Mutator, ...] = (
    change_op,
    change_domain,
    rename_input,
    refer_to_itself,
    rename_output,
    change_operand_count,
    swap_inputs,
    drop_node,
    repeat_node,
    change_attribute,
    change_attribute_type,
    drop_attribute,
    add_attribute,
    refer_to_function_attribute,
    change_declared_dtype,
    change_declared_shape,
    change_declared_kind,
    change_interface,
)
