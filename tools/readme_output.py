"""Runs the commands that README.md shows and writes what they print below them.

Use: ``python tools/readme_output.py``. A command stands in a comment, ``<!-- output: ranvier demo -->``; the console
block after it is replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- output: (?P<command>[^\n]*?) -->\n(?:\n?```console\n.*?\n```\n)?", re.DOTALL)


def shown(match: re.Match[str]) -> str:
    command = match["command"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "110"}
    result = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [line.rstrip() for line in result.stdout.strip("\n").splitlines()]
    return "\n".join([f"<!-- output: {command} -->", "```console", f"$ {command}", *lines, "```", ""])


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(MARK.sub(shown, readme.read_text()))


if __name__ == "__main__":
    main()
