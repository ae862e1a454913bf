"""``session.report``: what the model is, what the passes did, where every node runs and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ranvier.passes.manager import PassReport


@dataclass(frozen=True)
class NodeReport:
    """One node of the optimized graph."""

    name: str
    op: str
    provider: str
    note: str = ""
    origin: str = ""  # the rule that made it
    declined: tuple[tuple[str, str], ...] = ()  # (provider, reason)


@dataclass
class Report:
    """Data first; ``str(report)`` is for people."""

    model: str
    providers: tuple[str, ...]
    optimization: str
    nodes_loaded: int
    nodes: list[NodeReport] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # load, optimize, compile
    transfers: list[tuple[str, str, str]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what type inference could not make sense of

    def by_provider(self) -> Counter[str]:
        return Counter(node.provider for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "by_provider": dict(self.by_provider())}

    def __str__(self) -> str:
        where = ", ".join(f"{count} on {name}" for name, count in self.by_provider().most_common())
        times = ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in self.seconds.items())
        nodes = f"{self.nodes_loaded} nodes loaded, {len(self.nodes)} after optimization ({self.optimization})"
        lines = [f"{self.model}: {nodes}: {where or 'none'}", f"  {times}"]
        for step in self.passes:
            if step.changes:
                count = f"{step.nodes_before} → {step.nodes_after} nodes"
                lines.append(f"  pass {step.name}: {step.changes} changes, {count}")
        lines.extend(f"  transfer {value}: {source} → {target}" for value, source, target in self.transfers)
        lines.extend(f"  fallback: {text}" for text in self.fallbacks)
        return "\n".join(lines)
