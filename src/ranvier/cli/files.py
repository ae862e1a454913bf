"""Writing result files: wholly or not at all; folders are made as needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ranvier.errors import CannotWrite
from ranvier.formats.files import check_replaceable, write_files


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Call ``write`` with a binary file whose content becomes ``path`` when it is complete."""
    buffer = io.BytesIO()
    write(buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    write_files({path: [buffer.getvalue()]})


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def check_target(target: Path, force: bool) -> None:
    """UsageError where a model cannot be written, before the work, which may take minutes, and not after it."""
    try:
        if target.is_dir():
            raise click.UsageError(f"{str(target)!r} is a folder; -o takes the file to write")
        check_replaceable(target)
        if (target.exists() or target.is_symlink()) and not force:
            raise click.UsageError(f"{str(target)!r} exists; --force overwrites it")
        if not target.parent.is_dir():
            raise click.UsageError(f"there is no folder {str(target.parent)!r} to write {target.name!r} in")
    except OSError as error:  # as of names that are too long
        raise click.UsageError(f"{str(target)!r} cannot be written: {error.strerror}") from None
