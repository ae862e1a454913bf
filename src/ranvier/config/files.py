"""Options in TOML files: which files are read, and on which line an option stands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.errors import InvalidConfig
from ranvier.records import dataclass

NAME = "ranvier.toml"
VARIABLE = "RANVIER_CONFIG"
_OFF = ("off", "none", "0", "no", "false")
_MOST_BYTES = 1 << 20  # of a file that people write by hand


@dataclass(frozen=True)
class OptionFile:
    """What one file says; ``shown`` is its name in messages."""

    shown: str
    text: str
    options: Mapping[str, Any]

    def where(self, name: str) -> str:
        """File and line of an option, or only the file where the line cannot be told."""
        line = line_of(self.text, name)
        return self.shown if line is None else f"{self.shown}:{line}"


def option_files(given: str | os.PathLike[str] | None, environ: Mapping[str, str], folder: Path) -> list[OptionFile]:
    """The files to read, the most important first.

    One that is named, by ``given`` or by the variable, is the only one, and must be there; ``off`` stands for none.
    Otherwise the one in the working folder comes before the user's own; both may be absent.
    """
    named = given if given is not None else environ.get(VARIABLE, "").strip() or None
    if named is not None:
        if str(named).lower() in _OFF:
            return []
        return [read(folder / Path(named).expanduser(), os.fspath(named))]
    found = [read(folder / NAME, NAME)] if (folder / NAME).is_file() else []
    own = user_file(environ)
    if own is not None and own.is_file():
        found.append(read(own, str(own)))
    return found


def user_file(environ: Mapping[str, str], system: str = sys.platform) -> Path | None:
    """Where the options of a user are looked for; None where the environment tells of no home."""
    home = environ.get("USERPROFILE" if system == "win32" else "HOME")
    if system == "win32":
        base = environ.get("APPDATA") or (home and f"{home}/AppData/Roaming")
    elif system == "darwin":
        base = home and f"{home}/Library/Application Support"
    else:
        base = environ.get("XDG_CONFIG_HOME") or (home and f"{home}/.config")
    return Path(base) / "ranvier" / NAME if base else None


def read(path: Path, shown: str) -> OptionFile:
    """A file; InvalidConfig, with its name, where it cannot be read or is no TOML."""
    import tomllib  # most processes have no file

    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise InvalidConfig(f"{shown}: larger than {_MOST_BYTES:,} bytes, which no file of options is")
        text = data.decode("utf-8")
        return OptionFile(shown, text, tomllib.loads(text))
    except OSError as error:
        raise InvalidConfig(f"{shown}: cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{shown}: not a TOML file ({error})") from None


_HEADER = re.compile(r"\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"""((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def line_of(text: str, name: str) -> int | None:
    """The line on which the option with this dotted name is set, or on which a table around it begins."""
    wanted = name.split(".")
    table: list[str] = []
    nearest: tuple[int, int] | None = None  # length of the match, line
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := _HEADER.fullmatch(stripped):
            table = key = _parts(header[1])
        elif found := _KEY.match(stripped):
            key = table + _parts(found[1])
        else:
            continue
        if key == wanted[: len(key)] and (nearest is None or len(key) > nearest[0]):
            nearest = len(key), number
    return None if nearest is None else nearest[1]


def _parts(key: str) -> list[str]:
    return [part.strip("\"'") for part in _PART.findall(key)]


__all__ = ["NAME", "VARIABLE", "OptionFile", "line_of", "option_files", "read", "user_file"]
