"""What the process answers with: one table from error classes to exit codes."""

from __future__ import annotations

from ranvier import errors

OK = 0
CHECK_FAILED = 1
USAGE = 2
INVALID_MODEL = 3
INVALID_INPUT = 4
UNSUPPORTED_OP = 5
PROVIDER_UNAVAILABLE = 6
RESOURCE_LIMIT = 7
RUN_FAILED = 8
INTERRUPTED = 130  # as a shell reports a process ended by SIGINT
BROKEN_PIPE = 141  # … and by SIGPIPE

MEANING = {
    OK: "everything went well",
    CHECK_FAILED: "a check failed (inspect --check, convert --verify, bench outputs, doctor, calibrate, quantize)",
    USAGE: "wrong use of the command line, or an invalid option",
    INVALID_MODEL: "the model cannot be read or breaks a rule of its format",
    INVALID_INPUT: "an input is missing, unknown, or of the wrong type or shape",
    UNSUPPORTED_OP: "the model holds operators or features that nothing here can run",
    PROVIDER_UNAVAILABLE: "a provider that was asked for cannot be had",
    RESOURCE_LIMIT: "a limit was reached, memory ran out, or the run was cancelled",
    RUN_FAILED: "the run itself failed, or a result could not be written",
    INTERRUPTED: "interrupted",
}

_CODES: dict[type[BaseException], int] = {
    errors.InvalidConfig: USAGE,
    errors.InvalidModel: INVALID_MODEL,
    errors.InvalidGraph: INVALID_MODEL,
    errors.WeightError: INVALID_MODEL,
    errors.IntegrityError: INVALID_MODEL,
    errors.InvalidInput: INVALID_INPUT,
    errors.ShapeMismatch: INVALID_INPUT,
    errors.DTypeMismatch: INVALID_INPUT,
    errors.DeviceMismatch: INVALID_INPUT,
    errors.UnsupportedOp: UNSUPPORTED_OP,
    errors.NotSupported: UNSUPPORTED_OP,
    errors.ProviderUnavailable: PROVIDER_UNAVAILABLE,
    errors.ResourceLimit: RESOURCE_LIMIT,
    errors.OutOfMemory: RESOURCE_LIMIT,
    errors.Cancelled: RESOURCE_LIMIT,
    MemoryError: RESOURCE_LIMIT,
    errors.RanvierError: RUN_FAILED,
}


def exit_code(error: BaseException) -> int:
    """The code for an error: its own where it carries one, else that of the nearest class in the table."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), RUN_FAILED)
    # operands that do not fit each other inside the model are no fault of the inputs as given
    return RUN_FAILED if code == INVALID_INPUT and _raised_in_a_node(error) else code


def _raised_in_a_node(error: BaseException) -> bool:
    return any(note.startswith("while running") for note in getattr(error, "__notes__", ()))


def describe(error: BaseException) -> str:
    """The message with the notes that were added on its way, on one line where it was one."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    text = str(error) or type(error).__name__
    return f"{text} ({notes})" if notes else text
