"""``ranvier calibrate``: what nodes, launches and transfers take on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from ranvier.cli import exit_codes
from ranvier.cli.options import Sources, source_options, with_output
from ranvier.cli.render import Output, seconds_text, table
from ranvier.errors import RanvierError
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.calibration import store
from ranvier.runtime.calibration.classes import BY_ARITHMETIC
from ranvier.runtime.calibration.lazy import calibrated, kept
from ranvier.runtime.calibration.measure import BUDGET
from ranvier.runtime.calibration.samples import Sample
from ranvier.runtime.calibration.table import Figures


@click.command()
@click.option(
    "-p",
    "--provider",
    "providers",
    multiple=True,
    metavar="NAME",
    help="Providers to measure; repeat or separate by commas.  [default: those of an ordinary session]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads that sessions will use; figures depend on it.")
@click.option("--quick", is_flag=True, help="Only the most important classes of operators, in half a second.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    help=f"Time for each provider.  [default: {BUDGET:g}, or 0.5 with --quick]",
)
@click.option("--show", is_flag=True, help="Measure nothing; show what is known.")
@click.option("--clear", is_flag=True, help="Measure nothing; forget what is known, of the providers given or of all.")
@source_options
@with_output
def command(
    output: Output,
    sources: Sources,
    providers: tuple[str, ...],
    threads: int | None,
    quick: bool,
    seconds: float | None,
    show: bool,
    clear: bool,
) -> None:
    """Measure how fast providers are here; sessions that place nodes by cost read the result.

    Small generated graphs run on every provider, several times, as fast as this machine lets them: figures are the
    best of several runs, and are kept for this machine, provider, its options and number of threads.
    """
    names = [REGISTRY.resolve(name.strip()) for text in providers for name in text.split(",") if name.strip()]
    if clear:
        _clear(output, names)
        return
    given: dict[str, Any] = {"threads": threads} if threads else {}
    config = sources.resolve(given).config
    found: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    for name in names or REGISTRY.available(auto=True):
        own = config.updated(providers=(name,))
        try:
            with _Provider(name, own) as provider:
                if show:
                    found.update(kept([provider], own))
                else:
                    progress = _progress(output, name)
                    found[name] = calibrated(provider, own, quick=quick, budget=seconds, progress=progress)
        except RanvierError as error:
            failed[name] = str(error)
    if output.json:
        folder = store.folder()
        output.emit(
            {
                "location": None if folder is None else str(folder),
                "providers": {name: figures.to_dict() for name, figures in found.items()},
                "failed": failed,
            }
        )
    else:
        _show(output, found, failed)
    if failed:
        raise SystemExit(exit_codes.CHECK_FAILED)


class _Provider:
    """A provider with the options of a session, closed afterwards where it was made for this."""

    def __init__(self, name: str, config: Any) -> None:
        from ranvier.runtime.settings import configured

        shared = REGISTRY.get(name)
        self._made = configured(shared, config)
        self._own = self._made is not shared

    def __enter__(self) -> Any:
        return self._made

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._made.close()


def _progress(output: Output, name: str) -> Any:
    def shown(samples: Sequence[Sample]) -> Iterable[Sample]:
        return output.progress(samples, f"measuring {name}")

    return shown


def _clear(output: Output, names: Sequence[str]) -> None:
    count = sum(store.clear(name) for name in names) if names else store.clear()
    if output.json:
        output.emit({"deleted": count})
    else:
        output.show(f"deleted {count} calibration{'' if count == 1 else 's'}")


def _show(output: Output, found: dict[str, Figures], failed: dict[str, str]) -> None:
    for name, figures in found.items():
        output.heading(f"{name}{'' if figures.quality == 'measured' else f' ({figures.quality})'}")
        output.show(
            f"start of a part {seconds_text(figures.launch)}, least time of a node {seconds_text(figures.node)}, "
            f"measured in {seconds_text(figures.seconds)}"
            + ("" if figures.iteration is None else f", a round of a loop {seconds_text(figures.iteration)}")
        )
        for way, words in ((figures.inward, "to its memory"), (figures.outward, "from its memory")):
            if way is not None:
                output.show(f"{words}: {seconds_text(way[0])} and {way[1] / 1e9:.3g} GB/s")
        rows = [_row(key, points) for key, points in sorted(figures.points.items())]
        output.show(
            table(["!operators", "!type", "!work", ">smallest", ">rate there", ">largest", ">rate there"], rows)
        )
    for name, reason in failed.items():
        output.show(f"{name} cannot be measured: {reason}")
    if not found and not failed:
        output.show("nothing is known; 'ranvier calibrate' measures")


def _row(key: str, points: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    kind, dtype = key.split(" ")
    unit = "Gop/s" if kind in BY_ARITHMETIC else "GB/s"
    (least, quick), (most, slow) = points[0], points[-1]
    return (
        kind,
        dtype,
        "operations" if kind in BY_ARITHMETIC else "bytes",
        f"{least:.3g}",
        f"{least / quick / 1e9:.3g} {unit}",
        f"{most:.3g}",
        f"{most / slow / 1e9:.3g} {unit}",
    )
