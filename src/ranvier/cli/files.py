"""Writing result files: wholly or not at all, with an error that names the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranvier.errors import RanvierError


class CannotWrite(RanvierError, OSError):
    """A result file cannot be written."""


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Call ``write`` with a binary file that becomes ``path`` when it is complete; folders are made as needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise CannotWrite(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise CannotWrite(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))
