"""What a file was when it was opened, for whoever reads it again later.

A mapping is no copy: who writes over the file changes what is seen through it, and who cuts it off takes pages away
that were there, which ends the program that looks at them. One look at the file before its bytes are taken tells both,
by its size and the time it was last written to. No file is kept open for it, since a checkpoint may have thousands, so
the look is at the place where the file was.
"""

from __future__ import annotations

import os
from pathlib import Path

from ranvier.errors import WeightError


class FileChanged(WeightError):
    """A file is not what it was when it was opened; ``path`` says which, ``how`` what is different."""

    def __init__(self, path: str, how: str) -> None:
        super().__init__(path, how)  # all arguments, so that the error can be pickled
        self.path = path
        self.how = how

    def __str__(self) -> str:
        return f"{self.path!r} {self.how}; its weights cannot be read as they were: load the model again"


class Opened:
    """A file that was just mapped, ``size`` bytes of it."""

    __slots__ = ("_before", "_path", "_place", "_size")

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path.absolute(), size
        self._place = os.path.realpath(path)  # a link may lead elsewhere by then, as in the cache of a hub
        self._before = path.stat()

    def check(self) -> None:
        """FileChanged where somebody wrote to it. One that was removed, or replaced as a whole, stays what it was: the
        mapping holds it."""
        try:
            now = os.stat(self._place)
        except OSError:
            return
        if not os.path.samestat(now, self._before):
            return
        if now.st_size != self._size:
            raise FileChanged(str(self._path), f"had {self._size} bytes when it was opened and now has {now.st_size}")
        if now.st_mtime_ns != self._before.st_mtime_ns:
            raise FileChanged(str(self._path), "was written to after it was opened")
