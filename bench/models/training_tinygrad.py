"""The networks of ``training.py`` in tinygrad's words, with the same names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinygrad import Context, Tensor, TinyJit, nn

from bench.models.training import HEADS, LAYERS, LENGTH, LSTM_INPUTS, LSTM_SIZE, WIDTH, WORDS, Array, Case


class Layers:
    def __init__(self) -> None:
        self.l1, self.l2, self.l3 = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def __call__(self, x: Any) -> Any:
        return self.l3(self.l2(self.l1(x).relu()).relu())


class LeNet:
    def __init__(self) -> None:
        self.c1, self.c2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.l1, self.l2, self.l3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def __call__(self, x: Any) -> Any:
        x = self.c1(x).relu().max_pool2d((2, 2))
        x = self.c2(x).relu().max_pool2d((2, 2)).reshape(x.shape[0], 400)
        return self.l3(self.l2(self.l1(x).relu()).relu())


class Residual:
    def __init__(self, before: int, width: int, stride: int) -> None:
        self.c1, self.b1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm(width)
        self.way = stride != 1 or before != width
        if self.way:
            self.c3, self.b3 = nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm(width)

    def __call__(self, x: Any) -> Any:
        y = self.b2(self.c2(self.b1(self.c1(x)).relu()))
        return (y + (self.b3(self.c3(x)) if self.way else x)).relu()


class ResNet:
    def __init__(self) -> None:
        self.c0, self.b0 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm(64)
        plan = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        plan += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = [Residual(*each) for each in plan]
        self.head = nn.Linear(512, 10)

    def __call__(self, x: Any) -> Any:
        x = self.b0(self.c0(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Attending:
    def __init__(self) -> None:
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        y = self.n1(x)
        parts = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (each(y).reshape(parts).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = q.scaled_dot_product_attention(k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        inner = self.up(self.n2(x))
        return x + self.down(inner * 0.5 * (1 + (inner * 0.5**0.5).erf()))


class Transformer:
    def __init__(self) -> None:
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = [Attending() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def __call__(self, x: Any) -> Any:
        y = self.words(x) + self.places.weight
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y)).reshape(x.shape[0] * x.shape[1], WORDS)


class Cells:
    def __init__(self) -> None:
        self.weight_ih_l0 = Tensor.zeros(4 * LSTM_SIZE, LSTM_INPUTS)
        self.weight_hh_l0 = Tensor.zeros(4 * LSTM_SIZE, LSTM_SIZE)
        self.bias_ih_l0, self.bias_hh_l0 = Tensor.zeros(4 * LSTM_SIZE), Tensor.zeros(4 * LSTM_SIZE)

    def __call__(self, x: Any) -> Any:
        steps, batch, _ = x.shape
        h = c = Tensor.zeros(batch, LSTM_SIZE)
        inputs = x.linear(self.weight_ih_l0.T, self.bias_ih_l0 + self.bias_hh_l0)
        for t in range(steps):
            i, f, g, o = (inputs[t] + h.linear(self.weight_hh_l0.T)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class Reader:
    def __init__(self) -> None:
        self.layer, self.head = Cells(), nn.Linear(LSTM_SIZE, 10)

    def __call__(self, x: Any) -> Any:
        return self.head(self.layer(x))


_MODELS: dict[str, Callable[[], Any]] = {
    "mlp": Layers,
    "lenet": LeNet,
    "resnet18": ResNet,
    "transformer": Transformer,
    "lstm": Reader,
}


def tinygrad_steps(case: Case, x: Array, t: Array, first: dict[str, Array]) -> Callable[[], float]:
    model = _MODELS[case.name]()
    nn.state.load_state_dict(model, {name: Tensor(value.copy()) for name, value in first.items()}, verbose=False)
    parameters = nn.state.get_parameters(model)
    sgd = case.optimizer == "sgd"
    opt = (
        nn.optim.SGD(parameters, lr=case.rate, momentum=0.9)
        if sgd
        else nn.optim.AdamW(parameters, lr=case.rate, weight_decay=0.01)
    )
    given, wanted = Tensor(x).realize(), Tensor(t).realize()

    @TinyJit
    def step() -> Any:
        opt.zero_grad()
        loss = model(given).sparse_categorical_crossentropy(wanted)
        loss.backward()
        return loss.realize(*opt.schedule_step())

    def run() -> float:
        with Context(TRAINING=1):
            return float(step().item())

    return run
