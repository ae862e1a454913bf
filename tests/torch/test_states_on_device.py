"""Compiled functions whose states stay on a device: what travels, what others still hold, and who changed a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import ranvier as rv
import ranvier.numpy as rnp
from ranvier import nn, optim
from ranvier.errors import InvalidValue
from ranvier.tensor.nn.generator import default_generator
from ranvier.tensor.state import Parameter, State
from tests.torch.device import DEVICE

OPTIONS = {
    "eager": "cuda_graphs = false",
    "captured": "cuda_graphs = true",
    "generated": "cuda_graphs = true\ntriton = true",  # kernels for runs of operators
}


@pytest.fixture(params=list(OPTIONS))
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is computed on the device."""
    device = f'"{DEVICE}"' if DEVICE == "cpu" else DEVICE
    text = f"[provider_options.cuda]\ndevice = {device}\n{OPTIONS[request.param]}\n"
    (tmp_path / "ranvier.toml").write_text(text)
    monkeypatch.setenv("RANVIER_CONFIG", str(tmp_path / "ranvier.toml"))
    with rv.backend("cuda"):
        yield


def _moved(function: Any) -> tuple[int, int]:
    """Bytes that went in and out so far, in all sessions of a compiled function."""
    sessions = {id(c._session): c._session for kept in function._kept.values() for c in kept}
    inward = outward = 0
    for session in sessions.values():
        for count in session._moved.snapshot():
            if count.source == "cpu":
                inward += count.bytes
            else:
                outward += count.bytes
    return inward, outward


def _all_there(function: Any) -> bool:
    return all(c._on_device is not None for kept in function._kept.values() for c in kept)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(4 * 9, 5)

    def forward(self, x: Any) -> Any:
        y = nn.functional.max_pool2d(nn.functional.relu(self.norm(self.conv(x))), 2)
        return self.head(self.drop(y.reshape((x.shape[0], 36))))


def _training(algorithm: str = "adamw") -> tuple[Any, Any, Callable[..., Any]]:
    nn.manual_seed(3)
    model = _Network()
    made = {
        "sgd": lambda: optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        "adamw": lambda: optim.AdamW(model.parameters(), lr=0.01),
        "lion": lambda: optim.Lion(model.parameters(), lr=0.01),
        "adafactor": lambda: optim.Adafactor(model.parameters(), lr=0.01),
    }
    opt = made[algorithm]()

    @rv.jit
    def step(x: Any, t: Any) -> Any:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        opt.step()
        return loss

    return model, opt, step


def _batches(count: int, size: int = 8) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(11)
    return [(draw.standard_normal((size, 1, 6, 6), np.float32), draw.integers(0, 5, size)) for _ in range(count)]


