"""What ``ranvier inspect --training`` says: the memory of a training step, before one is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranvier.cli.render import Output, bytes_text, facts
from ranvier.graph.ir import Graph


def training_facts(graph: Graph, batch: int | None, optimizer: str, dims: Mapping[str, int]) -> dict[str, Any]:
    from ranvier.tensor.training.memory import estimate_training

    found = estimate_training(graph, batch=batch, dims=dims, optimizer=optimizer)
    return {
        "batch": batch,
        "optimizer": optimizer,
        "sizes": dict(dims),
        "weight_bytes": found.weights,
        "learned_bytes": found.learned,
        "gradient_bytes": found.gradients,
        "optimizer_bytes": found.optimizer,
        "activation_bytes": found.activations,
        "working_bytes": found.working,
        "input_bytes": found.inputs,
        "total_bytes": found.total,
        "unknown": list(found.unknown),
    }


def show_training(output: Output, data: Mapping[str, Any]) -> None:
    sizes = [f"batch {data['batch']}"] if data["batch"] is not None else []
    sizes += [f"{name}={size}" for name, size in data["sizes"].items()]
    output.heading(f"memory of one training step, {', '.join([*sizes, data['optimizer']])}")
    kept = f"{bytes_text(data['activation_bytes'])} of them kept from the forward for the backward half"
    rows = [
        ("weights", f"{bytes_text(data['weight_bytes'])}, of which {bytes_text(data['learned_bytes'])} can be learned"),
        ("gradients", bytes_text(data["gradient_bytes"])),
        ("optimizer", f"{bytes_text(data['optimizer_bytes'])} kept from step to step"),
        ("intermediate", f"{bytes_text(data['working_bytes'])} at most at a time, {kept}"),
        ("inputs", bytes_text(data["input_bytes"])),
        ("one step", f"about {bytes_text(data['total_bytes'])}"),
        ("not counted", ", ".join(data["unknown"][:6])),
    ]
    output.show(facts(rows))
