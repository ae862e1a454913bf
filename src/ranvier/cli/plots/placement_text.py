"""What is said of nodes, parts and transfers of a report: the words under the pointer and in tables.

All of it is made from the data of a report (``Report.to_dict()``); what a report does not hold is not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ranvier.cli.render import bytes_text, seconds_text

Data = Mapping[str, Any]


class Costs:
    """The predicted seconds in a report, where it has some."""

    def __init__(self, data: Data) -> None:
        predicted = data.get("predicted") or {}
        self.options: Sequence[Sequence[Data]] = predicted.get("options") or ()
        self._parts: dict[tuple[int, ...], float] = {
            tuple(part["nodes"]): part["end"] - part["start"] for part in predicted.get("parts") or ()
        }
        self._moves = {(t["value"], t["source"], t["target"]): t for t in predicted.get("transfers") or ()}
        self.total: float | None = predicted.get("seconds")
        self._sources: Mapping[str, str] = predicted.get("sources") or {}

    def summary(self, providers: Iterable[str]) -> str:
        """``predicted 1.2 ms a run (cpu measured, sim nominal)``; nothing where nothing is known."""
        if self.total is None:
            return ""
        told = ", ".join(f"{name} {self._sources[name]}" for name in providers if name in self._sources)
        return f"predicted {seconds_text(self.total)} a run" + (f" ({told})" if told else "")

    def node(self, k: int) -> float | None:
        """What a node takes where it is."""
        for option in self._of(k):
            if option["reason"] == "chosen":
                seconds: float | None = option["seconds"]
                return seconds
        return None

    def others(self, k: int) -> list[Data]:
        """What the node would have taken elsewhere, and why it is not there."""
        return [option for option in self._of(k) if option["reason"] != "chosen" and option["seconds"] is not None]

    def part(self, nodes: Sequence[int]) -> float | None:
        """What a part takes; the sum of its nodes where it was not predicted as a whole."""
        found = self._parts.get(tuple(nodes))
        if found is not None:
            return found
        each = [self.node(k) for k in nodes]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if known and len(known) == len(each) else None

    def transfer(self, transfer: Data) -> float | None:
        moves = [self._moves.get((value, transfer["source"], transfer["target"])) for value in transfer["values"]]
        known = [move["seconds"] for move in moves if move is not None]
        return sum(known) if known and len(known) == len(moves) else None

    def _of(self, k: int) -> Sequence[Data]:
        return self.options[k] if k < len(self.options) else ()


def node_text(data: Data, k: int, costs: Costs) -> str:
    """Everything about a node, a line for each thing."""
    node = data["nodes"][k]
    lines = [f"{node['op']} {node['name']}".rstrip()]
    where = f"runs on {node['provider']}"
    lines.append(f"{where}, part {node['part']}" if node.get("part", -1) >= 0 else where)
    seconds = costs.node(k)
    if seconds is not None:
        lines.append(f"predicted {seconds_text(seconds)}")
    lines += [f"{name}: {kind}" for name, kind in zip(node.get("outputs", ()), node.get("types", ())) if kind != "None"]
    if node.get("inputs"):
        lines.append(f"reads {listed(node['inputs'], 6)}")
    if node.get("weight_bytes"):
        lines.append(f"constants {bytes_text(node['weight_bytes'])}")
    if node.get("inside"):
        lines.append(f"{count(node['inside'], 'node')} inside")
    if node.get("note"):
        lines.append(node["note"])
    if node.get("origin"):
        lines.append(f"made by {node['origin']}")
    lines += [f"declined by {who}: {why}" for who, why in node.get("declined", ())]
    lines += [f"{o['provider']} would take {seconds_text(o['seconds'])}: {o['reason']}" for o in costs.others(k)]
    return "\n".join(lines)


def part_title(data: Data, p: int, costs: Costs) -> str:
    """A part in one line."""
    part = data["parts"][p]
    seconds = costs.part(part["nodes"])
    pieces = [f"part {p}", part["provider"], count(len(part["nodes"]), "node")]
    return " · ".join(pieces if seconds is None else [*pieces, seconds_text(seconds)])


def part_text(data: Data, p: int, costs: Costs) -> str:
    part = data["parts"][p]
    ops: dict[str, int] = {}
    for k in part["nodes"]:
        op = data["nodes"][k]["op"]
        ops[op] = ops.get(op, 0) + 1
    common = sorted(ops.items(), key=lambda item: -item[1])
    lines = [part_title(data, p, costs), f"memory {part['memory']}"]
    if mates := _at_the_same_time(data["parts"], p):
        lines.append(f"at the same time as part {listed([str(k) for k in mates], 8)}")
    lines.append(", ".join(f"{op} ×{n}" if n > 1 else op for op, n in common[:8]) + (" …" if len(common) > 8 else ""))
    lines += [
        f"{word} {listed(part[key], 8)}" for word, key in (("reads", "inputs"), ("gives", "outputs")) if part[key]
    ]
    return "\n".join(lines)


def _at_the_same_time(parts: Sequence[Data], p: int) -> list[int]:
    """The parts that run in other threads of the host meanwhile."""
    wave, lane = parts[p].get("wave", -1), parts[p].get("lane", 0)
    return [k for k, part in enumerate(parts) if wave >= 0 and part["wave"] == wave and part["lane"] != lane]


def transfer_title(transfer: Data) -> str:
    return f"{transfer['source']} → {transfer['target']}"


def transfer_size(transfer: Data) -> str:
    """The bytes of a transfer; where sizes are open, the type of what moves."""
    if transfer.get("bytes") is not None:
        return bytes_text(transfer["bytes"])
    return listed(transfer.get("types", ()), 1) or "unknown"


def transfer_text(transfer: Data, costs: Costs) -> str:
    lines = [f"transfer {transfer_title(transfer)}", transfer_size(transfer)]
    seconds = costs.transfer(transfer)
    if seconds is not None:
        lines.append(f"predicted {seconds_text(seconds)}")
    types = transfer.get("types") or [""] * len(transfer["values"])
    lines += [f"{name}: {kind}" if kind else name for name, kind in zip(transfer["values"], types)]
    return "\n".join(lines)


def count(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def listed(names: Iterable[str], most: int) -> str:
    """The first of them, and how many more there are."""
    found = list(names)
    more = len(found) - most
    return ", ".join(found[:most]) + (f" and {more} more" if more > 0 else "")
