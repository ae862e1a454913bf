"""``python -m bench.models --out FOLDER``: write the models that are missing there or whose scripts have changed."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import sys
from pathlib import Path

import onnx

from bench.models import make, names

STAMPS = "stamps.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to write into")
    parser.add_argument("--only", default="*", help="names, by commas, with * and ?")
    parser.add_argument("--force", action="store_true", help="write all of them again")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    given = parser.parse_args()
    wanted = [n for n in names() if any(fnmatch.fnmatch(n, p) for p in given.only.split(","))]
    if given.list:
        print("\n".join(wanted))
        return
    if given.out is None:
        parser.error("--out is needed")
    if not wanted:
        sys.exit(f"no model is called {given.only!r}")
    write(given.out, wanted, force=given.force)


def write(folder: Path, wanted: list[str], *, force: bool = False) -> None:
    """Each file appears complete or not at all, and is remembered with what it was made from."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _stamp()
    for name in wanted:
        target = folder / f"{name}.onnx"
        if not force and target.exists() and _read(folder).get(name) == stamp:
            continue
        model = make(name)
        partial = folder / f".{name}.{os.getpid()}.partial"
        try:
            onnx.save(model, partial)
            onnx.checker.check_model(str(partial))
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        (folder / STAMPS).write_text(json.dumps({**_read(folder), name: stamp}, indent=1, sort_keys=True))
        print(f"{name}: {target.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


def _read(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / STAMPS).read_text()))
    except (OSError, ValueError):
        return {}


def _stamp() -> str:
    """A digest of all scripts and of the package the light models come from."""
    digest = hashlib.sha256(onnx.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
