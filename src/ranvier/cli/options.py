"""Options that several commands share, and the small objects they are collected into."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ranvier.cli.render import Output
from ranvier.rules import amount

if TYPE_CHECKING:
    from ranvier.cli.inputs import InputRequest
    from ranvier.config import Resolved, SessionConfig
    from ranvier.graph.ir import Graph
    from ranvier.runtime.session import Session

Function = TypeVar("Function", bound=Callable[..., Any])
LEVEL_NAMES = ("none", "basic", "aggressive")


def _stacked(function: Function, options: list[Callable[[Any], Any]]) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


# -- output ---------------------------------------------------------------------------------------------------------


def _json_chosen(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.ensure_object(Output).json = True


def _preset_chosen(ctx: click.Context, _option: click.Parameter, preset: str | None) -> None:
    if preset:
        ctx.ensure_object(Output).use_preset(preset)


def output_options(function: Function) -> Function:
    """``--json``, ``--quiet`` and ``--verbose``, before or after the name of the command."""
    return _stacked(
        function,
        [
            click.option(
                "--json",
                is_flag=True,
                expose_value=False,
                callback=_json_chosen,
                help="Write one JSON document to stdout and nothing else.",
            ),
            click.option(
                "-q",
                "--quiet",
                flag_value="quiet",
                expose_value=False,
                callback=_preset_chosen,
                help="Leave out notes and progress.",
            ),
            click.option(
                "-v",
                "--verbose",
                flag_value="verbose",
                expose_value=False,
                callback=_preset_chosen,
                help="Show the log of the runtime.",
            ),
        ],
    )


def with_output(function: Function) -> Function:
    """Output options, and the :class:`Output` they set as the first argument."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(click.get_current_context().ensure_object(Output), *args, **kwargs)

    return output_options(wrapper)  # type: ignore[return-value]


model_argument = click.argument("model", type=click.Path(), metavar="MODEL")


# -- sessions -------------------------------------------------------------------------------------------------------


