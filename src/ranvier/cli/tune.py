"""``ranvier tune``: faster code for the shapes of a model, found by measurement."""

from __future__ import annotations

from typing import Any

import click

from ranvier.cli.inputs import InputRequest, collect
from ranvier.cli.options import Setup, input_options, session_options, with_output
from ranvier.cli.render import Output, facts, seconds_text, table
from ranvier.codegen import tuning_store
from ranvier.codegen.tuning import SITES
from ranvier.logs import progress
from ranvier.runtime.tuning import DEFAULT_SECONDS, Tuned, tune


@click.command()
@click.argument("model", type=click.Path(), metavar="[MODEL]", required=False)
@input_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="Time for trying; what was found by then is kept.",
)
@click.option("--again", is_flag=True, help="Measure shapes that are known, too.")
@click.option("--show", is_flag=True, help="Measure nothing; show what is known.")
@click.option("--clear", is_flag=True, help="Measure nothing; forget what is known.")
@session_options
@with_output
def command(
    output: Output,
    model: str | None,
    feed: InputRequest,
    seconds: float,
    again: bool,
    show: bool,
    clear: bool,
    setup: Setup,
) -> None:
    """Try other tiles, blocks and algorithms for the products and convolutions of MODEL, and keep what is faster.

    What is found serves every session on this machine, of any model with the same shapes and as many threads.
    """
    if clear:
        count = tuning_store.clear()
        output.emit({"deleted": count}) if output.json else output.show(f"deleted {count} tables")
    elif show:
        _show_known(output)
    elif model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    else:
        _tune(output, model, feed, seconds, again, setup)


def _tune(output: Output, model: str, feed: InputRequest, seconds: float, again: bool, setup: Setup) -> None:
    with setup.open(model, output) as session:
        collected = collect(session.interface, feed, setup.dims(session.graph))
        if note := collected.note():
            output.note(note)
        bar = _Bar(output)
        found = tune(session, collected.values, seconds=seconds, again=again, progress=bar.at)
        bar.done()
    data = _data(model, found)
    if output.json:
        output.emit(data)
    else:
        _show(output, found)


class _Bar:
    """A bar by the time that has passed."""

    def __init__(self, output: Output) -> None:
        self._steps = None if output.preset == "quiet" else progress(range(100), "tuning", 100)
        self._done = 0

    def at(self, _what: str, part: float) -> None:
        while self._steps is not None and self._done < min(100, round(100 * part)):
            next(self._steps)
            self._done += 1

    def done(self) -> None:
        for _ in self._steps or ():
            pass  # the bar goes away at its end


def _data(model: str, found: Tuned) -> dict[str, Any]:
    return {
        "model": model,
        "isa": found.isa,
        "threads": found.threads,
        "seconds": found.seconds,
        "finished": found.finished,
        "kept": found.kept,
        "rejected": found.rejected,
        "known_before": found.known,
        "default_seconds": found.default_seconds,
        "tuned_seconds": found.tuned_seconds,
        "gain": found.gain,
        "decisions": [
            {
                "key": o.key,
                "decision": o.site,
                "groups": o.nodes,
                "default_seconds": o.seconds,
                "chosen": o.chosen or None,
                "gain": o.gain,
                "tried": o.tried,
            }
            for o in found.outcomes
        ],
    }


def _show(output: Output, found: Tuned) -> None:
    changed = [o for o in found.outcomes if o.chosen]
    if changed:
        rows = [
            (o.site, o.key.removeprefix(f"{o.site} "), str(o.nodes), seconds_text(o.seconds), o.chosen, f"{o.gain:.2f}")
            for o in changed
        ]
        output.show(table(["!decision", "shape", ">times", ">by default", "!chosen", ">gain"], rows))
    pairs: list[tuple[str, Any]] = [
        ("tried", f"{len(found.outcomes)} decisions, {len(changed)} of them changed, {found.known} known before"),
        ("kernels", f"{seconds_text(found.default_seconds)} by default, {seconds_text(found.tuned_seconds)} tuned"),
        ("gain", f"{found.gain:.3f}"),
        ("took", seconds_text(found.seconds)),
    ]
    if found.rejected:
        pairs.append(("left out", f"{found.rejected} alternatives whose results differ"))
    output.show(facts(pairs))
    if not found.finished:
        output.note("not everything was tried; --seconds gives more time, and what is known is not measured again")
    if not found.kept:
        output.note("nothing could be kept on disk")


def _show_known(output: Output) -> None:
    known = tuning_store.kept()
    if output.json:
        output.emit(
            {
                "location": None if (where := tuning_store.folder()) is None else str(where),
                "tables": [
                    {
                        "isa": each.isa,
                        "threads": each.threads,
                        "current": each.current,
                        "entries": {
                            key: {"chosen": e.chosen or None, "gain": e.gain, "default_seconds": e.seconds}
                            for key, e in each.entries.items()
                        },
                    }
                    for each in known
                ],
            }
        )
        return
    for each in known:
        stale = "" if each.current else ", of another version or machine: not used"
        output.heading(f"{each.isa}, {each.threads} thread{'s' if each.threads != 1 else ''}{stale}")
        rows = []
        for site, text in SITES.items():
            found = [e for key, e in each.entries.items() if key.startswith(f"{site} (")]
            changed = [e.gain for e in found if e.chosen]
            best = f"{max(changed):.2f}" if changed else ""
            if found:
                rows.append((site, text, str(len(found)), str(len(changed)), best))
        output.show(table(["!decision", "what it is about", ">shapes", ">changed", ">best gain"], rows))
    if not known:
        output.show("nothing is known; 'ranvier tune MODEL' measures")
