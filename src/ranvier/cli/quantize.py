"""``ranvier quantize``: a model in fewer bits that other tools read, and what that did to it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ranvier.cli import exit_codes
from ranvier.cli.files import check_target
from ranvier.cli.options import with_output
from ranvier.cli.render import Output, bytes_text, facts, seconds_text, table
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, nearest
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.quantize import already
from ranvier.runtime.quantizing import (
    NotWorthIt,
    Quantization,
    QuantizationReport,
    Quantizer,
    feeds_of,
    prepared,
    read_samples,
)
from ranvier.runtime.quantizing.dynamic import DYNAMIC
from ranvier.runtime.quantizing.options import LEVELS, RESTS, all_schemes
from ranvier.runtime.quantizing.weight_only import CALIBRATED

if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:  # click before 8.2 has one that is not generic
    _Choice = click.Choice

_MOST_ROWS = 40
_COSINE = 0.999  # of results in 8 bits, unless asked otherwise
_INT8_ALONE = ("ranges", "signed", "rest", "timed", "seconds")
_WEIGHTS_ALONE = ("group", "bits", "activations")
_FLOAT8 = ("fp8", "fp8_e5m2")
_SAMPLES, _CALIBRATION = 16, 128  # runs at most: each trial of a search runs all, what looks at inputs does so once
_NEARNESS = ("cosine", "max_error")
_OF_RUNS = ("samples", "slower", "threads")  # runs are of samples


class _Named(_Choice):
    """A choice that says which name was meant, where one is near."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            hint = nearest(str(value), self.choices)
            meant = hint if "did you mean" in hint else ""
            raise click.BadParameter(f"{error.message.rstrip('.')}{meant}.", ctx, param) from None


