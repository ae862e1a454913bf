"""Where options come from. For each single option the first of these that sets it decides:

1. code, or the command line;
2. the environment: ``RANVIER_`` and the option's name (``RANVIER_THREADS``, ``RANVIER_LIMITS_MEMORY_BYTES``);
3. a file ``ranvier.toml``: the one in the working folder, then the user's own (or only the one that is named);
4. a preset, ``edge`` or ``cloud``, that one of the sources above names;
5. the built-in default.

Everything that any source says is checked, also where an earlier source wins. A variable of the environment that is
close to one of these names and none of them is told of in a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranvier.config import leaves
from ranvier.config.files import OptionFile, option_files
from ranvier.config.provider import ProviderConfig
from ranvier.config.provider import preset as preset_of
from ranvier.config.session import SessionConfig
from ranvier.config.variables import PREFIX, PRESET_VARIABLE, warn_of_misspelt
from ranvier.errors import InvalidConfig
from ranvier.records import dataclass

_PRESET = "preset"


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{PREFIX}{name.upper().replace('.', '_')}"


VARIABLES = {variable(name): name for name in leaves.NAMES if name not in leaves.OF_A_MODEL}


@dataclass(frozen=True)
class Setting:
    """One option as it is in effect, and who set it."""

    option: str
    value: Any
    origin: str  # "code", a variable, a file with a line, "preset edge", "default"


@dataclass(frozen=True)
class Resolved:
    """The options of a session, each with its origin. ``problems`` is empty unless faults were to be collected."""

    config: SessionConfig
    settings: tuple[Setting, ...]
    preset: str = ""
    files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def origin(self, option: str) -> str:
        return next(s.origin for s in self.settings if s.option == option)


def resolve(
    given: Mapping[str, Any] | None = None,
    *,
    config: SessionConfig | ProviderConfig | None = None,
    preset: str | None = None,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    origin: str = "code",
    collect: bool = False,
) -> Resolved:
    """The options in effect. ``given`` wins over ``config``, and both over everything that is not code.

    A SessionConfig sets every option. ``collect`` gathers what is wrong in ``problems`` instead of raising, and goes
    on without it.
    """
    environ = os.environ if environ is None else environ
    if isinstance(config, SessionConfig) and (preset is not None or file is not None):
        raise InvalidConfig("a SessionConfig sets every option: use SessionConfig.default(preset=…) to start from one")
    if not isinstance(config, SessionConfig | ProviderConfig | None):
        raise InvalidConfig(f"config must be a SessionConfig or a ProviderConfig, got {type(config).__name__}")
    found = _Found(collect)
    found.add(given or {}, lambda _option: origin)
    if config is not None:
        said = vars(config) if isinstance(config, SessionConfig) else config.session_options()
        found.add(said, lambda _option: origin)
    if isinstance(config, SessionConfig):
        return found.result("", ())
    if not collect:
        warn_of_misspelt(environ, VARIABLES)
    texts = {option: environ.get(name, "").strip() for name, option in VARIABLES.items()}
    found.add({o: text for o, text in texts.items() if text}, variable, text=True, prefix="environment variable ")
    files: list[OptionFile] = []
    with found.noting():
        files = option_files(file, environ, folder or Path.cwd())
    for each in files:
        found.add({n: v for n, v in each.options.items() if n != _PRESET}, each.where, text=True)
    name = _preset(found, preset, environ, files)
    if name:
        found.add(preset_of(name).session_options(), lambda _option: f"preset {name}")
    return found.result(name, tuple(each.shown for each in files))


def _preset(found: _Found, given: str | None, environ: Mapping[str, str], files: Iterable[OptionFile]) -> str:
    """The name of the preset, empty for none. A source that says ``none`` overrides the later ones too."""
    candidates: list[tuple[str, Any]] = [] if given is None else [("", given)]
    if text := environ.get(PRESET_VARIABLE, "").strip():
        candidates.append((f"environment variable {PRESET_VARIABLE}: ", text))
    candidates += [(f"{each.where(_PRESET)}: ", each.options[_PRESET]) for each in files if _PRESET in each.options]
    names = []
    for prefix, value in candidates:
        with found.noting(prefix):
            names.append(_preset_name(value))
    return names[0].replace("none", "") if names else ""


def _preset_name(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidConfig(f"a preset is a name, got {value!r}")
    folded = value.strip().lower()
    if folded != "none":
        preset_of(folded)
    return folded


class _Found:
    """Options as they are found, the most important source first: one that is set stays as it is."""

    def __init__(self, collect: bool) -> None:
        self._collect = collect
        self._settings: dict[str, Setting] = {}
        self._problems: list[str] = []

    @contextmanager
    def noting(self, prefix: str = "") -> Iterator[None]:
        """What is wrong within the block is raised with the prefix, or noted."""
        try:
            yield
        except InvalidConfig as error:
            if not self._collect:
                raise InvalidConfig(f"{prefix}{error}") from None
            self._problems.append(f"{prefix}{error}")

    def add(
        self, given: Mapping[str, Any], origin: Callable[[str], str], *, text: bool = False, prefix: str = ""
    ) -> None:
        """The options of one source. With ``text`` it is one that holds texts, and knows no single model."""
        for option, value in leaves.taken_apart(given):
            where = origin(option)
            with self.noting(f"{prefix}{where}: " if text else ""):
                if text and option in leaves.OF_A_MODEL:
                    raise InvalidConfig(f"{option!r} belongs to one model: set it in code")
                setting = Setting(option, leaves.checked(option, value, text=text), where)
                self._settings.setdefault(option, setting)

    def result(self, preset: str, files: tuple[str, ...]) -> Resolved:
        config = SessionConfig()
        for option, value in leaves.taken_apart(vars(config)):
            self._settings.setdefault(option, Setting(option, value, "default"))
        settings = [self._settings.pop(option) for option in leaves.NAMES] + list(self._settings.values())
        with self.noting(_origins(settings)):
            config = leaves.put_together({s.option: s.value for s in settings})
        return Resolved(config, tuple(settings), preset, files, tuple(self._problems))


def _origins(settings: Iterable[Setting]) -> str:
    """Who set the options that may contradict each other: those of one group."""
    said = [f"{s.option} from {s.origin}" for s in settings if "." in s.option and s.origin not in ("default", "code")]
    return f"{', '.join(said)}: " if said else ""


__all__ = ["PRESET_VARIABLE", "VARIABLES", "Resolved", "Setting", "resolve", "variable"]
