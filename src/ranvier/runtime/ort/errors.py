"""ONNX Runtime's names for errors, so that ``except ort.InvalidArgument`` catches what it used to catch.

An error that leaves :class:`~ranvier.runtime.ort.inference_session.InferenceSession` is still the typed error of
:mod:`ranvier.errors`, with its message, fields and traceback; in addition it is an instance of the classes here
that ONNX Runtime would have used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ranvier import errors
from ranvier.errors import InvalidConfig, NotSupported, RanvierError

P = ParamSpec("P")
R = TypeVar("R")


class OrtError(RanvierError):
    """Root of ONNX Runtime's errors."""


class Fail(OrtError):
    """Something failed and no other class says more."""


class InvalidArgument(OrtError):
    """An input, an output name or an option does not fit the model."""


class NoSuchFile(OrtError):
    """The model file does not exist."""


class NoModel(OrtError):
    """There is no model to work with."""


class EngineError(OrtError):
    """Kept for scripts that catch it."""


class RuntimeException(OrtError):
    """A kernel failed while it ran."""


class InvalidProtobuf(OrtError):
    """The model is not a protobuf message."""


class ModelLoaded(OrtError):
    """Kept for scripts that catch it."""


class NotImplemented(OrtError):
    """No kernel, or no such feature."""


class InvalidGraph(OrtError):
    """The model breaks a rule of the standard. (:class:`ranvier.errors.InvalidGraph` is about the IR.)"""


class EPFail(OrtError):
    """An execution provider is missing or failed."""


class ModelLoadCanceled(OrtError):
    """Kept for scripts that catch it."""


class ModelRequiresCompilation(OrtError):
    """Kept for scripts that catch it."""


class NotFound(OrtError):
    """Kept for scripts that catch it."""


class DeviceReset(OrtError):
    """Kept for scripts that catch it."""


# The first row that fits decides. ONNX Runtime is not of one mind about many of these (a graph with an undefined
# name is InvalidArgument, one with an unknown operator InvalidGraph), so an error may carry several of its names.
_MEANING: tuple[tuple[type[RanvierError], tuple[type[OrtError], ...]], ...] = (
    (errors.InvalidInput, (InvalidArgument,)),
    (errors.ShapeMismatch, (InvalidArgument,)),
    (errors.DTypeMismatch, (InvalidArgument,)),
    (errors.DeviceMismatch, (InvalidArgument,)),
    (errors.InvalidConfig, (InvalidArgument,)),
    (errors.InvalidModel, (InvalidGraph, InvalidArgument, Fail)),
    (errors.UnsupportedOp, (NotImplemented, InvalidGraph, Fail)),
    (errors.NotSupported, (NotImplemented, Fail)),
    (errors.ProviderUnavailable, (EPFail, Fail)),
    (errors.KernelError, (RuntimeException, Fail)),
    (errors.OutOfMemory, (RuntimeException, Fail)),
    (errors.SessionClosed, (NoModel, Fail)),
)


_WHILE_RUNNING = (InvalidArgument, RuntimeException, Fail)  # its kernels use all three for operands that do not fit


def _meaning(error: RanvierError) -> tuple[type[OrtError], ...]:
    if isinstance(error, errors.InvalidValue | errors.ShapeMismatch | errors.DTypeMismatch) and _in_kernel(error):
        return _WHILE_RUNNING
    if isinstance(error, errors.InvalidModel):
        if isinstance(error.__cause__, FileNotFoundError):
            return (NoSuchFile, Fail)
        if type(error.__cause__).__name__ == "DecodeError":  # protobuf's, by name: no import for an error's sake
            return (InvalidProtobuf, Fail)
    return next((names for kind, names in _MEANING if isinstance(error, kind)), (Fail,))


def _in_kernel(error: RanvierError) -> bool:
    """Did a node raise it, rather than the check of the inputs? The program notes where it was then."""
    return any(note.startswith("while running") for note in getattr(error, "__notes__", ()))


_COMBINED: dict[tuple[type[RanvierError], tuple[type[Exception], ...]], type[RanvierError]] = {}
_MADE_OF: dict[type[RanvierError], tuple[type[RanvierError], tuple[type[Exception], ...]]] = {}


def _combined(ours: type[RanvierError], theirs: tuple[type[Exception], ...]) -> type[RanvierError]:
    found = _COMBINED.get((ours, theirs))
    if found is None:

        def reduce(error: RanvierError) -> tuple[Any, ...]:
            """Crosses a process as its Ranvier class: this one cannot be imported by name."""
            return ours, error.args, error.__dict__

        body = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "__reduce__": reduce}
        bases = theirs if any(issubclass(kind, ours) for kind in theirs) else (ours, *theirs)  # of all errors, the root
        found = _COMBINED.setdefault((ours, theirs), type(ours.__name__, bases, body))
        _MADE_OF[found] = ours, theirs
    return found


def adopt(error: RanvierError, *plain: type[Exception]) -> RanvierError:
    """The same error, now also of ONNX Runtime's classes for it, and of Python's own where it raises those."""
    ours, already = _MADE_OF.get(type(error), (type(error), ()))
    theirs = already if isinstance(error, OrtError) else _meaning(error)
    theirs = (*theirs, *(kind for kind in plain if not isinstance(error, kind)))
    if theirs != already:
        # the class changes, not the object: notes, cause, fields and traceback stay
        error.__class__ = _combined(ours, theirs)
    return error


def raises_ort(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a part of ONNX Runtime's interface: its errors carry ONNX Runtime's names too."""
    return _raising(function)


def raises_runtime_error(function: Callable[P, R]) -> Callable[P, R]:
    """The same for a part whose errors are Python's RuntimeError there."""
    return _raising(function, RuntimeError)


def _raising(function: Callable[P, R], *plain: type[Exception]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RanvierError as error:
            adopt(error, *plain)
            raise

    return call


class UnknownOption(InvalidConfig, AttributeError):
    """An option that is none of ``SessionOptions``, where scripts see by AttributeError what a version has."""


class Lacking(NotSupported, AttributeError):
    """A name of ONNX Runtime's interface that Ranvier does not have; ``hasattr`` sees it as absent."""


def lacking(owner: str, name: str, known: dict[str, str]) -> AttributeError:
    """The error for ``owner.name``: NotSupported with the alternative for names ONNX Runtime has."""
    if name in known:
        hint = f": {known[name]}" if known[name] else ""
        return Lacking(f"{owner}.{name} is not supported{hint}")
    return AttributeError(f"{owner!r} has no attribute {name!r}")


__all__ = [
    "DeviceReset",
    "EPFail",
    "EngineError",
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "Lacking",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelRequiresCompilation",
    "NoModel",
    "NoSuchFile",
    "NotFound",
    "NotImplemented",
    "OrtError",
    "RuntimeException",
    "UnknownOption",
    "adopt",
    "lacking",
    "raises_ort",
    "raises_runtime_error",
]
