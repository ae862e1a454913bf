"""Writing result files: wholly or not at all; folders are made as needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranvier.errors import CannotWrite
from ranvier.formats.files import write_files


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