def _learned(model: Any) -> dict[str, Any]:
    return {name: np.array(value.numpy()) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("algorithm", ["sgd", "adamw", "lion", "adafactor"])
def test_steps_are_those_of_the_processor(there: None, algorithm: str) -> None:
    batches = _batches(5)
    with rv.backend("cpu"):
        model, _, step = _training(algorithm)
        wanted = [step(*batch).item() for batch in batches]
        learned = _learned(model)
    model, _, step = _training(algorithm)
    losses = [step(*batch) for batch in batches]  # looked at later, when other steps have run
    assert _all_there(step)
    np.testing.assert_allclose([loss.item() for loss in losses], wanted, rtol=2e-4)
    for name, value in _learned(model).items():
        np.testing.assert_allclose(value, learned[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_states_do_not_travel(there: None) -> None:
    model, _, step = _training()
    batches = _batches(4)
    step(*batches[0])
    first = _moved(step)
    for batch in batches[1:]:
        step(*batch)
    inward, outward = (now - before for now, before in zip(_moved(step), first))
    assert inward == 3 * sum(x.nbytes for x in batches[0])
    assert outward == 3 * 4  # the loss
    assert first[0] > sum(p.nbytes for p in model.parameters())


def test_a_batch_that_cannot_have_changed_is_not_brought_again(there: None) -> None:
    _, _, step = _training()
    batch = [rv.Tensor(x) for x in _batches(1)[0]]
    step(*batch)
    first = _moved(step)
    step(*batch)
    assert _moved(step)[0] == first[0]


def test_an_array_that_has_changed_is_brought_again(there: None) -> None:
    total = State(np.zeros(3, np.float32))

    @rv.jit
    def add(x: Any) -> None:
        total.assign(total + x)

    x = np.ones(3, np.float32)
    for k in range(4):
        x[:] = k
        add(x)
    assert total.numpy().tolist() == [6, 6, 6]


def test_what_somebody_holds_stays_as_it_was(there: None) -> None:
    model, _, step = _training()
    batches = _batches(5)
    step(*batches[0])
    weight = model.head.weight
    values, grads = [], []
    for batch in batches[1:]:
        values.append((weight.value, np.array(weight.numpy())))
        grads.append((weight.grad, None))
        step(*batch)
        grads[-1] = (grads[-1][0], np.array(weight.grad.numpy()))
    for k, (value, then) in enumerate(values):
        np.testing.assert_array_equal(value.numpy(), then)
        if k:
            np.testing.assert_array_equal(grads[k][0].numpy(), grads[k - 1][1])


def test_values_that_nobody_looked_at_in_time(there: None) -> None:
    count = State(np.zeros((), np.float32))

    @rv.jit
    def step() -> None:
        count.assign(count + 1)

    seen = []
    for _ in range(4):
        step()
        seen.append(count.value)
    assert [value.item() for value in seen] == [1, 2, 3, 4]
    kept = count.value
    count.assign(10)
    step()
    assert (kept.item(), count.item()) == (4, 11)


def test_values_assigned_on_the_host_are_learned_on_from(there: None) -> None:
    batches = _batches(4)

    def run() -> list[Any]:
        model, opt, step = _training()
        found = []
        for k, batch in enumerate(batches):
            if k == 2:
                model.head.weight.assign(model.head.weight * 0.5)
                opt.param_groups[0]["lr"] = 0.002
            found.append(step(*batch).item())
        return [*found, model.head.weight.numpy()]

    with rv.backend("cpu"):
        wanted = run()
    for found, expected in zip(run(), wanted):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)


def test_a_run_goes_on_from_what_was_saved(there: None) -> None:
    batches = _batches(6)
    model, opt, step = _training()
    losses = [step(*batch).item() for batch in batches[:3]]
    saved = _learned(model), opt.state_dict(), np.array(default_generator.state.numpy())
    losses += [step(*batch).item() for batch in batches[3:]]
    other, again, go_on = _training()
    go_on(*batches[0])  # what is loaded takes the place of values that are there
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    default_generator.state.assign(saved[2])
    np.testing.assert_allclose([go_on(*batch).item() for batch in batches[3:]], losses[3:], rtol=1e-5)
    for name, value in _learned(model).items():
        np.testing.assert_allclose(_learned(other)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_functions_share_states(there: None) -> None:
    model, _, step = _training()

    @rv.jit
    def evaluate(x: Any) -> Any:
        with rv.no_grad():
            return model(x)

    def run(evaluate: Any, step: Any, model: Any) -> list[Any]:
        found = []
        for batch, other in zip(_batches(3), _batches(3, 4)):
            model.train()
            step(*batch)
            step(*other)
            model.eval()
            found.append(evaluate(batch[0]).numpy())
        return found

    found = run(evaluate, step, model)
    assert _all_there(step) and _all_there(evaluate)
    assert _moved(evaluate)[0] < 5 * _batches(1)[0][0].nbytes  # weights are there already
    with rv.backend("cpu"):
        model, _, step = _training()
        for own, wanted in zip(found, run(lambda x: model(x), step, model)):
            np.testing.assert_allclose(own, wanted, rtol=2e-3, atol=2e-3)


def test_gradients_are_added_up(there: None) -> None:
    w = Parameter(np.ones((3, 2), np.float32))

    @rv.jit
    def collect(x: Any) -> None:
        (x @ w).sum().backward()

    @rv.jit
    def apply() -> None:
        w.assign(w - w.grad)
        w.grad = None

    for k in range(2):
        for n in (1, 2, 3):
            collect(np.full((1, 3), n, np.float32))
        assert w.grad is not None and w.grad.numpy().tolist() == [[6, 6]] * 3
        apply()
        assert w.grad is None
        assert w.numpy().tolist() == [[1 - 6 * (k + 1)] * 2] * 3


def test_states_change_places(there: None) -> None:
    a, b = State(np.array([1.0, 2.0], np.float32)), State(np.array([3.0, 4.0], np.float32))

    @rv.jit
    def swap() -> Any:
        old = a.value
        a.assign(rnp.flip(b) * 1.0)
        b.assign(old + 0.0)
        return old

    for _ in range(3):
        before = a.numpy().tolist(), b.numpy().tolist()
        assert swap().tolist() == before[0]
        assert (a.numpy().tolist(), b.numpy().tolist()) == (before[1][::-1], before[0])


def test_random_keys_are_states_too(there: None) -> None:
    key = State(rnp.random.key(5))

    @rv.jit
    def draw() -> Any:
        own, rest = rnp.random.split(key.value)
        key.assign(rest)
        return rnp.random.uniform(own, (4,))

    found = [draw().numpy() for _ in range(3)]
    rest = rnp.random.key(5)
    for numbers in found:
        own, rest = rnp.random.split(rest)
        np.testing.assert_array_equal(numbers, rnp.random.uniform(own, (4,)).numpy())


def test_a_wrong_index_is_told_when_the_loss_is_read(there: None) -> None:
    table = nn.Embedding(6, 3)
    opt = optim.SGD(table.parameters(), lr=0.1)

    @rv.jit
    def step(words: Any) -> Any:
        opt.zero_grad()
        loss = (table(words) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    step(np.array([0, 5])).item()
    loss = step(np.array([0, 6]))
    with pytest.raises(InvalidValue, match="index"):
        loss.item()
    assert np.isfinite(table.weight.numpy()).all()
    assert np.isfinite(step(np.array([1, 2])).item())


def test_what_is_in_parts_still_runs(there: None) -> None:
    total = State(np.zeros(2, np.uint64))

    @rv.jit
    def halve_the_sum(x: Any) -> Any:  # whole numbers of 64 bits without a sign are not divided there
        total.assign((total + x) // 2)
        return total * 2

    for _ in range(2):
        found = halve_the_sum(np.array([8, 16], np.uint64))
    assert total.numpy().tolist() == [6, 12] and found.tolist() == [12, 24]
    assert not _all_there(halve_the_sum)
