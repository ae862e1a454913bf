"""Deterministic damage: bytes of a model file, and the structure of a model message.

``mutate(seeds, seed, index)`` is a pure function: the same numbers give the same broken model on every machine with
the same versions of the packages that the seeds come from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from tests.faults.bytes_level import BYTE_MUTATORS
from tests.faults.corpus import Seed
from tests.faults.structure import NODE_MUTATORS, Mutator, add_attribute, change_attribute, change_op, rename_input
from tests.faults.structure_model import MODEL_MUTATORS, input_to_constant, poison_constant

# those that reach deepest, so they come more often
OFTEN: tuple[Mutator, ...] = (
    add_attribute,
    change_attribute,
    change_op,
    input_to_constant,
    poison_constant,
    rename_input,
)
STRUCTURE_MUTATORS: tuple[Mutator, ...] = (*NODE_MUTATORS, *MODEL_MUTATORS, *OFTEN, *OFTEN)
LEVELS = ("none", "basic", "aggressive")


@dataclass(frozen=True)
class Mutation:
    """A broken model, and how to run it should it load."""

    index: int
    name: str  # of the model it was
    steps: tuple[str, ...]  # what was done to it
    model: bytes
    inputs: tuple[Any, ...]
    optimization: str
    rng: random.Random  # for whatever else is drawn for this case


def mutate(seeds: Sequence[Seed], seed: int, index: int) -> Mutation:
    """Mutation ``index`` of the campaign ``seed``."""
    rng = random.Random(f"{seed}/{index}")
    origin = rng.choice(seeds)
    data = origin.model
    steps: list[str] = []
    if rng.random() < 0.87:
        model = ModelProto.FromString(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            steps.append(_damage_structure(model, rng))
        data = model.SerializeToString()
    if not steps or rng.random() < 0.05:
        for _ in range(rng.choice((1, 1, 2, 4))):
            step = rng.choice(BYTE_MUTATORS)
            data = step(data, rng)
            steps.append(step.__name__)
    return Mutation(index, origin.name, tuple(steps), data, origin.inputs, rng.choice(LEVELS), rng)


def _damage_structure(model: ModelProto, rng: random.Random) -> str:
    """Apply the first mutator, in random order, that finds something to change."""
    order = rng.sample(STRUCTURE_MUTATORS, len(STRUCTURE_MUTATORS))
    return next(step.__name__ for step in order if step(model, rng))