@click.command()
@click.argument("model", type=click.Path(), metavar="IN")
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option(
    "--scheme",
    type=_Named(all_schemes(), case_sensitive=False),
    default="int8",
    show_default=True,
    help="int8 codes weights and activations by ranges of samples (as QuantizeLinear and DequantizeLinear), "
    "int8_dynamic activations by the range they have in each run (as MatMulInteger and ConvInteger); the others code "
    "weights of products and of experts alone (as MatMulNBits, QMoE, MatMulBnb4 or float8). Packages bring others by "
    "the entry points ranvier.quantization.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    help="Samples of the inputs: an .npz with an array for each, many samples along the first axis.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    show_default=f"{_SAMPLES}, {_CALIBRATION} with {' and '.join(CALIBRATED)}",
    help="Runs of the model to look at, at most.",
)
@click.option(
    "--ranges",
    type=_Named(["minmax", "percentile", "mse", "entropy", "best"]),
    default="best",
    show_default=True,
    help="How ranges of activations are found; best tries all and takes what results are nearest with (int8).",
)
@click.option(
    "--group",
    type=int,
    default=32,
    show_default=True,
    help="Weights that share a scale, a power of two from 16 to 256 (weights alone); of experts one that divides their "
    "sizes.",
)
@click.option(
    "--bits",
    type=click.Choice(["2", "4", "8"]),
    default="4",
    show_default=True,
    help="Of weights (gptq, awq); other schemes have theirs in their names.",
)
@click.option(
    "--activations",
    type=click.Choice(list(LEVELS)),
    default="float32",
    show_default=True,
    help="What they may be rounded to, at most, where they meet weights in groups; int8 rounds them in groups too, and "
    "is fastest (weights alone).",
)
@click.option("--signed", is_flag=True, help="Activations as signed codes, symmetric (int8).")
@click.option(
    "--cosine",
    type=float,
    help="Leave layers in float32 until results are as near as this or, with int8, their largest entry is nearly "
    "always the same; 0 codes every layer.  [default: 0.999 with int8, else 0]",
)
@click.option(
    "--max-error", type=float, help="Leave layers in float32 until results are off by at most this part, instead."
)
@click.option(
    "--seconds",
    type=float,
    default=150.0,
    show_default=True,
    help="About how long ways to keep that are looked for, at most (int8).",
)
@click.option(
    "--rest",
    type=click.Choice([*RESTS, "best"]),
    default="float32",
    show_default=True,
    help="What becomes of what is not coded: int16 gives layers 16-bit activations where that is faster, bf16 is the "
    "precision of the sessions that will run the result; best takes the fastest on this machine that results allow, if "
    "need be with nodes in float32, and no codes where bf16 alone is fastest (int8).",
)
@click.option(
    "--timed/--not-timed",
    default=True,
    show_default=True,
    help="Compare models in time on this machine, and leave out codes that save none (int8 with --cosine or "
    "--max-error).",
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="Layers to leave in float32, by name.")
@click.option("--slower", type=float, default=1.0, show_default=True, help="How many times as long a run may take.")
@click.option("--threads", type=int, help="Threads to measure with.")
@click.option("--force", is_flag=True, help="Write the model even if it is worse than asked; overwrite what is there.")
@with_output
@click.pass_context
def command(
    context: click.Context,
    output: Output,
    model: str,
    target: Path,
    scheme: str,
    calib: Path | None,
    samples: int | None,
    ranges: str,
    group: int,
    bits: str,
    activations: str,
    signed: bool,
    cosine: float | None,
    max_error: float | None,
    seconds: float,
    rest: str,
    timed: bool,
    keep: tuple[str, ...],
    slower: float,
    threads: int | None,
    force: bool,
) -> None:
    """Quantize the ONNX model IN, and report error, size and speed.

    A result that is slower than the original, or further from it than was asked, is not written unless forced.
    """
    check_target(target, force)
    _check_data(Path(model), target)
    _check_options(context, scheme, calib is not None)
    if cosine and max_error is not None:
        raise click.UsageError("--cosine and --max-error are two ways to say how near results stay; give one of them")
    if scheme == "int8" and cosine is None:
        cosine = _COSINE
    given: dict[str, Any] = {} if threads is None else {"threads": threads}
    config = SessionConfig.default(**given)
    near = {"cosine": cosine or None, "max_error": max_error, "seconds": seconds, "rest": rest, "timed": timed}
    alone = {"bits": int(bits), "activations": activations}
    options = Quantization(scheme, ranges, group, signed, keep=keep, slower=slower, **near, **alone)  # type: ignore[arg-type]
    graph = prepared(model, config)
    most = samples or (_CALIBRATION if scheme in CALIBRATED else _SAMPLES)
    feeds = [] if calib is None else feeds_of(graph, read_samples(calib), most)
    problem = False
    with _bar(output, seconds) as (told, stepped):
        try:
            with _saying_so_where_quantized(graph):
                quantizer = Quantizer(graph, feeds, options, config, told, stepped)
            made, report = quantizer.run(force=force)
            onnx_format.save(made, target)
        except NotWorthIt as refused:
            report, problem = refused.report, True
    data = {"model": model, "target": None if problem else str(target), **report.as_dict()}
    if output.json:
        output.emit(data)
    else:
        _show(output, report, None if problem else target)
    if problem:
        click.echo("not written: " + "; ".join(report.problems) + " (--force writes it anyway)", err=True)
        raise click.exceptions.Exit(exit_codes.CHECK_FAILED)


def _check_data(model: Path, target: Path) -> None:
    """What is written may take the place of the model, but not of data that a model has in files beside it."""
    from ranvier.weights.blob import MemoryBlob  # only here
    from ranvier.weights.formats.onnx_files import external_files

    if not model.is_file():  # as reading it will say
        return
    read = {(model.parent / name).resolve() for name in external_files(MemoryBlob.of_file(model))}
    beside = target.with_name(f"{target.name}.data")  # where large weights go
    if target.resolve() in read or (beside.resolve() in read and target.resolve() != model.resolve()):
        taken = target if target.resolve() in read else beside
        raise click.UsageError(f"{str(taken)!r} holds data of {str(model)!r}; -o needs another name")


def _check_options(context: click.Context, scheme: str, sampled: bool) -> None:
    """What was asked for and would do nothing is a mistake."""

    def asked(names: Sequence[str]) -> str | None:
        given = (n for n in names if context.get_parameter_source(n) is ParameterSource.COMMANDLINE)
        return next((f"--{name.replace('_', '-')}" for name in given), None)

    if option := asked(_idle(scheme)):
        raise click.UsageError(f"{option} does nothing with --scheme {scheme}")
    if not sampled and (scheme == "int8" or scheme in CALIBRATED):
        hint = f" ({DYNAMIC} needs none)" if scheme == "int8" else ""
        raise click.UsageError(f"--scheme {scheme} needs --calib: it looks at samples of the inputs{hint}")
    if not sampled and (option := asked(_OF_RUNS)):
        raise click.UsageError(f"{option} does nothing without --calib: only samples are run")
    if not sampled and (option := asked(_NEARNESS)):
        raise click.UsageError(f"{option} needs --calib: how near results stay is seen on samples")


