"""Activations that exporters spell out: GELU, Swish, HardSwish, Mish, Softplus, LeakyRelu, and the SwiGLU gate."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ranvier.config import Level
from ranvier.graph.ir import Value
from ranvier.graph.patterns import Match, PatternOps, Rule
from ranvier.graph.rewrite import GraphOps
from ranvier.passes.base import RulePass
from ranvier.passes.facts import dtype_of, same_shape
from ranvier.passes.fuse.proofs import elementwise_reason


class ActivationRule(Rule):
    """A function of the variable ``x`` alone, made of elementwise operators and scalar constants."""

    def check(self, match: Match) -> str | None:
        return elementwise_reason(match, match["x"])


# -- GELU -----------------------------------------------------------------------------------------------------------


def _half_gated(op: PatternOps, x: Any, curve: Any) -> list[Any]:
    """Every order in which exporters multiply ``x``, one half and ``1 + curve``."""
    gate = op.Add(curve, 1.0)
    return [
        op.Mul(op.Mul(x, gate), 0.5),
        op.Mul(op.Mul(x, 0.5), gate),
        op.Mul(x, op.Mul(gate, 0.5)),
        op.Mul(x, op.Add(op.Mul(curve, 0.5), 0.5)),
    ]


class FuseGelu(ActivationRule):
    """x / 2 · (1 + erf(x / √2))"""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        return _half_gated(op, x, op.Erf(op.one_of(op.Div(x, math.sqrt(2)), op.Mul(x, math.sqrt(0.5)))))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Gelu(match["x"])


class FuseTanhGelu(ActivationRule):
    """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))"""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        near, slope = 0.044715, math.sqrt(2 / math.pi)
        square = op.one_of(op.Mul(x, x), op.Pow(x, 2.0))
        bent = op.one_of(op.Mul(square, near), op.Mul(x, op.Mul(x, near)))  # 0.044715 x²
        cubic = op.one_of(
            op.Mul(op.Pow(x, 3.0), near),
            op.Mul(op.Mul(x, square), near),
            op.Mul(op.Mul(x, near), square),
            op.Mul(x, bent),
        )
        argument = op.one_of(
            op.Mul(op.Add(x, cubic), slope),
            op.Mul(op.Mul(x, slope), op.Add(bent, 1.0)),
            op.Mul(x, op.Mul(op.Add(bent, 1.0), slope)),
            op.Mul(op.Mul(x, op.Add(bent, 1.0)), slope),
        )
        return _half_gated(op, x, op.Tanh(argument))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Gelu(match["x"], approximate="tanh")


# -- Swish and its relatives ----------------------------------------------------------------------------------------


class FuseSwish(ActivationRule):
    """x · sigmoid(αx); SiLU is the case α = 1"""

    def pattern(self, op: PatternOps, x: Any, alpha: Any) -> Any:
        return [
            op.Mul(x, op.Sigmoid(x)),
            op.Mul(x, op.Sigmoid(op.Mul(x, alpha))),
            op.Div(x, op.Add(op.Exp(op.Neg(x)), 1.0)),
        ]

    def check(self, match: Match) -> str | None:
        if match.get("alpha") is not None and match.scalar("alpha") is None:
            return "alpha is not one constant number"
        return super().check(match)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        alpha = match.scalar("alpha")
        return op.Swish(match["x"]) if alpha in (None, 1.0) else op.Swish(match["x"], alpha=alpha)


class FuseSwiGLU(Rule):
    """swish(gate) · linear"""

    def pattern(self, op: PatternOps, gate: Any, linear: Any) -> Any:
        return op.Mul(op.Swish(gate, _label="swish"), linear)

    def check(self, match: Match) -> str | None:
        gate, linear = match["gate"], match["linear"]
        if dtype_of(gate) is None or dtype_of(gate) is not dtype_of(linear):
            return "gate and linear part are not known to be of one type"
        return None if same_shape(gate, linear) else "gate and linear part are not known to be of one shape"

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.SwiGLU(match["gate"], match["linear"], **match.node("swish").attrs)


def _clipped_to_six(op: PatternOps, x: Any) -> Any:
    shifted = op.Add(x, 3.0)
    return op.one_of(
        op.Clip(shifted, 0.0, 6.0),
        op.Min(op.Max(shifted, 0.0), 6.0),
        op.Min(op.Relu(shifted), 6.0),
    )


class FuseHardSigmoid(ActivationRule):
    """clip(x + 3, 0, 6) / 6"""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        clipped = _clipped_to_six(op, x)
        return [op.Div(clipped, 6.0), op.Mul(clipped, 1 / 6)]

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.HardSigmoid(match["x"], alpha=1 / 6, beta=0.5)


class FuseHardSwish(ActivationRule):
    """x · clip(x + 3, 0, 6) / 6"""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        weighted = op.Mul(x, _clipped_to_six(op, x))
        return [
            op.Mul(x, op.HardSigmoid(x, _label="gate")),
            op.Div(weighted, 6.0),
            op.Mul(weighted, 1 / 6),
        ]

    def check(self, match: Match) -> str | None:
        gate = match.labels.get("gate")
        if gate is not None:
            alpha, beta = gate.attrs.get("alpha", 0.2), gate.attrs.get("beta", 0.5)
            if not (math.isclose(alpha, 1 / 6, rel_tol=1e-5) and math.isclose(beta, 0.5, rel_tol=1e-5)):
                return f"HardSigmoid has alpha {alpha:g} and beta {beta:g}, not 1/6 and 1/2"
        return super().check(match)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.HardSwish(match["x"])


class FuseSoftplus(ActivationRule):
    """log(1 + eˣ). The operator does not overflow where the exponential does; below that the two agree."""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        return op.Log(op.Add(op.Exp(x), 1.0))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Softplus(match["x"])


class FuseMish(ActivationRule):
    """x · tanh(softplus(x))"""

    def pattern(self, op: PatternOps, x: Any) -> Any:
        return op.Mul(x, op.Tanh(op.Softplus(x)))

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.Mish(match["x"])


# -- exact ----------------------------------------------------------------------------------------------------------


class FuseLeakyRelu(ActivationRule):
    """max(x, αx) for 0 < α < 1, and the same by a comparison with zero for any positive α"""

    def pattern(self, op: PatternOps, x: Any, alpha: Any) -> Any:
        scaled = op.Mul(x, alpha)
        return [
            op.Max(x, scaled, _label="max"),
            op.Where(op.Greater(x, 0.0), x, scaled),
            op.Where(op.GreaterOrEqual(x, 0.0), x, scaled),
            op.Where(op.Less(x, 0.0), scaled, x),
        ]

    def check(self, match: Match) -> str | None:
        alpha = match.scalar("alpha")
        if alpha is None:
            return "alpha is not one constant number"
        if not 0 < alpha < (1 if "max" in match.labels else math.inf):
            return f"alpha {alpha:g} is not between 0 and 1" if "max" in match.labels else "alpha is not positive"
        if alpha != np.float32(alpha):
            return "alpha has more digits than an attribute can hold"
        return super().check(match)

    def rewrite(self, op: GraphOps, match: Match) -> Value:
        return op.LeakyRelu(match["x"], alpha=match.scalar("alpha"))


class ExactActivationFusion(RulePass):
    """Activations whose fused form gives the same bits."""

    name: ClassVar[str] = "fuse_exact_activations"
    level: ClassVar[Level] = "basic"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (FuseLeakyRelu,)


class ActivationFusion(RulePass):
    """Activations whose fused form rounds differently."""

    name: ClassVar[str] = "fuse_activations"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types", "modern"})
    rules = (
        FuseGelu,
        FuseTanhGelu,
        FuseSwish,
        FuseSwiGLU,
        FuseHardSigmoid,
        FuseHardSwish,
        FuseSoftplus,
        FuseMish,
    )


class HardActivationFusion(RulePass):
    """Of these, those that files of any operator set since 14 have, for graphs that are about to be files."""

    name: ClassVar[str] = "fuse_hard_activations"
    level: ClassVar[Level] = "aggressive"
    requires: ClassVar[frozenset[str]] = frozenset({"types"})
    rules = (FuseHardSigmoid, FuseHardSwish)