class Assignment(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """``name=value`` with a value of one kind; gives a pair."""

    def __init__(self, name: str, value: Callable[[str], Any]) -> None:
        self.name = name
        self._value = value

    def convert(self, text: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(text, tuple):
            return text
        name, sign, value = text.rpartition("=")
        if not sign or not name:
            self.fail(f"{text!r} is not of the form {self.name}", param, ctx)
        try:
            return name, self._value(value)
        except ValueError as error:
            self.fail(f"{text!r}: {error}", param, ctx)


def _size(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError("a size is a whole number, 0 or more")
    return int(text)


SIZE = Assignment("dim=size", _size)
LIMIT = Assignment("name=value", amount)
OPTION = Assignment("name=value", str)
PIN = Assignment("rule=provider", str)
POLICY_NAMES = ("cost", "priority")


@dataclass(frozen=True)
class Sources:
    """Where options come from beside the ones with a name of their own on the command line."""

    preset: str | None = None
    file: str | None = None
    options: tuple[tuple[str, str], ...] = ()

    def resolve(self, given: Mapping[str, Any] | None = None, *, collect: bool = False) -> Resolved:
        """The options in effect, those ``given`` before all others."""
        from ranvier.config import resolve
        from ranvier.config.leaves import read_text

        read = {name: read_text(name, text) for name, text in self.options}
        said = {**read, **(given or {})}
        return resolve(said, preset=self.preset, file=self.file, origin="command line", collect=collect)


@dataclass(frozen=True)
class Setup:
    """How to make a session: what the options say, laid over what every other source says."""

    providers: tuple[str, ...] = ()
    level: str | None = None
    threads: int | None = None
    limits: tuple[tuple[str, float | None], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    sources: Sources = field(default_factory=Sources)
    policy: str | None = None
    pins: tuple[tuple[str, str], ...] = ()
    precision: tuple[tuple[str, Any], ...] = ()  # options about it, those that were given

    def changes(self) -> dict[str, Any]:
        """The session options given on the command line, as plain data."""
        names = [name.strip() for text in self.providers for name in text.split(",") if name.strip()]
        found: dict[str, Any] = {"providers": tuple(names), "optimization": self.level, "threads": self.threads}
        found["policy"] = self.policy
        found["pins"] = {rule: providers.replace("|", ",").split(",") for rule, providers in self.pins}
        found |= dict(self.precision)
        return {name: value for name, value in found.items() if value}

    def resolved(self) -> Resolved:
        return self.sources.resolve({**self.changes(), "limits": dict(self.limits)})

    def config(self) -> SessionConfig:
        return self.resolved().config

    def plain(self) -> dict[str, Any]:
        """Every option that some source sets, as data for another process."""
        return {s.option: s.value for s in self.resolved().settings if s.origin != "default"}

    def open(self, model: Any, output: Output) -> Session:
        """The session; a note on stderr while it takes long."""
        from ranvier.runtime.session import Session

        config = self.config()
        with output.busy("loading and optimizing"):
            return Session(model, config)

    def dims(self, graph: Graph) -> dict[str, int]:
        """The sizes set for dimensions of the inputs; InvalidConfig for one that they do not have."""
        from ranvier.errors import InvalidConfig, nearest

        known = graph.symbols
        for name, _ in self.sizes:
            if name not in known:
                hint = nearest(name, known) if known else " (it has no symbolic dimension)"
                raise InvalidConfig(f"--set: the model has no dimension {name!r}{hint}")
        return dict(self.sizes)


def session_options(function: Function) -> Function:
    """Options of everything that makes a session; they arrive together as ``setup``."""

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        providers: Any,
        policy: Any,
        pins: Any,
        level: Any,
        threads: Any,
        limits: Any,
        sizes: Any,
        precision: Any,
        keep_f32: Any,
        calibration: Any,
        max_error: Any,
        sources: Sources,
        **kwargs: Any,
    ) -> Any:
        about = {"precision": precision, "keep_f32": keep_f32, "calibration": calibration, "max_error": max_error}
        setup = Setup(providers, level, threads, limits, sizes, sources, policy, pins, tuple(about.items()))
        return function(*args, setup=setup, **kwargs)

    options: list[Callable[[Any], Any]] = [
        click.option(
            "-p",
            "--provider",
            "providers",
            multiple=True,
            metavar="NAME",
            help="Execution providers in order of preference; repeat or separate by commas.",
        ),
        click.option(
            "--policy",
            type=click.Choice(POLICY_NAMES, case_sensitive=False),
            help="Who gets a node: the cheapest provider, or the first that takes it.",
        ),
        click.option(
            "--pin",
            "pins",
            type=PIN,
            multiple=True,
            metavar="RULE=PROVIDER",
            help="Tie nodes to a provider: by name, op:MatMul, a pattern or re:…; repeatable.",
        ),
        click.option(
            "--level",
            "--optimization",
            "level",
            type=click.Choice(LEVEL_NAMES, case_sensitive=False),
            help="Optimization level.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads to use."),
        click.option(
            "--limit",
            "limits",
            type=LIMIT,
            multiple=True,
            metavar="NAME=VALUE",
            help="A limit such as memory_bytes=2G or run_seconds=30; repeatable.",
        ),
        click.option(
            "--precision", metavar="NAME", help="What float32 values may be stored and multiplied in: bf16 or fp16."
        ),
        click.option(
            "--keep-f32",
            multiple=True,
            metavar="PATTERN",
            help="Nodes that --precision leaves alone, by name or pattern; repeatable.",
        ),
        click.option(
            "--calib",
            "calibration",
            metavar="FILE",
            help="An .npz with inputs: find out on them which nodes --precision must leave alone.",
        ),
        click.option(
            "--max-error",
            type=click.FloatRange(min=0.0, min_open=True),
            help="How far an output may be off on the --calib inputs, as a part of its largest value.",
        ),
        click.option(
            "--set",
            "sizes",
            type=SIZE,
            multiple=True,
            metavar="DIM=SIZE",
            help="Size of a symbolic dimension; repeatable.",
        ),
    ]
    return _stacked(source_options(wrapper), options)  # type: ignore[return-value]


def source_options(function: Function) -> Function:
    """Options that say where other options come from; they arrive together as ``sources``."""

    @functools.wraps(function)
    def wrapper(*args: Any, preset: Any, file: Any, single: Any, **kwargs: Any) -> Any:
        return function(*args, sources=Sources(preset, file, single), **kwargs)

    options: list[Callable[[Any], Any]] = [
        click.option("--preset", metavar="NAME", help="Options that suit a kind of machine: edge, cloud or none."),
        click.option(
            "--config",
            "file",
            metavar="FILE",
            help="Read options from this TOML file and no other; off: from none.",
        ),
        click.option(
            "--option",
            "single",
            type=OPTION,
            multiple=True,
            metavar="NAME=VALUE",
            help="Any option, such as memory.pool_size=64M or provider_options.cpu.winograd=false; repeatable.",
        ),
    ]
    return _stacked(wrapper, options)  # type: ignore[return-value]


# -- inputs ---------------------------------------------------------------------------------------------------------


def _numbers(_ctx: click.Context, option: click.Parameter, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers", param=option) from None


def input_options(function: Function) -> Function:
    """Options that say what the model is fed with; they arrive together as ``feed``."""

    @functools.wraps(function)
    def wrapper(*args: Any, given: Any, bundle: Any, fill: Any, seed: Any, mean: Any, std: Any, **kwargs: Any) -> Any:
        from ranvier.cli.inputs import InputRequest

        feed: InputRequest = InputRequest(given, bundle, fill, seed, mean, std)
        return function(*args, feed=feed, **kwargs)

    options: list[Callable[[Any], Any]] = [
        click.option(
            "-i",
            "--input",
            "given",
            multiple=True,
            metavar="NAME=SOURCE",
            help="One input: a .npy, .npz, .pb or image file, random, or random:2x3; repeatable.",
        ),
        click.option(
            "--inputs",
            "bundle",
            type=click.Path(),
            help="Several inputs: an .npz with arrays by name, or a folder with input_0.pb, input_1.pb …",
        ),
        click.option("--random", "fill", is_flag=True, help="Fill the inputs that are not given with random values."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of random values."),
        click.option("--mean", callback=_numbers, metavar="R,G,B", help="Subtracted from images scaled to 0…1."),
        click.option("--std", callback=_numbers, metavar="R,G,B", help="Images are divided by this after the mean."),
    ]
    return _stacked(wrapper, options)  # type: ignore[return-value]
