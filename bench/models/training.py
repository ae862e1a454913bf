"""Networks that are trained, written once for ranvier and PyTorch: both have the same names.

``Kit`` is what they are made with. Names of parameters are the same everywhere, so that all begin with the same
numbers; ``training_tinygrad.py`` has them in tinygrad's words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
WORDS, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 256, 8, 6
LSTM_STEPS, LSTM_INPUTS, LSTM_SIZE = 50, 128, 256


@dataclass(frozen=True)
class Kit:
    """The words of a library: its modules, and axes that change places."""

    nn: Any
    swap: Callable[[Any, int, int], Any]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Kit], Any]
    batch: Callable[[np.random.Generator], tuple[Array, Array]]
    optimizer: str  # "sgd" with momentum 0.9, or "adamw"
    rate: float


def mlp(kit: Kit) -> Any:
    nn = kit.nn

    class Layers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

        def forward(self, x: Any) -> Any:
            relu = nn.functional.relu
            return self.l3(relu(self.l2(relu(self.l1(x)))))

    return Layers()


def lenet(kit: Kit) -> Any:
    nn = kit.nn

    class LeNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
            self.l1, self.l2, self.l3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

        def forward(self, x: Any) -> Any:
            f = nn.functional
            x = f.max_pool2d(f.relu(self.c1(x)), 2)
            x = f.max_pool2d(f.relu(self.c2(x)), 2).reshape((x.shape[0], 400))
            return self.l3(f.relu(self.l2(f.relu(self.l1(x)))))

    return LeNet()


def resnet18(kit: Kit) -> Any:
    nn = kit.nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
            self.c2, self.b2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
            self.way = stride != 1 or before != width
            if self.way:
                self.c3, self.b3 = nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)

        def forward(self, x: Any) -> Any:
            relu = nn.functional.relu
            y = self.b2(self.c2(relu(self.b1(self.c1(x)))))
            return relu(y + (self.b3(self.c3(x)) if self.way else x))

    class ResNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c0, self.b0 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
            plan = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
            plan += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
            self.blocks = nn.ModuleList([Block(*each) for each in plan])
            self.head = nn.Linear(512, 10)

        def forward(self, x: Any) -> Any:
            x = nn.functional.relu(self.b0(self.c0(x)))
            for block in self.blocks:
                x = block(x)
            return self.head(nn.functional.adaptive_avg_pool2d(x, 1).reshape((x.shape[0], 512)))

    return ResNet()


def transformer(kit: Kit) -> Any:
    nn = kit.nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            shape = tuple(x.shape)
            y = self.n1(x)
            parts = (shape[0], shape[1], HEADS, WIDTH // HEADS)
            q, k, v = (kit.swap(each(y).reshape(parts), 1, 2) for each in (self.q, self.k, self.v))
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(kit.swap(seen, 1, 2).reshape(shape))
            return x + self.down(nn.functional.gelu(self.up(self.n2(x))))

    class Transformer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, x: Any) -> Any:
            y = self.words(x) + self.places.weight
            for block in self.blocks:
                y = block(y)
            return self.head(self.norm(y)).reshape((x.shape[0] * x.shape[1], WORDS))

    return Transformer()


def lstm(kit: Kit) -> Any:
    nn = kit.nn

    class Reader(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(LSTM_INPUTS, LSTM_SIZE), nn.Linear(LSTM_SIZE, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(x)[0][-1])

    return Reader()


def compiled_step(case: Case) -> tuple[Any, dict[str, Array]]:
    """One step of ours as a compiled function of inputs and targets, and the weights it begins with."""
    import ranvier as rv
    from ranvier import nn, optim

    nn.manual_seed(0)
    model = case.make(Kit(nn, lambda x, a, b: rv.numpy.swapaxes(x, a, b)))
    first = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    sgd = case.optimizer == "sgd"
    parameters = model.parameters()
    opt = optim.SGD(parameters, lr=case.rate, momentum=0.9) if sgd else optim.AdamW(parameters, lr=case.rate)

    @rv.jit
    def step(x: Any, t: Any) -> Any:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        opt.step()
        return loss

    return step, first


def torch_network(case: Case, first: dict[str, Array], device: Any = "cpu") -> tuple[Any, Any]:
    """PyTorch's network with these weights, and its optimizer, the fused one."""
    import torch

    model = case.make(Kit(torch.nn, lambda x, a, b: x.transpose(a, b)))
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in first.items()})
    model.to(device)
    sgd = case.optimizer == "sgd"
    opt: Any = (
        torch.optim.SGD(model.parameters(), lr=case.rate, momentum=0.9, fused=True)
        if sgd
        else torch.optim.AdamW(model.parameters(), lr=case.rate, fused=True)
    )
    return model, opt


def _rows(draw: np.random.Generator) -> tuple[Array, Array]:
    return draw.standard_normal((128, 784), np.float32), draw.integers(0, 10, 128)


def _images(draw: np.random.Generator) -> tuple[Array, Array]:
    return draw.standard_normal((32, 3, 32, 32), np.float32), draw.integers(0, 10, 32)


def _texts(draw: np.random.Generator) -> tuple[Array, Array]:
    return draw.integers(0, WORDS, (8, LENGTH)), draw.integers(0, WORDS, 8 * LENGTH)


def _sequences(draw: np.random.Generator) -> tuple[Array, Array]:
    return draw.standard_normal((LSTM_STEPS, 32, LSTM_INPUTS), np.float32), draw.integers(0, 10, 32)


CASES = (
    Case("mlp", mlp, _rows, "adamw", 1e-3),
    Case("lenet", lenet, _images, "sgd", 1e-2),
    Case("resnet18", resnet18, _images, "sgd", 1e-2),
    Case("transformer", transformer, _texts, "adamw", 1e-3),
    Case("lstm", lstm, _sequences, "adamw", 1e-3),
)
