"""``ranvier inspect --training``."""

from __future__ import annotations

from pathlib import Path

import ranvier

DIGITS = str(Path(ranvier.__file__).parent / "models" / "digits.onnx")


def test_the_parts_add_up(call_json):
    found = call_json("inspect", DIGITS, "--training", "--batch", "16", "--optimizer", "sgd")["training"]
    assert found["optimizer_bytes"] == 0 and found["learned_bytes"] == found["gradient_bytes"] > 0
    parts = ("weight", "gradient", "optimizer", "working", "input")
    assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in parts)
    twice = call_json("inspect", DIGITS, "--training", "--batch", "32", "--optimizer", "adam")["training"]
    assert twice["activation_bytes"] == 2 * found["activation_bytes"]
    assert twice["optimizer_bytes"] == 2 * twice["learned_bytes"]


def test_for_people(call):
    result = call("inspect", DIGITS, "--training", "--batch", "16")
    assert "one training step, batch 16, adamw" in result.stdout
    assert call("inspect", DIGITS, "--training", "--optimizer", "sdg").exit_code == 2
