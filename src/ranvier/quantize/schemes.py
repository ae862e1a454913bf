"""Schemes by name, as the command line and configuration files write them; others come by entry points."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ranvier.errors import InvalidConfig, RanvierError, nearest
from ranvier.plugged import plugged
from ranvier.quantize.base import Quantize
from ranvier.quantize.floats import Float8, Nf4
from ranvier.quantize.integers import Integers
from ranvier.quantize.ternary import Ternary

ENTRY_POINTS = "ranvier.quantization"
_OWN: dict[str, Callable[..., Quantize]] = {
    "int8": functools.partial(Integers, 8),
    "uint8": functools.partial(Integers, 8, False, signed=False),
    "int4": functools.partial(Integers, 4, granularity="group", group=32),
    "uint4": functools.partial(Integers, 4, False, "group", 32, signed=False),
    "int2": functools.partial(Integers, 2, granularity="group", group=32),
    "uint2": functools.partial(Integers, 2, False, "group", 32, signed=False),
    "fp8": Float8,
    "fp8_e4m3": Float8,
    "fp8_e5m2": functools.partial(Float8, "e5m2"),
    "nf4": Nf4,
    "ternary": Ternary,
}
_BY_SAMPLES = {"gptq": "Gptq", "awq": "Awq"}  # whose quantize takes more than an array
_added: dict[str, Callable[..., Quantize]] = {}


def register_scheme(name: str, make: Callable[..., Quantize]) -> None:
    """Add a scheme: ``make(**options)`` gives one. One of the same name is replaced."""
    if not isinstance(name, str) or not callable(make):
        raise InvalidConfig(f"a scheme has a name and a function that makes it, got {name!r} and {make!r:.200}")
    _added[name] = make


def scheme_names() -> list[str]:
    return sorted({*_OWN, *_added, *plugged(ENTRY_POINTS)})


def added_names() -> list[str]:
    """Schemes that others brought, by registering them or by entry points."""
    return sorted({*_added, *plugged(ENTRY_POINTS)})


def scheme(name: str, **options: Any) -> Quantize:
    """The scheme of this name with these options."""
    make = _maker(name)
    try:
        made = make(**options)
    except RanvierError:
        raise
    except TypeError as error:
        raise InvalidConfig(f"scheme {name!r}: {error}") from None
    except Exception as error:  # whatever those of others do
        raise InvalidConfig(f"scheme {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(made, type) or not callable(getattr(made, "quantize", None)):
        raise InvalidConfig(f"scheme {name!r} gives {made!r:.200}, which has no quantize(array)")
    return made


def takes(name: str, option: str) -> bool:
    """Whether a scheme has this option; one that does not tell has it not."""
    try:
        parameters = inspect.signature(_maker(name)).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == option or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _maker(name: str) -> Callable[..., Quantize]:
    if not isinstance(name, str):
        raise InvalidConfig(f"unknown quantization scheme {name!r}{nearest(str(name), scheme_names())}")
    make = _added.get(name) or _OWN.get(name)
    if make is None and name in plugged(ENTRY_POINTS):
        try:
            make = _added[name] = plugged(ENTRY_POINTS)[name].load()
        except Exception as error:  # whatever a package of others does when it is imported
            raise InvalidConfig(f"scheme {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if make is None and name.lower() in _BY_SAMPLES:
        own = _BY_SAMPLES[name.lower()]
        raise InvalidConfig(
            f"quantization scheme {name!r} needs samples of what a layer reads and is not had by its name: use "
            f"ranvier.quantize.{own} with InputMoments, or `ranvier quantize --scheme {name.lower()} --calib`"
        )
    if make is None:
        raise InvalidConfig(f"unknown quantization scheme {name!r}{nearest(name, scheme_names())}")
    return make
