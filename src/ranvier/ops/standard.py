"""Operators without a declaration of ours run by the body that the standard's own package carries.

``onnx.reference`` is correct for most of the long tail (and slow, which does not matter there). Each use is wrapped
as an ordinary :class:`OpDef`, so nothing else needs to know where a body comes from.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
from onnx import TypeProto, helper

from ranvier import dtypes
from ranvier.errors import InvalidValue
from ranvier.graph.ir import Graph
from ranvier.ops.proto import attr_to_proto, schema_of
from ranvier.ops.registry import Call, OpDef, add_fallback


@functools.cache
def find_standard(domain: str, name: str, version: int | None) -> OpDef | None:
    """An OpDef around the body in ``onnx.reference``, or None where it has none."""
    at = version if version else _newest(domain)
    schema = schema_of(domain, name, at)
    if schema is None or not _has_body(domain, name, schema):
        return None

    def body(*inputs: Any, ctx: Call, **attrs: Any) -> tuple[Any, ...]:
        return _run(domain, name, at, inputs, attrs, ctx)

    return OpDef(body, name, domain, schema.since_version, frozenset())


def _newest(domain: str) -> int:
    versions = [v for d, v in onnx.helper.OP_SET_ID_VERSION_MAP if d == (domain or "ai.onnx")]
    return max(versions, default=1)


def _has_body(domain: str, name: str, schema: Any) -> bool:
    if schema.has_function or schema.has_context_dependent_function:
        return True
    if domain == "":
        from onnx.reference.ops import load_op
    elif domain == "ai.onnx.ml":
        from onnx.reference.ops.aionnxml import load_op
    elif domain == "ai.onnx.preview.training":
        from onnx.reference.ops.aionnx_preview_training import load_op
    elif domain == "ai.onnx.preview":
        from onnx.reference.ops.aionnx_preview import load_op
    else:
        return False
    try:
        load_op(domain, name, schema.since_version)
    except Exception:
        return False
    return True


def _run(domain: str, name: str, version: int, inputs: Any, attrs: dict[str, Any], ctx: Call) -> tuple[Any, ...]:
    """One-node model through ``onnx.reference``; a few bodies choose their form from the operand types."""
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    results = [f"o{k}" if ctx.wants(k) else "" for k in range(ctx.outputs)]
    node = helper.make_node(name, names, results, domain=domain)
    for key, attr in attrs.items():
        if attr is not None:
            node.attribute.append(attr_to_proto(key, attr, _no_graph))
    given = {n: x for n, x in zip(names, inputs) if n}
    infos = [onnx.ValueInfoProto(name=n, type=_type_of(x)) for n, x in given.items()]
    graph = helper.make_graph([node], name, infos, [onnx.ValueInfoProto(name=r) for r in results if r])
    opsets = [helper.make_opsetid(domain, version)]
    if domain:
        opsets.append(helper.make_opsetid("", onnx.defs.onnx_opset_version()))
    evaluator = onnx.reference.ReferenceEvaluator(helper.make_model(graph, opset_imports=opsets))
    try:
        found = iter(evaluator.run(None, given))
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        raise InvalidValue(f"{name}: {error}", op=name) from error
    return tuple(next(found) if r else None for r in results)


def _no_graph(graph: Graph) -> Any:
    raise InvalidValue(f"graph {graph.name!r}: operators with subgraphs have no standard body here")


def _type_of(x: Any) -> TypeProto:
    if isinstance(x, list):
        elem = _type_of(x[0]) if x else helper.make_tensor_type_proto(1, None)
        return helper.make_sequence_type_proto(elem)
    array = np.asarray(x)
    return helper.make_tensor_type_proto(dtypes.of(array).onnx, array.shape)


add_fallback(find_standard)
