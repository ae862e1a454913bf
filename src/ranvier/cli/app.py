"""The command group: subcommands by name, one way to report an error, one set of exit codes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from typing import Any

import click

from ranvier.cli import exit_codes
from ranvier.cli.options import output_options
from ranvier.cli.render import Output
from ranvier.errors import RanvierError, nearest

COMMANDS = {  # module of this package -> what the help says of it, so that help imports none of them
    "run": "Run a model on files, an image or random values.",
    "inspect": "Show what a model holds: interface, operators, memory, graph, picture.",
    "explain": "Show what the optimizer did and where every node runs, with reasons.",
    "bench": "Measure this runtime and its peers in the same interleaved run.",
    "profile": "Measure where the time goes, operator by operator; write a trace.",
    "convert": "Write an optimized ONNX model.",
    "quantize": "Write a model in fewer bits, with a report of error, size and speed.",
    "weights": "Show the tensors of a checkpoint here, on the hub, in S3 or behind a URL.",
    "providers": "List execution providers and whether they can be used here.",
    "doctor": "Check the installation by running a kernel on every provider.",
    "calibrate": "Measure how fast providers are here, for placement by cost.",
    "tune": "Find faster code for a model's shapes by measurement.",
    "worker": "Run parts of models for other machines.",
    "cache": "Show or clear the compiled kernels kept on disk.",
    "demo": "Recognise handwritten digits with the model in the package.",
}

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {text}" for code, text in exit_codes.MEANING.items())


class Failure(click.ClickException):
    """An error as the command line shows it: one line on stderr and an exit code."""

    def __init__(self, error: BaseException, *, as_json: bool) -> None:
        super().__init__(exit_codes.describe(error))
        self.exit_code = exit_codes.exit_code(error)  # type: ignore[misc]
        self.error = error
        self.as_json = as_json

    def show(self, file: Any = None) -> None:
        if self.as_json:
            Output(json=True).emit(
                {"error": {"type": type(self.error).__name__, "message": self.message, "exit_code": self.exit_code}}
            )
        if os.environ.get("RANVIER_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(self.error)
        click.echo(f"error: {self.message}", err=True)


class LazyGroup(click.Group):
    """Imports a subcommand when it is called, and turns whatever it raises into an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found = importlib.import_module(f"ranvier.cli.{name}").command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        output = ctx.ensure_object(Output)  # here, so that options of the subcommand find it too
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (RanvierError, MemoryError) as error:
            raise Failure(error, as_json=output.json) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(exit_codes.INTERRUPTED)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(exit_codes.BROKEN_PIPE)


def _silence_stdout() -> None:
    """Whoever read our output has left: what is still buffered goes nowhere, without a complaint at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stdout may be no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ranvier.cli.versions import ranvier_version

        click.echo(f"ranvier {ranvier_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
@output_options
def cli() -> None:
    """Ranvier: load a model, optimize it, run it, and know where everything ran."""
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", "") or "").lower().replace("-", "")
        if not encoding.startswith("utf") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without the characters of a table is no reason to fail