def _idle(scheme: str) -> list[str]:
    """Options that do nothing with a scheme."""
    idle = [] if scheme == "int8" else [*_INT8_ALONE]
    if scheme in ("int8", DYNAMIC):
        return [*idle, *_WEIGHTS_ALONE]
    if scheme in _FLOAT8:  # a scale for each channel
        idle.append("group")
    if scheme in (*_FLOAT8, "nf4"):  # operators that take activations as they are
        idle.append("activations")
    return idle if scheme in CALIBRATED else [*idle, "bits"]


@contextlib.contextmanager
def _saying_so_where_quantized(graph: Graph) -> Iterator[None]:
    """A model that nothing is to be done with may have been through this, or through another tool, before."""
    try:
        yield
    except InvalidConfig as error:
        if found := already.told(graph):
            error.add_note(found)
        raise


@contextlib.contextmanager
def _bar(output: Output, seconds: float) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """What is being done, how much of it is, and how much of the time is left, as a bar on a terminal and as notes
    elsewhere."""
    if output.preset == "quiet" or not sys.stderr.isatty():
        yield output.note, lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    left = TextColumn("{task.fields[left]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    until = time.monotonic() + seconds

    def time_left() -> str:
        return f"about {max(0.0, until - time.monotonic()):.0f} s left at most"

    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("quantizing", total=None, left="")
        yield (
            lambda text: bar.update(task, description=text, total=None, completed=0, left=time_left()),
            lambda done, of: bar.update(task, completed=done, total=of, left=time_left()),
        )


def _show(output: Output, report: QuantizationReport, target: Path | None) -> None:
    coded = [layer for layer in report.layers if layer.scheme != "float32"]
    lines: list[tuple[str, Any]] = [
        ("scheme", report.scheme),
        ("layers", f"{len(coded)} of {len(report.layers)}"),
        ("weights", f"{bytes_text(report.bytes_before)} to {bytes_text(report.bytes_after)}"),
    ]
    if report.samples:
        found = report.difference
        agreement = "" if found.agreement is None else f", largest entry the same in {found.agreement:.1%}"
        times = f"{seconds_text(report.seconds_before)} to {seconds_text(report.seconds_after)}"
        if report.scheme == "int8" or report.scheme in CALIBRATED:
            held = "none held back, so results are of what it was made by"
            lines.append(("samples", f"{report.samples}, {f'{report.held} held back' if report.held else held}"))
        of = f"of {report.layer_samples} sample{'s' if report.layer_samples != 1 else ''}"
        lines.append(("errors of layers", of + (", held back" if report.held else "")))
        lines += [
            ("results", f"off by {found.error:.3g} of their size, cosine {found.cosine:.6f}{agreement}"),
            ("one run", f"{times} ({report.speedup:.2f} times as fast)"),
        ]
    else:
        lines.append(("results", "not compared: no samples were given (--calib)"))
    if report.precision != "float32":
        kept = f", keep_f32 {', '.join(report.keep_f32)}" if report.keep_f32 else ""
        lines.append(("to be run with", f"precision {report.precision}{kept}"))
    if target is not None:
        lines.append(("written", str(target)))
        lines += [("worse than asked", problem) for problem in report.problems]
    output.show(facts(lines))
    rows = [
        (
            layer.name,
            layer.op,
            layer.scheme + (f" ({layer.reason})" if layer.reason else ""),
            "" if layer.error is None else f"{layer.error:.3g}",
            f"{bytes_text(layer.bytes_before)} to {bytes_text(layer.bytes_after)}",
        )
        for layer in sorted(report.layers, key=lambda layer: -(layer.error or 0.0))[:_MOST_ROWS]
    ]
    output.show("", table(["!layer", "!operator", "!scheme", ">error", ">weights"], rows))
    if len(report.layers) > len(rows):
        output.show(f"and {len(report.layers) - len(rows)} more, which are off by less (--json has all)")
