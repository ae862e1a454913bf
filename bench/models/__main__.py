"""``python -m bench.models --out FOLDER``: write the models that are missing there or whose scripts have changed."""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import sys
from pathlib import Path

import onnx

from bench.models import make, names


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
    failed = write(given.out, wanted, force=given.force)
    if failed:
        sys.exit(f"could not build {'; '.join(failed)}")


def write(folder: Path, wanted: list[str], *, force: bool = False) -> list[str]:
    """Each file appears complete or not at all. What could not be written is returned with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = _stamp()
    failed: list[str] = []
    for name in wanted:
        target, mark = folder / f"{name}.onnx", folder / f"{name}.stamp"
        if not force and target.exists() and mark.exists() and mark.read_text() == stamp:
            continue
        partial = folder / f".{name}.{os.getpid()}.partial"
        try:
            onnx.save(make(name), partial)
            onnx.checker.check_model(str(partial))
            os.replace(partial, target)
            mark.write_text(stamp)
        except Exception as error:  # the other models are wanted all the same
            failed.append(f"{name}: {error}")
        else:
            print(f"{name}: {target.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
        finally:
            partial.unlink(missing_ok=True)
    return failed


def _stamp() -> str:
    """A digest of all scripts and of the package the light models come from."""
    digest = hashlib.sha256(onnx.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
