"""Writes the table of docs/gradients.md: how each declared operator is derived, or why it is not.

Use: ``python tools/gradient_table.py``.
"""

from __future__ import annotations

from pathlib import Path

from ranvier.graph.ir import Graph
from ranvier.ops import registry
from ranvier.ops.gradients import has_parts, reason_against, rule_of
from ranvier.ops.gradients.functions import has_definition
from ranvier.ops.gradients.sequences import HOLDERS
from ranvier.passes.differentiate_control import CONTROL

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gradients.md"
BEGIN = "<!-- made by tools/gradient_table.py -->\n"
DOMAINS = {"": "ONNX", "ai.onnx.ml": "ai.onnx.ml", "ai.onnx.preview": "ai.onnx.preview",
           "ai.onnx.preview.training": "ai.onnx.preview.training", "com.microsoft": "com.microsoft",
           "ranvier": "ranvier"}  # fmt: skip
WAYS = ("a rule", "written out in plain operators", "by the standard's definition", "bodies are derived",
        "found again where they went in")  # fmt: skip


def way_of(domain: str, name: str) -> str | None:
    """How an operator is derived; None where it is not."""
    if not domain and name in CONTROL:
        return WAYS[3]
    if not domain and name in HOLDERS:
        return WAYS[4]
    if rule_of(domain, name) is not None:
        return WAYS[0]
    if has_parts(domain, name):
        return WAYS[1]
    version = registry.get(domain, name).since
    node = Graph("g", opsets={"": version}).add(name, [], {}, 1, domain=domain, version=version)
    return WAYS[2] if reason_against(domain, name) is None and has_definition(node) else None


def table() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for domain, name in sorted({(d.domain, d.name) for d in registry.declared() if d.domain in DOMAINS}):
        way = way_of(domain, name) or f"none: {reason_against(domain, name)}"
        rows.setdefault((domain, way), []).append(name)
    order = {way: k for k, way in enumerate(WAYS)}
    lines = ["| domain | gradient | operators |", "|---|---|---|"]
    for domain, way in sorted(rows, key=lambda key: (key[0], order.get(key[1], len(WAYS)), key[1])):
        names = rows[domain, way]
        lines.append(f"| {DOMAINS[domain]} | {way} ({len(names)}) | {' '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table(), encoding="utf-8")


if __name__ == "__main__":
    main()
