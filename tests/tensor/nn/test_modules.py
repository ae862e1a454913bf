"""Modules: what is inside them under which names, how they are saved, and how they print."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import ranvier as rv
from ranvier import nn, optim
from ranvier.errors import InvalidInput, ShapeMismatch
from ranvier.numpy import random


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.gain = nn.Parameter(np.ones(4, np.float32))
        self.register_buffer("seen", np.zeros((), np.int64))
        self.register_buffer("scratch", np.zeros(2, np.float32), persistent=False)

    def forward(self, x: rv.Tensor) -> rv.Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x * self.gain


NAMES = ["gain", "first.weight", "first.bias", "rest.0.weight", "rest.0.bias"]


def test_what_takes_another_ones_name_takes_its_place() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model.add_module("0", nn.Linear(3, 4, bias=False))
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "2.weight", "2.bias"]
    assert model(rv.Tensor(np.ones((1, 3), np.float32))).shape == (1, 2)
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(np.zeros((4, 3), np.float32))
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_names_of_parameters_buffers_and_modules() -> None:
    model = Small()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert [name for name, _ in model.named_buffers()] == ["seen", "scratch"]
    assert [name for name, _ in model.named_modules()] == ["", "first", "rest", "rest.0", "rest.1"]
    assert [name for name, _ in model.named_children()] == ["first", "rest"]
    assert model.get_submodule("rest.0") is model.rest[0]
    assert list(model.state_dict()) == ["gain", "seen", *NAMES[1:]]


def test_a_parameter_in_two_places_comes_once_and_is_saved_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert len(list(model.parameters())) == 3
    assert "1.weight" in model.state_dict()


def test_values_are_saved_and_loaded() -> None:
    one, other = Small(), Small()
    x = rv.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert not np.array_equal(one(x).numpy(), other(x).numpy())
    saved = one.state_dict()
    assert other.load_state_dict(saved) == ([], [])
    np.testing.assert_array_equal(one(x).numpy(), other(x).numpy())
    one.gain.assign(one.gain * 2)
    np.testing.assert_array_equal(saved["gain"].numpy(), np.ones(4))  # what was saved stays


def test_values_that_do_not_fit_change_nothing() -> None:
    model = Small()
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    good = {name: value + 1 for name, value in before.items()}
    with pytest.raises(InvalidInput, match=r"without a value: gain.*not known here: extra"):
        model.load_state_dict({**{k: v for k, v in good.items() if k != "gain"}, "extra": np.zeros(1)})
    with pytest.raises(ShapeMismatch, match=r"rest\.0\.bias"):
        model.load_state_dict(good | {"rest.0.bias": np.zeros(5, np.float32)})
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name])
    found = model.load_state_dict({"gain": np.full(4, 3.0), "extra": np.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["extra"] and found.missing_keys == ["seen", *NAMES[1:]]
    assert model.gain.dtype is rv.DType.float32 and float(model.gain[0]) == 3.0


def test_modes_reach_every_module() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Sequential(nn.Dropout(0.9)))
    x = rv.Tensor(np.ones((4, 50), np.float32))
    assert model.eval() is model and not model[1][0].training
    np.testing.assert_array_equal(model(x).numpy(), np.ones((4, 50)))
    assert model.train()[1][0].training and (model(x).numpy() == 0).any()


def test_apply_to_and_freezing() -> None:
    model, seen = Small(), []
    model.apply(lambda module: seen.append(type(module).__name__))
    assert seen == ["Linear", "Linear", "ReLU", "ModuleList", "Small"]
    model.to("float64")
    assert {p.dtype.name for p in model.parameters()} == {"float64"} and model.seen.dtype.name == "int64"
    assert model(rv.Tensor(np.ones((1, 3)))).dtype.name == "float64"
    model.requires_grad_(False)
    model.gain.requires_grad = True
    model(rv.Tensor(np.ones((1, 3)))).sum().backward()
    assert model.gain.grad is not None and model.first.weight.grad is None
    model.zero_grad()
    assert model.gain.grad is None


def test_copies_are_of_their_own() -> None:
    model = Small()
    x = rv.Tensor(np.ones((2, 3), np.float32))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(made(x).numpy(), model(x).numpy())
        made.gain.assign(made.gain * 2)
        assert float(model.gain[0]) == 1.0
        made(x).sum().backward()
        assert made.gain.grad is not None and model.gain.grad is None


def test_containers() -> None:
    layers = nn.Sequential({"one": nn.Linear(2, 3), "two": nn.ReLU()})
    assert [name for name, _ in layers.named_children()] == ["one", "two"]
    assert isinstance(layers[-1], nn.ReLU) and len(layers[:1]) == 1
    several = nn.ModuleDict({"a": nn.Linear(2, 2)})
    several["b"] = nn.ReLU()
    assert list(several) == ["a", "b"] and "b" in several and len(list(several.parameters())) == 2
    listed = nn.ModuleList([nn.ReLU()])
    listed.insert(0, nn.Tanh())
    listed.append(nn.Identity())
    assert [type(m).__name__ for m in listed] == ["Tanh", "ReLU", "Identity"]
    with pytest.raises(IndexError):
        listed[3]
    assert len(list(nn.ParameterList([np.ones(2, np.float32)]).parameters())) == 1


def test_mistakes_are_named() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.ReLU()

    with pytest.raises(InvalidInput, match="before it calls super"):
        Early()
    model = Small()
    with pytest.raises(InvalidInput, match="assign"):
        model.gain = np.ones(4)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = model.other
    with pytest.raises(InvalidInput, match="no forward"):
        nn.Module()()
    with pytest.raises(TypeError, match="no argument 'slope'"):
        nn.LeakyReLU(slope=0.1)


def test_models_print_as_what_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Sequential(nn.LeakyReLU(0.2), nn.Conv1d(4, 4, 3, padding=1)))
    assert repr(model) == (
        "Sequential(\n"
        "  (0): Linear(in_features=3, out_features=4, bias=False)\n"
        "  (1): Sequential(\n"
        "    (0): LeakyReLU(negative_slope=0.2)\n"
        "    (1): Conv1d(4, 4, kernel_size=(3,), stride=(1,), padding=(1,))\n"
        "  )\n"
        ")"
    )


def test_first_values_follow_from_keys() -> None:
    one, other = (nn.Linear(5, 6, key=random.key(3)) for _ in range(2))
    np.testing.assert_array_equal(one.weight.numpy(), other.weight.numpy())
    assert not np.array_equal(nn.Linear(5, 6, key=random.key(4)).weight.numpy(), one.weight.numpy())
    nn.manual_seed(7)
    first = [nn.Linear(5, 6).weight.numpy() for _ in range(2)]
    nn.manual_seed(7)
    again = [nn.Linear(5, 6).weight.numpy() for _ in range(2)]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])


def _learned(device: str, compiled: bool) -> float:
    """The loss of a model after some steps on a device."""
    nn.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    model.to_device(device)
    opt, scaler = optim.AdamW(model.parameters(), lr=0.1), optim.GradScaler(device=device)
    ema = optim.EMA(model.parameters(), warmup=True)

    def step(x: rv.Tensor) -> rv.Tensor:
        opt.zero_grad()
        loss = (model(x) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        ema.update()
        return loss

    run = rv.jit(step) if compiled else step
    x = rv.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) % 5).to_device(device)
    for _ in range(3):
        loss = run(x)
        opt.param_groups[0]["lr"] = 0.05
    assert str(model[0].weight.device) == device and str(loss.device) == device
    return float(loss)


@pytest.mark.parametrize("compiled", [False, True])
def test_models_learn_on_another_device(compiled: bool) -> None:
    try:
        there = _learned("sim:0", compiled)
    finally:
        nn.default_generator.to_device("cpu")
    np.testing.assert_allclose(there, _learned("cpu", False), rtol=1e-4)
