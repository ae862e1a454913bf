"""How a model is to be quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ranvier.quantize.observers import OBSERVERS
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Names, Positive, Rule, Whole
from ranvier.runtime.quantizing.dynamic import DYNAMIC
from ranvier.runtime.quantizing.grouped import LEAST_GROUP, MOST_GROUP
from ranvier.runtime.quantizing.weight_only import SCHEMES, scheme_names

ALL_SCHEMES = ("int8", DYNAMIC, *SCHEMES)
BEST = "best"
RESTS = ("float32", "int16", "bf16")
LEVELS = {"float32": 0, "bf16": 3, "int8": 4}  # MatMulNBits' accuracy_level, by what activations are rounded to at most


def all_schemes() -> tuple[str, ...]:
    """Own ones, and those that other packages bring for weights."""
    own = ("int8", DYNAMIC)
    return *own, *(name for name in scheme_names() if name not in own)


class _Scheme(Rule):
    """Asked when it is needed: looking for other packages takes time, and they may come later."""

    def check(self, value: Any) -> Any:
        return value if value in ALL_SCHEMES else Choice(all_schemes()).check(value)


class _Cosine(Positive):
    def check(self, value: Any) -> Any:
        if value is not None and not 0 < super().check(value) <= 1:
            raise ValueError(f"must be above 0 and at most 1, or None, got {value!r}")
        return value


@dataclass(frozen=True)
class Quantization(Checked):
    """How a model is to be quantized.

    ``scheme``: "int8" codes weights and activations and needs samples, "int8_dynamic" codes activations by the range
    they have in each run; the others code weights alone.
    ``max_error``: of the results, as a part of their size; layers are left in float32 until it is kept.
    ``cosine`` (int8): between results and the original's, in place of ``max_error``; that the largest entry is the same
    nearly everywhere will do too. ``seconds``: how long ways to keep either are looked for.
    ``rest`` (int8): what becomes of what is not coded: "float32"; "int16", activations as codes of 16 bits where that
    is faster; "bf16", the precision of sessions that run the result; "best": whichever is faster on this machine.
    ``timed`` (int8): what is faster is measured on this machine, and estimated else.
    ``activations``: what may become of them, at most, where they meet weights in groups: "int8" rounds them in groups
    too, and is fastest.
    ``slower``: how many times as long as the original a run may take.
    """

    scheme: str = "int8"
    ranges: str = "minmax"  # of activations; "best": the way with the least error of results on the samples
    group: int = 32
    signed: bool = False  # activations
    fit: str = "minmax"  # of weights
    equalize: bool = True  # channels of activations, before they share a scale
    max_error: float | None = None
    cosine: float | None = None
    seconds: float = 150.0
    rest: str = "float32"
    timed: bool = False
    keep: tuple[str, ...] = ()  # patterns of names of layers that stay in float32
    slower: float = 1.0
    trials: int = 24
    bits: int = 4  # of weights by GPTQ and AWQ
    activations: str = "float32"

    RULES: ClassVar[Mapping[str, Rule]] = {
        "scheme": _Scheme(),
        "ranges": Choice((*OBSERVERS, BEST)),
        "group": Whole(LEAST_GROUP, MOST_GROUP, power_of_two=True),  # as MatMulNBits has it
        "bits": Whole(2, 8, power_of_two=True),
        "activations": Choice(tuple(LEVELS)),
        "fit": Choice(("minmax", "mse")),
        "max_error": Positive(whole=False),
        "cosine": _Cosine(whole=False),
        "seconds": Positive(whole=False),
        "rest": Choice((*RESTS, BEST)),
        "keep": Names(),
        "slower": Positive(whole=False),
        "trials": Whole(1),
    }

    @property
    def allows_words(self) -> bool:
        """Whether activations may be codes of 16 bits: on any machine, or on this one if it is faster so."""
        return self.rest == "int16" or (self.rest == BEST and self.timed)

    @property
    def level(self) -> int:
        """What MatMulNBits calls ``activations``."""
        return LEVELS[self.activations]
