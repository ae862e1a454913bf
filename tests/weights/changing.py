"""What may happen to a file that somebody has open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_AN_HOUR = 3600 * 10**9


def aged(path: Path) -> None:
    """As if it was written an hour ago: clocks of file systems do not tell apart what is written at once."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns - _AN_HOUR, found.st_mtime_ns - _AN_HOUR))


def written_over(path: Path) -> None:
    """Other bytes, as many of them."""
    with path.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(255 - each for each in data))


def one_byte_written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def copied_over(path: Path) -> None:
    """As cp does it: cut off, and written from its beginning."""
    path.write_bytes(bytes(path.stat().st_size))


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replaced(path: Path) -> None:
    """By another file with its name, as careful programs do."""
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)


def removed(path: Path) -> None:
    path.unlink()


def removed_and_written(path: Path) -> None:
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size // 2))


def looked_at(path: Path) -> None:
    """The time of the last look is another."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns + _AN_HOUR, found.st_mtime_ns))


def linked(path: Path) -> None:
    os.link(path, path.with_name("link"))
    path.chmod(0o600)


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


Event = Callable[[Path], None]
CHANGES: tuple[Event, ...] = (written_over, one_byte_written, copied_over, cut_off, emptied, longer)
HARMLESS: tuple[Event, ...] = (replaced, removed, removed_and_written, looked_at, linked, renamed)
