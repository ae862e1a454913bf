"""Brings nodes of the standard domain to the newest form of their operator, so that later stages see one form.

Most revisions of the standard only admit more types: the node gets a new version number. Where the form or the
meaning changed, an upgrade (see ``upgrades``) rewrites the node. What has none stays, and its old reference runs it.

``onnx.version_converter`` does this for whole models. It is the oracle of the tests rather than the tool here: it gives
up on a model with a single operator that has no schema (legacy Affine, Crop …) or broadcasts by ``axis``, and in onnx
1.23 it changes what Resize-10 and GroupNormalization-18 compute.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

from ranvier.config import Level
from ranvier.graph.ir import Graph, Node
from ranvier.ops import NEWEST, annotate, registry
from ranvier.ops.proto import schema_of
from ranvier.passes.base import PassContext
from ranvier.passes.edit import builder
from ranvier.passes.upgrades import UPGRADES, Upgrade
from ranvier.records import dataclass

LEGACY = frozenset({"consumed_inputs", "output_sequence"})  # attributes that never meant anything to a result


class Modernise:
    name: ClassVar[str] = "modernise"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    ensures: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, ctx: PassContext) -> bool:
        self._look(graph, ctx)
        before = 0
        while ctx.declined and ctx.changes > before:  # new forms tell types that old ones kept others waiting for
            before = ctx.changes
            ctx.declined.clear()
            annotate(graph)
            self._look(graph, ctx)
        return ctx.changes > 0

    def _look(self, graph: Graph, ctx: PassContext) -> None:
        for each in list(graph.all_graphs()):
            for node in each:
                if node.domain:
                    continue
                route = _route(node.op, node.version)
                if route is not None:
                    self._follow(route, node, ctx)

    def _follow(self, route: Route, node: Node, ctx: PassContext) -> None:
        op, version = node.op, node.version
        for below, upgrade in route.steps:
            reason = upgrade(node, builder(node, self.name))
            if reason is not None:
                ctx.left(f"{op}-{version}", reason)
                break
            if node.op != op:
                node.version = schema_of("", node.op, NEWEST).since_version
                break
            node.version = below
        else:
            node.version = route.end
            for attr in LEGACY & node.attrs.keys():
                del node.attrs[attr]
            if route.reason:
                ctx.left(f"{op}-{version}", route.reason)
        if (node.op, node.version) != (op, version):
            ctx.changed(f"{op}-{version} to {node.op}-{node.version}")


@dataclass(frozen=True)
class Route:
    """How a version of an operator becomes a newer one."""

    steps: tuple[tuple[int, Upgrade], ...]
    end: int  # the version that is reached
    reason: str = ""  # why it is not the newest one


@functools.cache
def _route(op: str, version: int) -> Route | None:
    """The way to the newest version, or None where there is nothing to do."""
    upgrades = [(below, step) for below, step in UPGRADES.get(op, ()) if below > version]
    covered = max((below for below, _ in upgrades), default=version)
    end, reason = version, ""
    for old, new in itertools.pairwise(_versions(op, version)):
        if new > covered and not _same_meaning(op, old, new):
            reason = f"version {new} means something else"
            break
        end = new
    return Route(tuple(upgrades), end, reason) if upgrades or end != version or reason else None


def _versions(op: str, version: int) -> list[int]:
    """The versions of an operator from ``version`` on."""
    found: list[int] = []
    schema = schema_of("", op, NEWEST)
    while schema is not None and schema.since_version > version:
        found.append(schema.since_version)
        schema = schema_of("", op, schema.since_version - 1)
    return [version, *reversed(found)]


def _same_meaning(op: str, old: int, new: int) -> bool:
    """True when a node of the old version can be called one of the new version as it stands."""
    before, after = schema_of("", op, old), schema_of("", op, new)
    if before is None or after is None or after.deprecated or not _extends(before, after):
        return False
    if registry.find("", op, old) is registry.find("", op, new):
        return True
    # two bodies, as for operators that run by the standard's own: the same text describes the same operator
    unchanged = before.attributes.keys() == after.attributes.keys() and len(before.inputs) == len(after.inputs)
    return unchanged and _defaults(before) == _defaults(after) and before.doc.split() == after.doc.split()


def _extends(before: Any, after: Any) -> bool:
    """Whatever is legal in the old form is legal in the new one: additions are optional, nothing but legacy is gone."""
    for old, new in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
        if len(old) > len(new) or any(n.option.name != "Optional" for n in new[len(old) :]):
            return False
        if any(o.option != n.option and n.option.name != "Optional" for o, n in zip(old, new)):
            return False
    for name, attr in before.attributes.items():
        successor = after.attributes.get(name)
        if successor is None:
            if name not in LEGACY:
                return False
        elif successor.type != attr.type or (successor.required and not attr.required):
            return False
    return not any(a.required for name, a in after.attributes.items() if name not in before.attributes)


def _defaults(schema: Any) -> dict[str, bytes]:
    return {name: attr.default_value.SerializeToString() for name, attr in schema.attributes.items()}
