"""The training loop against the same steps written by hand, and what it does around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidConfig, InvalidInput, OutOfMemory
from ranvier.training import Batches, EarlyStop, Stream, Trainer

Array = np.ndarray[Any, Any]


def samples(count: int = 24) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    x = random.normal(size=(count, 5)).astype(np.float32)
    return x, (x[:, :1] * 2 - x[:, 1:2] + 0.5).astype(np.float32)


def line(seed: int = 0) -> nn.Module:
    nn.manual_seed(seed)
    return nn.Linear(5, 1)


def weights(model: nn.Module) -> dict[str, Array]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def by_hand(model: nn.Module, batches: list[Any], rate: float, limit: float | None = None) -> dict[str, Array]:
    """Steps of gradient descent on the mean squared error of a linear model, in NumPy."""
    found = {n: v.astype(np.float64) for n, v in weights(model).items()}
    for x, y in batches:
        error = x @ found["weight"].T + found["bias"] - y
        grads = {"weight": 2 * error.T @ x / len(x), "bias": 2 * error.sum(0) / len(x)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        share = 1.0 if limit is None else min(1.0, limit / norm)
        for name, grad in grads.items():
            found[name] = found[name] - rate * share * grad
    return found


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_does_the_steps_of_the_optimizer(compiled: bool, clip: float | None) -> None:
    data = Batches(samples(), 8, seed=3)
    model = line()
    batches = [*data.epoch(0), *data.epoch(1)]
    wanted = by_hand(model, batches, 0.05, clip)
    trainer = Trainer(
        model,
        optim.SGD(model.parameters(), lr=0.05),
        nn.functional.mse_loss,
        clip=clip,
        compile=compiled,
        progress=False,
    )
    history = trainer.fit(data, epochs=2)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value, wanted[name], atol=1e-5)
    assert trainer.step == 6 and len(history["loss"]) == 6 and history.outcome == "finished"


def test_gathered_gradients_are_those_of_a_large_batch() -> None:
    x, y = samples(20)
    ends = []
    for size, gathered in ((4, 2), (8, 1)):
        model = line()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, nn.functional.mse_loss, accumulate=gathered, progress=False)
        trainer.fit(Batches((x[:16], y[:16]), size, shuffle=False), epochs=3)
        assert trainer.step == 6
        ends.append(weights(model))
    for name, value in ends[0].items():
        np.testing.assert_allclose(value, ends[1][name], atol=1e-6)


def test_an_epoch_that_does_not_divide_gathers_fewer() -> None:
    model = line()
    trainer = Trainer(
        model, optim.SGD(model.parameters(), lr=0.05), nn.functional.mse_loss, accumulate=2, progress=False
    )
    data = Batches(samples(12), 4, shuffle=False)
    x, y = samples(12)
    wanted = by_hand(model, [(x[:8], y[:8]), (x[8:], y[8:])], 0.05)
    trainer.fit(data, epochs=1)
    assert trainer.step == 2
    np.testing.assert_allclose(weights(model)["weight"], wanted["weight"], atol=1e-6)


def test_steps_end_it_in_the_middle_of_an_epoch() -> None:
    model = line()
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.05), nn.functional.mse_loss, progress=False)
    trainer.fit(Batches(samples(), 4), steps=8)
    assert trainer.step == 8
    with pytest.raises(InvalidConfig, match="how long"):
        trainer.fit(Batches(samples(), 4))


def test_the_end_is_kept_and_can_be_gone_on_from(tmp_path: Path) -> None:
    ends = []
    for parts in ((5,), (2, 5)):
        folder = tmp_path / str(len(parts))
        for steps in parts:
            model = line()
            trainer = Trainer(
                model, optim.SGD(model.parameters(), lr=0.05), nn.functional.mse_loss, folder=folder, progress=False
            )
            trainer.fit(Batches(samples(), 8), steps=steps, resume=True)
        ends.append(weights(model)["weight"].tobytes())
    assert ends[0] == ends[1]


def test_a_schedule_is_asked_for_each_step() -> None:
    model, rates = line(), []

    class Watch:
        def on_step(self, trainer: Trainer, step: int, values: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    optimizer = optim.SGD(model.parameters(), lr=1.0)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (k + 1))
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, schedule=schedule, progress=False)
    trainer.fit(Batches(samples(), 8), steps=4, callbacks=[Watch()])
    np.testing.assert_allclose(rates, [1, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6)


def test_averages_are_validated_with_and_weights_left_alone() -> None:
    model = line()
    first = weights(model)
    trainer = Trainer(
        model, optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, ema=0.5, progress=False, metrics=["mse"]
    )
    data = Batches(samples(), 24, shuffle=False)
    trainer.fit(data, steps=1)
    now = weights(model)
    x, y = samples()
    mean = {name: (first[name] + now[name]) / 2 for name in now}
    wanted = float(((x @ mean["weight"].T + mean["bias"] - y) ** 2).mean())
    found = trainer.evaluate(data)
    assert found["loss"] == pytest.approx(wanted, rel=1e-4) and found["mse"] == pytest.approx(wanted, rel=1e-4)
    assert all(np.array_equal(value, now[name]) for name, value in weights(model).items())


def test_it_stops_early_with_the_best_weights() -> None:
    model = line()
    seen: list[tuple[float, dict[str, Array]]] = []

    def watch(trainer: Trainer, epoch: int, values: Any) -> None:
        seen.append((values["validation_loss"], weights(model)))

    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.9), nn.functional.mse_loss, progress=False)
    data = Batches(samples(), 4)
    stop = EarlyStop(patience=3)
    history = trainer.fit(data, epochs=50, validation=data, early_stop=stop, callbacks=[watch])
    losses = [loss for loss, _ in seen]
    assert history.outcome == "stopped early" and len(losses) == losses.index(min(losses)) + 4 < 50
    best = seen[losses.index(min(losses))][1]
    assert all(np.array_equal(value, best[name]) for name, value in weights(model).items())


def test_callbacks_see_everything_and_can_stop() -> None:
    told: list[str] = []

    class Tells:
        def on_begin(self, trainer: Trainer) -> None:
            told.append("begin")

        def on_step(self, trainer: Trainer, step: int, values: Any) -> None:
            told.append(f"step {step}")
            if step == 4:
                trainer.stop("enough")

        def on_epoch(self, trainer: Trainer, epoch: int, values: Any) -> None:
            told.append(f"epoch {epoch}")

        def on_end(self, trainer: Trainer) -> None:
            told.append("end")

    model = line()
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, progress=False)
    history = trainer.fit(Batches(samples(), 8), epochs=9, callbacks=[Tells()])
    assert told == ["begin", "step 1", "step 2", "step 3", "epoch 1", "step 4", "end"]
    assert history.outcome == "enough"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_types_learn_too(precision: str) -> None:
    model = line()
    trainer = Trainer(
        model, optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, precision=precision, progress=False
    )
    history = trainer.fit(Batches(samples(), 24), steps=40)
    assert history["loss"][-1] < 0.05 < history["loss"][0]
    assert all(p.dtype is rv.DType.float32 for p in model.parameters())


def test_batches_of_any_form() -> None:
    x, y = samples()
    model = line()

    def forward(model: Any, batch: Any) -> Any:
        outputs = model(batch["x"])
        return nn.functional.mse_loss(outputs, batch["y"]), outputs, batch["y"]

    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), forward=forward, metrics=["mae"], progress=False)
    history = trainer.fit({"x": x, "y": y}, batch_size=8, epochs=30, validation=[{"x": x, "y": y}])
    assert history.last("validation_mae") < 0.1
    with pytest.raises(InvalidConfig, match="either"):
        Trainer(model, None, forward=forward, loss=nn.functional.mse_loss)
    with pytest.raises(InvalidInput, match="batch is"):
        Trainer(model, optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, progress=False).fit([x], steps=1)


def test_data_without_a_batch_is_an_error() -> None:
    model = line()
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, progress=False)
    with pytest.raises(InvalidInput, match="no batch"):
        trainer.fit(Stream(lambda epoch: []), epochs=1)


def test_a_run_leaves_its_record(tmp_path: Path) -> None:
    model = line()
    trainer = Trainer(
        model,
        optim.SGD(model.parameters(), lr=0.1),
        nn.functional.mse_loss,
        folder=tmp_path / "run",
        plot=tmp_path / "curves.svg",
        configuration={"note": "first"},
        seed=8,
        progress=False,
    )
    data = Batches(samples(), 8)
    trainer.fit(data, epochs=2, validation=data)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["seed"] == 8 and record["configuration"]["note"] == "first"
    assert record["configuration"]["optimizer"] == "SGD" and record["configuration"]["loss"] == "mse_loss"
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in lines if "validation_loss" in row] == [3, 6]
    assert "validation loss" in (tmp_path / "curves.svg").read_text()


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def trainer_of(folder: Path) -> Trainer:
        model = line()
        return Trainer(
            model,
            optim.Adam(model.parameters(), lr=0.05),
            nn.functional.mse_loss,
            folder=folder,
            checkpoint_every=2,
            progress=False,
        )

    class Interrupts:
        def on_step(self, trainer: Trainer, step: int, values: Any) -> None:
            if step == 5:
                raise KeyboardInterrupt

    data = Batches(samples(), 8)
    whole = trainer_of(tmp_path / "whole")
    whole.fit(data, epochs=3)
    broken = trainer_of(tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        broken.fit(data, epochs=3, callbacks=[Interrupts()])
    assert broken.history.outcome == "interrupted"
    again = trainer_of(tmp_path / "broken")
    again.fit(data, epochs=3, resume=True)
    assert weights(again.model)["weight"].tobytes() == weights(whole.model)["weight"].tobytes()
    assert again.history["loss"] == whole.history["loss"]


def deep() -> nn.Module:
    nn.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 2))


def test_a_limit_of_memory_is_kept_by_computing_again() -> None:
    from ranvier.tensor.training.limits import step_bytes

    random = np.random.default_rng(0)
    batch = random.normal(size=(512, 32)).astype(np.float32), random.integers(0, 2, 512)
    ends, sizes = [], []
    for limit in (None, 0.8):
        model = deep()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        bound = None if limit is None else int(sizes[0] * limit)
        trainer = Trainer(model, optimizer, nn.functional.cross_entropy, memory_limit=bound, progress=False)
        trainer.fit([batch], steps=3)
        ends.append(weights(model))
        sizes.append(step_bytes(trainer, batch))
    assert sizes[1] <= 0.8 * sizes[0]
    for name, value in ends[0].items():
        np.testing.assert_allclose(ends[1][name], value, atol=1e-5)
    model = deep()
    trainer = Trainer(
        model, optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, memory_limit="10 kB", progress=False
    )
    with pytest.raises(OutOfMemory, match="may take 10,000"):
        trainer.fit([batch], steps=1)
