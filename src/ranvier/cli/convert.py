"""``ranvier convert``: an optimized model, written as ONNX."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from ranvier.cli import exit_codes, values
from ranvier.cli.files import check_target
from ranvier.cli.inputs import InputRequest, collect
from ranvier.cli.inspect import load_graph
from ranvier.cli.options import Setup, session_options, with_output
from ranvier.cli.render import Output, bytes_text
from ranvier.errors import CannotWrite
from ranvier.formats import onnx as onnx_format
from ranvier.graph.verify import verify


@click.command()
@click.argument("model", type=click.Path(), metavar="IN")
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="The file to write.")
@click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Weights in a file of their own beside the model.  [default: only when they are large]",
)
@click.option(
    "--verify", "verified", is_flag=True, help="Run both models on random inputs and compare; write if equal."
)
@click.option("--tolerance", type=float, default=1e-4, show_default=True, help="Largest relative difference allowed.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
@session_options
@with_output
def command(
    output: Output,
    model: str,
    target: Path,
    external_data: bool | None,
    verified: bool,
    tolerance: float,
    force: bool,
    setup: Setup,
) -> None:
    """Optimize the ONNX model IN and write it as ONNX.

    The file appears complete or not at all. With --verify it appears only when both models agree.
    """
    weights = target.with_name(f"{target.name}.data")
    for path in (target, weights) if external_data is not False else (target,):
        check_target(path, force)
    config = setup.config()
    with output.busy("optimizing"):
        before = len(load_graph(model, config, optimized=False))
        graph = load_graph(model, config, optimized=True)
        verify(graph)
    found: dict[str, float] = {}
    with _beside(target) as folder:
        written = Path(folder) / target.name
        onnx_format.save(graph, written, external_data=external_data)
        if verified:
            with output.busy("comparing"):
                found = compare(model, str(written), setup)
        agrees = all(gap <= tolerance for gap in found.values())
        files = _publish(Path(folder), target.parent) if agrees else []
    data = {
        "model": model,
        "target": str(target),
        "level": config.optimization,
        "nodes_before": before,
        "nodes_after": len(graph),
        "files": {str(path): path.stat().st_size for path in files},
        "verified": agrees if verified else None,
        "differences": found,
    }
    _show(output, data)
    if not agrees:
        raise SystemExit(exit_codes.CHECK_FAILED)


def _beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the same disk as the target, so that moving files there is one step."""
    try:
        return tempfile.TemporaryDirectory(dir=target.parent, prefix=".ranvier-")
    except OSError as error:
        raise CannotWrite(f"cannot write to {str(target.parent)!r}: {error.strerror or error}") from error


def _publish(folder: Path, parent: Path) -> list[Path]:
    """Move what was written to its place, weights before the model that names them."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda p: not p.name.endswith(".data")):
        try:
            os.replace(path, parent / path.name)
        except OSError:  # another disk after all, or a folder in the way
            shutil.move(path, parent / path.name)
        found.append(parent / path.name)
    return found


def compare(model: str, other: str, setup: Setup) -> dict[str, float]:
    """The relative difference of every output of two models on the same random inputs; the first runs unoptimized."""
    from ranvier.runtime.session import Session

    config = setup.config().updated(optimization="none")
    with Session(model, config) as expected, Session(other, config) as actual:
        collected = collect(expected.graph, InputRequest(), setup.dims(expected.graph))
        wanted = expected.run(collected.values)
        got = actual.run(collected.values)
        return values.differences(got, wanted, expected.output_names)


def _show(output: Output, data: dict[str, Any]) -> None:
    if output.json:
        output.emit(data)
        return
    output.show(f"{data['nodes_before']} nodes → {data['nodes_after']} ({data['level']})")
    for path, size in data["files"].items():
        output.show(f"wrote {path}  {bytes_text(size)}")
    if data["verified"] is None:
        return
    worst = max(data["differences"].values(), default=0.0)
    if data["verified"]:
        output.show(f"verified: both models agree, largest relative difference {worst:.2g}")
        return
    for name, gap in data["differences"].items():
        output.show(f"output {name!r} differs by {gap:.3g}")
    click.echo(f"error: the converted model gives other results; {data['target']} was not written", err=True)
