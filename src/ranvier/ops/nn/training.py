"""One step of an optimizer as an operator (``ai.onnx.preview.training``).

Each operator updates several tensors at once. Its variadic inputs are groups laid one after another: first all
values X₁…Xₙ, then all gradients G₁…Gₙ, then each kind of state; the outputs are grouped in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.operands import scalar
from ranvier.ops.registry import Array, op

DOMAIN = "ai.onnx.preview.training"


@op("Adagrad", domain=DOMAIN)
def adagrad(
    R: Array,
    T: Array,
    *inputs: Array,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Array, ...]:
    rate = float(_scalar("Adagrad", "R", R) / (1 + _scalar("Adagrad", "T", T) * decay_factor))

    def step(x: Array, g: Array, h: Array) -> tuple[Array, ...]:
        gradient = norm_coefficient * x + g
        h_new = h + gradient * gradient
        return x - rate * gradient / (np.sqrt(h_new) + epsilon), h_new

    return _update_groups("Adagrad", inputs, 3, step)


@op("Adam", domain=DOMAIN)
def adam(
    R: Array,
    T: Array,
    *inputs: Array,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Array, ...]:
    count = _scalar("Adam", "T", T)
    bias_correction = np.sqrt(1 - beta**count) / (1 - alpha**count) if count > 0 else 1.0
    rate = float(_scalar("Adam", "R", R) * bias_correction)

    def step(x: Array, g: Array, v: Array, h: Array) -> tuple[Array, ...]:
        gradient = norm_coefficient * x + g
        v_new = alpha * v + (1 - alpha) * gradient
        h_new = beta * h + (1 - beta) * gradient * gradient
        x_new = x - rate * v_new / (np.sqrt(h_new) + epsilon)
        return (1 - norm_coefficient_post) * x_new, v_new, h_new

    return _update_groups("Adam", inputs, 4, step)


@op("Momentum", domain=DOMAIN)
def momentum(
    R: Array, T: Array, *inputs: Array, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Array, ...]:
    if mode not in ("standard", "nesterov"):
        raise InvalidValue(f"Momentum: mode must be 'standard' or 'nesterov', got {mode!r}")
    rate = float(_scalar("Momentum", "R", R))
    # the first gradient enters unscaled: there is no momentum yet to balance it
    gradient_scale = beta if _scalar("Momentum", "T", T) > 0 else 1.0

    def step(x: Array, g: Array, v: Array) -> tuple[Array, ...]:
        gradient = norm_coefficient * x + g
        v_new = alpha * v + gradient_scale * gradient
        direction = v_new if mode == "standard" else gradient + alpha * v_new
        return x - rate * direction, v_new

    return _update_groups("Momentum", inputs, 3, step)


def _scalar(op_name: str, name: str, value: Array) -> np.float64:
    """A number in NumPy's arithmetic, where a division by zero gives inf.

    What meets the tensors is turned into a Python float first: that takes their element type and widens nothing.
    """
    return np.float64(scalar(op_name, f"'{name}'", value))


def _update_groups(
    op_name: str, inputs: Sequence[Array], kinds: int, step: Callable[..., tuple[Array, ...]]
) -> tuple[Array, ...]:
    """Apply ``step`` to the k-th tensor of every group; results come back grouped the way the inputs are."""
    count, left = divmod(len(inputs), kinds)
    if left or not count:
        raise InvalidValue(f"{op_name}: expected {kinds} tensors per variable, got {len(inputs)} in all")
    updated = []
    for k in range(count):
        value, *others = inputs[k::count]
        for other in others:
            if other.shape != value.shape:
                raise ShapeMismatch(
                    f"{op_name}: variable {k} has shape {list(value.shape)}, its gradient or state {list(other.shape)}"
                )
        # 0-d arithmetic yields NumPy scalars; outputs are arrays
        updated.append([np.asarray(result, value.dtype) for result in step(value, *others)])
    return tuple(result for group in zip(*updated) for result in group)
