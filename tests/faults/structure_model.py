"""Damage to the weights of a model message, to its functions and opsets, and growth without end."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from tests.faults.structure import DTYPES, FLOATS, INTS, Mutator, graphs, names, nodes, tensors

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
    tensor = [i for i in model.graph.input if i.type.tensor_type.elem_type in (1, 6, 7, 9, 11)]
    found = [i for i in tensor if len(i.type.tensor_type.shape.dim) <= 8]
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


MODEL_MUTATORS: tuple[Mutator, ...] = (
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
