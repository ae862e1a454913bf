"""``ranvier demo``: the digits model of the package reads its sample pictures."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ranvier.cli.options import Setup, session_options, with_output
from ranvier.cli.render import Output, bytes_text, count_text, seconds_text
from ranvier.errors import InvalidModel
from ranvier.graph.types import TensorType
from ranvier.runtime.session import Session

if TYPE_CHECKING:
    from rich.text import Text

Array = np.ndarray[Any, Any]

_WIDTH = 80
_GAP = 1
_RUNS = 50
_SECONDS = 1.0  # at most, for the latency


@click.command()
@session_options
@with_output
def command(output: Output, setup: Setup) -> None:
    """Recognise handwritten digits with the model that comes with the package."""
    model, samples = _files()
    images, labels = samples["images"], samples["labels"]
    session = setup.open(model, output)
    inputs = _fitted(session, images)
    started = time.perf_counter()
    probabilities = _probabilities(session.run(inputs), len(labels))
    first = time.perf_counter() - started
    data = {
        "model": "digits.onnx",
        "model_bytes": len(model),
        "parameters": _parameters(session),
        "predictions": probabilities.argmax(axis=1).tolist(),
        "confidences": probabilities.max(axis=1).tolist(),
        "labels": labels.tolist(),
        "accuracy": float((probabilities.argmax(axis=1) == labels).mean()),
        "first_run_seconds": first,
        "seconds_all": _median_seconds(session, inputs),
        "seconds_one": _median_seconds(session, {name: value[:1] for name, value in inputs.items()}),
        "operators_by_provider": _operators_by_provider(session),
    }
    if output.json:
        output.emit(data)
    else:
        _show(output, data, images.reshape(len(labels), *images.shape[-2:]))


def _files() -> tuple[bytes, dict[str, Array]]:
    """The model and its samples as they lie in the package."""
    folder = resources.files("ranvier") / "models"
    try:
        with resources.as_file(folder / "digits_samples.npz") as path, np.load(path, allow_pickle=False) as file:
            samples = {name: file[name] for name in ("images", "labels")}
        return (folder / "digits.onnx").read_bytes(), samples
    except (OSError, KeyError, ValueError) as error:
        raise InvalidModel(f"the digits model is not part of this installation: {error}") from error


def _fitted(session: Session, images: Array) -> dict[str, Array]:
    """The pictures in the shape the model takes: with or without a channel, or flat."""
    ((name, kind),) = session.inputs.items()
    rank = kind.rank if isinstance(kind, TensorType) and kind.rank is not None else images.ndim
    if rank == 2:
        images = images.reshape(len(images), -1)
    elif rank == 3:
        images = images.reshape(len(images), *images.shape[-2:])
    return {name: images}


def _probabilities(outputs: dict[str, Any], count: int) -> Array:
    """One distribution a picture, from whichever output holds one score a class; logits go through a softmax."""
    scores = next(
        (x for x in outputs.values() if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.shape[:1] == (count,)),
        None,
    )
    if scores is None:
        raise InvalidModel("the digits model has no output with one row of scores a picture")
    scores = scores.reshape(count, -1).astype(np.float64)
    if scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3):
        return scores
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _median_seconds(session: Session, inputs: dict[str, Array]) -> float | None:
    """The median of up to 50 runs within a second; None where the model does not take this many pictures."""
    from ranvier.errors import ShapeMismatch

    seconds: list[float] = []
    try:
        session.run(inputs)
    except ShapeMismatch:
        return None
    end = time.perf_counter() + _SECONDS
    while len(seconds) < _RUNS and (not seconds or time.perf_counter() < end):
        started = time.perf_counter()
        session.run(inputs)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _parameters(session: Session) -> int:
    return sum(v.const.size for v in session.graph.constants.values() if v.const is not None)


def _operators_by_provider(session: Session) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for node in session.report.nodes:
        found.setdefault(node.provider, Counter())[node.op] += 1
    return {provider: dict(ops.most_common()) for provider, ops in found.items()}


# -- for people -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ink:
    """How pixels become characters on this terminal."""

    colour: bool
    blocks: bool  # can the characters of half blocks be written at all?

    @classmethod
    def of_stdout(cls, output: Output) -> _Ink:
        try:
            "▀▄█✓✗".encode(sys.stdout.encoding or "ascii")
            blocks = True
        except (UnicodeEncodeError, LookupError):
            blocks = False
        console = output.console
        colour = console.is_terminal and console.color_system is not None and not console.no_color
        return cls(blocks and colour, blocks)

    def row(self, upper: Array, lower: Array) -> Text:
        """Two rows of pixels as one row of characters, upper and lower half blocks."""
        from rich.text import Text

        if self.colour:
            parts = [("▀", f"{_grey(a)} on {_grey(b)}") for a, b in zip(upper, lower)]
            return Text.assemble(*parts)
        signs = " ▄▀█" if self.blocks else " .'#"
        return Text("".join(signs[2 * (a > 0.4) + (b > 0.4)] for a, b in zip(upper, lower)))


def _grey(brightness: float) -> str:
    level = round(24 + 231 * min(max(brightness, 0.0), 1.0))
    return f"rgb({level},{level},{level})"


def _show(output: Output, data: dict[str, Any], pictures: Array) -> None:
    ink = _Ink.of_stdout(output)
    height, width = pictures.shape[1:]
    output.heading(f"Ranvier reads {len(pictures)} handwritten digits ({width}×{height} pixels)")
    output.show(
        f"digits.onnx, {bytes_text(data['model_bytes'])}, {count_text(data['parameters'])} parameters",
        "",
    )
    column = max(width, 9)
    per_row = max(1, (_WIDTH + _GAP) // (column + _GAP))
    for start in range(0, len(pictures), per_row):
        chosen = range(start, min(start + per_row, len(pictures)))
        for y in range(0, height, 2):
            rows = [(pictures[k][y], pictures[k][y + 1] if y + 1 < height else np.zeros(width)) for k in chosen]
            output.show(_joined([ink.row(upper, lower) for upper, lower in rows], column))
        output.show(_joined([_caption(data, k, ink) for k in chosen], column), "")
    right = sum(p == label for p, label in zip(data["predictions"], data["labels"]))
    output.show(f"right    {right} of {len(pictures)}")
    output.show(f"time     {_time_text(data, len(pictures))}")
    for provider, ops in data["operators_by_provider"].items():
        listed = ", ".join(f"{op} ×{count}" if count > 1 else op for op, count in ops.items())
        output.show(f"ran on   {provider}: {listed}")


def _joined(cells: Sequence[Text], column: int) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ignore")
    for k, cell in enumerate(cells):
        if k:
            line.append(" " * _GAP)
        line.append_text(cell)
        line.append(" " * (column - cell.cell_len))
    return line


def _caption(data: dict[str, Any], k: int, ink: _Ink) -> Text:
    """``7 99% ✓``, or ``1 52% ✗7`` with the true label where it is wrong."""
    from rich.text import Text

    predicted, label = data["predictions"][k], data["labels"][k]
    tick, cross = ("✓", "✗") if ink.blocks else ("ok", "!=")
    right = predicted == label
    mark = tick if right else f"{cross}{label}"
    return Text.assemble(
        (str(predicted), "bold"), f" {data['confidences'][k]:.0%} ", (mark, "green" if right else "bold red")
    )


def _time_text(data: dict[str, Any], count: int) -> str:
    parts = []
    if data["seconds_one"] is not None:
        parts.append(f"{seconds_text(data['seconds_one'])} for one picture")
    if data["seconds_all"] is not None:
        parts.append(f"{seconds_text(data['seconds_all'])} for all {count}")
    return f"{', '.join(parts)} (medians)"
