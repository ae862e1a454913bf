"""Damage to a model message that leaves it parseable: wrong names, attributes, types, sizes, weights, functions.

A mutator changes the message in place and returns whether it found anything to change.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

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


# -- weights --------------------------------------------------------------------------------------------------------


def change_tensor_dims(model: ModelProto, rng: random.Random) -> bool:
    found = tensors(model)
    if not found:
        return False
    dims = rng.choice(found).dims
    if dims and rng.random() < 0.7:
        dims[rng.randrange(len(dims))] = rng.choice(INTS)
    else:
        dims.extend([rng.choice(INTS)] * rng.choice((1, 2, 70)))
    return True


def change_tensor_dtype(model: ModelProto, rng: random.Random) -> bool:
    found = tensors(model)
    if not found:
        return False
    rng.choice(found).data_type = rng.choice(DTYPES)
    return True


def truncate_tensor(model: ModelProto, rng: random.Random) -> bool:
    found = [t for t in tensors(model) if t.raw_data]
    if not found:
        return False
    tensor = rng.choice(found)
    tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data))] + rng.choice((b"", b"\0" * 100))
    return True


def double_tensor_data(model: ModelProto, rng: random.Random) -> bool:
    """Data in a second place, or in the wrong one."""
    found = tensors(model)
    if not found:
        return False
    tensor = rng.choice(found)
    getattr(tensor, rng.choice(("float_data", "int32_data", "int64_data", "double_data"))).append(7)
    if rng.random() < 0.5:
        tensor.ClearField("raw_data")
    return True


def poison_constant(model: ModelProto, rng: random.Random) -> bool:
    """NaN, infinities and huge numbers where shapes, indices, pads and scales come from."""
    found = [t for t in tensors(model) if t.data_type in (1, 6, 7, 10, 11) and not t.external_data]
    if not found:
        return False
    tensor = rng.choice(found)
    try:
        array = numpy_helper.to_array(tensor).copy()
    except Exception:  # an earlier mutation broke it
        return False
    if not array.size:
        return False
    values = FLOATS if array.dtype.kind == "f" else INTS
    with np.errstate(all="ignore"):
        poison = np.array(rng.choice(values)).astype(array.dtype)
    array.reshape(-1)[rng.randrange(array.size) if rng.random() < 0.7 else slice(None)] = poison
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return True


def input_to_constant(model: ModelProto, rng: random.Random) -> bool:
    """An input becomes a small constant with odd values, so that load-time optimization meets them."""
    found = [i for i in model.graph.input if i.type.tensor_type.elem_type in (1, 6, 7, 9, 11)]
    if not found:
        return False
    info = rng.choice(found)
    kind = info.type.tensor_type.elem_type
    sizes = [d.dim_value if 0 < d.dim_value < 10 else 1 for d in info.type.tensor_type.shape.dim]
    values = FLOATS if kind in (1, 11) else (0, 1) if kind == 9 else INTS
    with np.errstate(all="ignore"):
        array = np.array([rng.choice((*values, 0, 1)) for _ in range(math.prod(sizes))])
        array = array.astype(helper.tensor_dtype_to_np_dtype(kind)).reshape(sizes)
    model.graph.initializer.append(numpy_helper.from_array(array, info.name))
    if rng.random() < 0.7:
        model.graph.input.remove(info)
    return True


def external_data(model: ModelProto, rng: random.Random) -> bool:
    found = tensors(model)
    if not found:
        return False
    tensor = rng.choice(found)
    tensor.data_location = TensorProto.EXTERNAL
    if rng.random() < 0.5:
        tensor.ClearField("raw_data")
    del tensor.external_data[:]
    entries = {
        "location": (
            "weights.bin",
            "../weights.bin",
            "/etc/passwd",
            "",
            "no.bin",
            "a\0b",
            "..\\w",
            "./weights.bin",
            ".",
        ),
        "offset": ("0", "-1", "4", "1e3", str(2**63), ""),
        "length": ("0", "4800", "-1", str(2**63), "x", ""),
        "checksum": ("0" * 40, ""),
    }
    for key, values in entries.items():
        if rng.random() < 0.7:
            tensor.external_data.add(key=key, value=rng.choice(values))
    return True


def change_initializer_name(model: ModelProto, rng: random.Random) -> bool:
    found = [t for g in graphs(model) for t in g.initializer]
    if not found:
        return False
    rng.choice(found).name = rng.choice((*names(model), "", "ghost"))
    return True


def change_sparse(model: ModelProto, rng: random.Random) -> bool:
    found = [s for g in graphs(model) for s in g.sparse_initializer]
    if not found:
        return False
    sparse = rng.choice(found)
    if rng.random() < 0.5:
        sparse.dims[rng.randrange(len(sparse.dims))] = rng.choice(INTS)
    else:
        sparse.indices.CopyFrom(numpy_helper.from_array(np.array([rng.choice(INTS) for _ in range(2)]), "i"))
    return True


# -- the model around the graph -------------------------------------------------------------------------------------


def change_opset(model: ModelProto, rng: random.Random) -> bool:
    if not model.opset_import or rng.random() < 0.1:
        entry = model.opset_import.add()
        entry.domain = rng.choice(("", "ai.onnx.ml", "local"))
    else:
        entry = rng.choice(model.opset_import)
    entry.version = rng.choice((*range(1, 27), 0, -1, 999, 2**63 - 1))
    return True


def change_ir_version(model: ModelProto, rng: random.Random) -> bool:
    model.ir_version = rng.choice((0, 1, 2, 3, 4, 8, 99, -1, 2**63 - 1))
    return True


def change_function(model: ModelProto, rng: random.Random) -> bool:
    """Recursive, mutually recursive, missing, or with another signature."""
    if not model.functions:
        return False
    function = rng.choice(model.functions)
    choice = rng.randrange(5)
    if choice == 0:
        function.node.add(op_type=function.name, domain=function.domain, input=function.input, output=["again"])
    elif choice == 1:
        other = rng.choice(model.functions)
        function.node.add(op_type=other.name, domain=other.domain, input=function.input, output=["other"])
    elif choice == 2:
        model.functions.remove(function)
    elif choice == 3:
        function.input.append(rng.choice(("more", function.input[0] if function.input else "")))
    else:
        model.functions.add().CopyFrom(function)
    return True


def shadow_operator(model: ModelProto, rng: random.Random) -> bool:
    """A function of the model with the name of an operator it uses, perhaps calling itself."""
    found = [n for n in nodes(model) if n.input and n.output]
    if not found:
        return False
    node = rng.choice(found)
    function = model.functions.add(name=node.op_type, domain=node.domain)
    function.input.extend(f"a{k}" for k in range(len(node.input)))
    function.output.extend(f"r{k}" for k in range(len(node.output)))
    function.opset_import.extend(model.opset_import)
    inner = rng.choice(("Identity", node.op_type))
    for result in function.output:
        function.node.add(op_type=inner, domain=node.domain, input=function.input[:1], output=[result])
    return True


def nest(model: ModelProto, rng: random.Random) -> bool:
    """The whole graph as both branches of an If of an If …; protobuf itself gives up at some depth."""
    for level in range(rng.choice((1, 3, 10, 25))):
        inner = GraphProto()
        inner.CopyFrom(model.graph)
        del inner.input[:]
        branch = f"nest{level}"
        node = helper.make_node("If", [f"{branch}.cond"], [f"{branch}.{k}" for k in range(len(inner.output))])
        try:
            node.attribute.append(helper.make_attribute("then_branch", inner))
        except DecodeError:  # as deep as protobuf goes
            return True
        other = GraphProto(name="other")
        other.output.extend(inner.output)
        node.attribute.append(helper.make_attribute("else_branch", inner if rng.random() < 0.1 else other))
        del model.graph.node[:]
        model.graph.node.append(node)
        for info, name in zip(model.graph.output, node.output):
            info.name = name
        condition = helper.make_tensor_value_info(f"{branch}.cond", TensorProto.BOOL, [])
        model.graph.input.append(condition)
        if model.ByteSize() > 100_000:
            break
    return True


def grow(model: ModelProto, rng: random.Random) -> bool:
    """Join an output with itself again and again: its size doubles at every node."""
    found = [n for n in model.graph.node if n.output]
    if not found:
        return False
    last = rng.choice(found).output[0]
    op = rng.choice(("Concat", "Add", "Expand", "Tile"))
    for k in range(rng.choice((3, 40, 200))):
        node = model.graph.node.add(op_type=op, input=[last, last], output=[f"grown{k}"])
        if op == "Concat":
            node.attribute.append(helper.make_attribute("axis", rng.choice((0, 0, 0, 1, -1))))
        last = f"grown{k}"
    model.graph.output.add(name=last)
    return True


def confuse_text(model: ModelProto, rng: random.Random) -> bool:
    """Names that are paths, formats, very long, or not text at all."""
    text = rng.choice(("../../x", "%s%n{}", "\0", "a" * 10_000, "\u202e", "'; --", "{0!r}"))
    model.graph.name = text
    for node in rng.sample(list(model.graph.node), min(2, len(model.graph.node))):
        node.name = text
    return True


def scramble_floats(model: ModelProto, rng: random.Random) -> bool:
    """Random bit patterns as weights: signalling NaNs, denormals."""
    found = [t for t in tensors(model) if t.raw_data and t.data_type in (1, 10, 11)]
    if not found:
        return False
    tensor = rng.choice(found)
    count = len(tensor.raw_data)
    pattern = struct.pack("<I", rng.getrandbits(32))
    tensor.raw_data = (pattern * (count // 4 + 1))[:count]
    return True


# those that reach deepest stand more than once
_OFTEN: tuple[Mutator, ...] = (
    change_op,
    rename_input,
    change_attribute,
    add_attribute,
    poison_constant,
    input_to_constant,
)
STRUCTURE_MUTATORS: tuple[Mutator, ...] = (
    *_OFTEN,
    *_OFTEN,
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
    change_tensor_dims,
    change_tensor_dtype,
    truncate_tensor,
    double_tensor_data,
    poison_constant,
    input_to_constant,
    external_data,
    change_initializer_name,
    change_sparse,
    change_opset,
    change_ir_version,
    change_function,
    shadow_operator,
    nest,
    grow,
    confuse_text,
    scramble_floats,
)
