"""Files written wholly or not at all.

What is written goes to a temporary file in the same folder first, which then takes the name; so a reader never sees
a part, and a full disk or an interruption leaves what was there before.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ranvier.errors import CannotWrite


def write_files(files: Mapping[Path, Iterable[bytes | memoryview]]) -> None:
    """Write all files, given by their pieces; none takes its name before all are complete.

    They appear in the order of the mapping. CannotWrite names the file that could not be written.
    """
    staged: dict[Path, Path] = {}
    path = Path()
    try:
        for path, pieces in files.items():
            check_replaceable(path)
            staged[path] = temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
            _write(temporary, pieces)
        for path, temporary in staged.items():
            os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise CannotWrite(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        for temporary in staged.values():
            with suppress(OSError, ValueError):
                os.unlink(temporary)  # still there only where something failed


def check_replaceable(path: Path) -> None:
    """OSError where a file may not take the place of what is there: a folder, and a device or a pipe, which would be
    gone."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no ordinary file")


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        for piece in pieces:
            file.write(piece)
