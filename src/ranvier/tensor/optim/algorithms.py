"""Optimizers, with PyTorch's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ranvier.errors import InvalidInput
from ranvier.tensor import reductions
from ranvier.tensor.core import Tensor
from ranvier.tensor.elementwise import equal, maximum, minimum, sign, sqrt, where
from ranvier.tensor.linalg import matmul
from ranvier.tensor.manipulate import astype
from ranvier.tensor.optim.base import Optimizer
from ranvier.tensor.optim.groups import Group
from ranvier.tensor.state import Parameter, State
from ranvier.tensor.types import finfo


def _between(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise InvalidInput(f"{name} is at least 0 and below 1, not {value}")


class SGD(Optimizer):
    """Against the gradient; with momentum along a running sum of them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0.0 or dampening):
            raise InvalidInput("Nesterov's momentum needs a momentum and no dampening")
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "with_momentum": momentum != 0.0,
            },
        )

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        return {"momentum_buffer": param.shape} if group["with_momentum"] else {}

    def begin(self, group: Group) -> Any:
        return group.number("lr"), group.number("momentum"), equal(group.steps, 0.0)

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        lr, momentum, first = shared
        if group["weight_decay"]:
            grad = grad + param * group["weight_decay"]
        if group["with_momentum"]:
            by = astype(momentum, param.dtype)
            new = grad
            if group["dampening"]:
                new = where(first, grad, grad * (1.0 - group["dampening"]))
            buffer = states["momentum_buffer"] * by + new
            self.change(states["momentum_buffer"], buffer)
            grad = grad + buffer * by if group["nesterov"] else buffer
        self.change(param, param - astype(lr, param.dtype) * grad)


class Adam(Optimizer):
    """Each element by its running mean over the root of its running mean square."""

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": tuple(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
            },
        )

    def check(self, group: Group) -> None:
        super().check(group)
        for beta in group["betas"]:
            _between("a beta", beta)

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
        return dict.fromkeys(names, param.shape)

    def begin(self, group: Group) -> Any:
        """Numbers of the group, in float64: 1 - β² cannot be told from 0 for long in fewer digits."""
        step = group.steps + 1.0
        lr, (b1, b2) = group.number("lr"), group.pair("betas")
        first, second = 1.0 - b1**step, sqrt(1.0 - b2**step)
        return lr / first, second, 1.0 - b1, b2, 1.0 - b2, 1.0 - lr * group["weight_decay"]

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        size, root, new, old_sq, new_sq, kept = (astype(x, param.dtype) for x in shared)
        value: Tensor = param
        if group["weight_decay"]:
            if self._decoupled:
                value = value * kept
            else:
                grad = grad + value * group["weight_decay"]
        mean = states["exp_avg"] + (grad - states["exp_avg"]) * new
        square = states["exp_avg_sq"] * old_sq + grad * grad * new_sq
        self.change(states["exp_avg"], mean)
        self.change(states["exp_avg_sq"], square)
        if group["amsgrad"]:
            square = maximum(states["max_exp_avg_sq"], square)
            self.change(states["max_exp_avg_sq"], square)
        self.change(param, value - size * (mean / (sqrt(square) / root + group["eps"])))


class AdamW(Adam):
    """Adam with weights that shrink by themselves, apart from the gradient."""

    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


class Lion(Optimizer):
    """Steps of one size for all elements, in the direction of a running mean's sign."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay, "maximize": maximize})

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        return {"exp_avg": param.shape}

    def begin(self, group: Group) -> Any:
        return group.number("lr"), *group.pair("betas")

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        lr, b1, b2 = (astype(x, param.dtype) for x in shared)
        mean = states["exp_avg"].value
        value: Tensor = param * (1.0 - lr * group["weight_decay"]) if group["weight_decay"] else param
        self.change(param, value - lr * sign(mean + (grad - mean) * (1.0 - b1)))
        self.change(states["exp_avg"], mean + (grad - mean) * (1.0 - b2))


class RMSprop(Optimizer):
    """Each element by its gradient over the root of its running mean square."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "centered": centered,
                "maximize": maximize,
                "with_momentum": momentum != 0.0,
            },
        )

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        names = ["square_avg"]
        names += ["momentum_buffer"] if group["with_momentum"] else []
        names += ["grad_avg"] if group["centered"] else []
        return dict.fromkeys(names, param.shape)

    def begin(self, group: Group) -> Any:
        return group.number("lr"), group.number("momentum")

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        lr, momentum = (astype(x, param.dtype) for x in shared)
        alpha = group["alpha"]
        if group["weight_decay"]:
            grad = grad + param * group["weight_decay"]
        square = states["square_avg"] * alpha + grad * grad * (1.0 - alpha)
        self.change(states["square_avg"], square)
        spread = square
        if group["centered"]:
            mean = states["grad_avg"] + (grad - states["grad_avg"]) * (1.0 - alpha)
            self.change(states["grad_avg"], mean)
            spread = square - mean * mean
        moved = grad / (sqrt(spread) + group["eps"])
        if group["with_momentum"]:
            moved = states["momentum_buffer"] * momentum + moved
            self.change(states["momentum_buffer"], moved)
        self.change(param, param - lr * moved)


class Adagrad(Optimizer):
    """Each element by its gradient over the root of the sum of their squares."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        super().__init__(params, options)

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        return {"sum": param.shape}

    def begin(self, group: Group) -> Any:
        return group.number("lr") / (group.steps * group["lr_decay"] + 1.0)

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        if group["weight_decay"]:
            grad = grad + param * group["weight_decay"]
        total = states["sum"] + grad * grad
        self.change(states["sum"], total)
        self.change(param, param - astype(shared, param.dtype) * (grad / (sqrt(total) + group["eps"])))


class Adafactor(Optimizer):
    """Adam's mean squares as products of rows and columns: little memory for large matrices."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": tuple(eps),
                "d": d,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def states_of(self, group: Group, param: Parameter) -> Mapping[str, Any]:
        shape = param.shape
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def begin(self, group: Group) -> Any:
        step = group.steps + 1.0
        lr = group.number("lr")
        return step ** group["beta2_decay"], minimum(lr, 1.0 / sqrt(step)), 1.0 - lr * group["weight_decay"]

    def update(self, group: Group, shared: Any, param: Parameter, grad: Tensor, states: dict[str, State]) -> None:
        new, rate, kept = (astype(x, param.dtype) for x in shared)
        smallest, least = group["eps"]
        smallest = finfo(param.dtype).eps if smallest is None else smallest
        size = math.sqrt(param.size)
        alpha = maximum(_norm(param) / size, least) * rate
        value: Tensor = param * kept if group["weight_decay"] else param
        square = grad * grad
        if param.ndim > 1:
            rows = self._towards(states["row_var"], reductions.mean(square, axis=-1, keepdims=True), new)
            columns = self._towards(states["col_var"], reductions.mean(square, axis=-2, keepdims=True), new)
            level = maximum(reductions.mean(rows, axis=-2, keepdims=True), smallest)
            variance = matmul(rows, columns) / level
        else:
            variance = self._towards(states["variance"], square, new)
        moved = grad / sqrt(maximum(variance, smallest * smallest))
        spread = maximum(_norm(moved) / (size * group["d"]), 1.0)
        self.change(param, value - moved * (alpha / spread))

    def _towards(self, state: State, value: Tensor, share: Tensor) -> Tensor:
        found = state + (value - state) * share
        self.change(state, found)
        return found


def _norm(x: Tensor) -> Tensor:
    return sqrt(reductions.sum(x * x))


_OF_TENSORS = True
