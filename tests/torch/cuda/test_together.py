"""Like steps in one launch, and results that are written over the operands they replace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv
from ranvier.providers.cuda.realise import LoopStep
from ranvier.tensor.state import State
from tests.torch.device import DEVICE


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is computed on the device, in generated kernels."""
    device = f'"{DEVICE}"' if DEVICE == "cpu" else DEVICE
    (tmp_path / "ranvier.toml").write_text(f"[provider_options.cuda]\ndevice = {device}\ntriton = true\n")
    monkeypatch.setenv("RANVIER_CONFIG", str(tmp_path / "ranvier.toml"))
    with rv.backend("cuda"):
        yield


def _steps(function: Any) -> list[Any]:
    (compiled,) = next(iter(function._kept.values()))
    (part,) = compiled._session._parts
    (variant,) = part.kernel._tied
    return list(variant.steps)


def _states(*shapes: tuple[int, ...]) -> list[State]:
    draw = np.random.default_rng(1)
    return [State(draw.standard_normal(shape, np.float32)) for shape in shapes]


def test_states_are_updated_by_one_launch_where_they_lie() -> None:
    states = _states((3, 5), (7,), (2, 2, 3), (31,))
    before = [np.array(state.numpy()) for state in states]

    @rv.jit
    def step(x: Any) -> None:
        for state in states:
            state.assign(state * x - 0.5)

    for _ in range(2):
        step(np.array(2.0, np.float32))
    for state, old in zip(states, before):
        np.testing.assert_allclose(state.numpy(), (old * 2 - 0.5) * 2 - 0.5, rtol=1e-5, atol=1e-5)
    (loops,) = [each for each in _steps(step) if isinstance(each, LoopStep)]
    assert loops.label.endswith("(4 times)") and len(loops.placed) == 4


def test_what_is_read_on_the_way_comes_first() -> None:
    """Each state's new value is an operand of what follows, so none of them can wait for the others."""
    states = _states((4, 6), (4, 6), (4, 6))

    def chain(values: list[Any], x: Any) -> list[Any]:
        found = []
        for value in values:
            x = value * 0.5 + x
            found.append(x)
            x = x @ np.ones((6, 6), np.float32)
        return found

    before = [np.array(state.numpy()) for state in states]

    @rv.jit
    def step(x: Any) -> None:
        for state, value in zip(states, chain([s.value for s in states], x)):
            state.assign(value)

    x = np.full((4, 6), 0.25, np.float32)
    step(x)
    for state, wanted in zip(states, chain(before, x)):
        np.testing.assert_allclose(state.numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_an_operand_that_is_still_wanted_is_not_written_over() -> None:
    state, other = _states((4, 4), (4, 4))
    old, was = np.array(state.numpy()), np.array(other.numpy())

    @rv.jit
    def step(x: Any) -> Any:
        turned = state.value.T  # lies in the same memory
        state.assign(state.value.T * 2.0 + 1.0)  # reads other elements than it writes
        other.assign(other * x + 1.0)
        return (turned @ x).sum(axis=0) + other.value[0]

    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 8
    for _ in range(2):
        found = step(x).numpy()
        new = was * x + 1
        np.testing.assert_allclose(found, (old.T @ x).sum(axis=0) + new[0], rtol=1e-4, atol=1e-4)
        old, was = old.T * 2 + 1, new
        np.testing.assert_allclose(state.numpy(), old, rtol=1e-5)
        np.testing.assert_allclose(other.numpy(), was, rtol=1e-5)
    placed = [each for step in _steps(step) if isinstance(step, LoopStep) for each in step.placed]
    assert len(placed) == 1  # of the other state alone
