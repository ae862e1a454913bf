"""The text of a kernel as a function of Triton's. Imports next to nothing, for processes that only compile."""

from __future__ import annotations

import linecache
import threading
from typing import Any

_functions: dict[tuple[str, str], Any] = {}  # kernels by their text
_making = threading.Lock()


def function(text: str, name: str) -> Any:
    """The jitted function of a module's text. Triton reads its source again, from the lines that are kept for it."""
    with _making:
        found = _functions.get((text, name))
        if found is None:
            file = f"<ranvier triton {len(_functions)} {name}>"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            module: dict[str, Any] = {"__name__": f"ranvier_triton_{len(_functions)}"}
            exec(compile(text, file, "exec"), module)
            found = _functions[text, name] = module[name]
    return found
