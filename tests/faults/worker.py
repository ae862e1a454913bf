"""The process that meets the broken models: loads and runs each, and writes down what happened.

Use: ``python -m tests.faults.worker FOLDER JOURNAL SEED START END``. A line is written to the journal *before* each
case, so that whoever reads it knows the case that killed this process. A case that takes too long ends the process
with the Python stack on stderr.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config import Limits
from ranvier.errors import OutOfMemory, RanvierError
from ranvier.graph.types import OptionalType, SequenceType, TensorType
from ranvier.runtime.session import Session, load
from tests.faults.corpus import read
from tests.faults.mutate import Mutation, mutate
from tests.faults.structure import FLOATS, INTS

CASE_SECONDS = 20.0  # then the case counts as hanging
ADDRESS_SPACE = 4 << 30  # an allocation that no limit caught fails here, not in the machine
LIMITS = Limits(
    model_bytes=1 << 22,
    tensor_bytes=1 << 24,
    graph_depth=16,
    graph_nodes=5000,
    run_seconds=2.0,
    memory_bytes=1 << 26,
)


def meet(mutation: Mutation, folder: Path) -> str:
    """The name of the outcome; whatever is not a RanvierError goes through."""
    stage = "load"
    try:
        with _loaded(mutation, folder) as session:
            stage = "run"
            _check_results(session.run(_inputs(mutation, session)))
    except OutOfMemory:
        raise AssertionError("memory ran out before a limit was reached") from None
    except RanvierError as error:
        return f"{stage}: {_checked(error)}"
    return "ran"


def run(mutation: Mutation, folder: Path) -> None:
    """Load and run without catching anything."""
    with _loaded(mutation, folder) as session:
        session.run(_inputs(mutation, session))


def _loaded(mutation: Mutation, folder: Path) -> Session:
    options = {"limits": LIMITS, "optimization": mutation.optimization, "providers": "reference"}
    return load(mutation.model, base_dir=folder, **options)


def _checked(error: RanvierError) -> str:
    assert str(error).strip(), f"{type(error).__name__} says nothing"
    cause = error.__cause__
    if cause is None or isinstance(cause, RanvierError):
        return type(error).__name__
    # a typed error around an untyped one: right, but a check nearer to the place could say more
    place = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(error).__name__} from {type(cause).__name__} at {Path(place.filename).name}:{place.lineno}"


def _check_results(results: Mapping[str, Any]) -> None:
    for name, value in results.items():
        kinds = (np.ndarray, list, dict, type(None))
        assert isinstance(value, kinds), f"output {name!r} is a {type(value).__name__}"


def _inputs(mutation: Mutation, session: Any) -> Any:
    """The inputs of the unbroken model, the same with odd values, or whatever the signature asks for."""
    rng = mutation.rng
    choice = rng.random()
    given = mutation.inputs
    if choice < 0.7 and len(given) == len(session.inputs):
        return [_odd(x, rng) for x in given] if choice < 0.3 else list(given)
    return {name: _made_up(declared, rng) for name, declared in session.inputs.items()}


def _odd(x: Any, rng: Any) -> Any:
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiu" or not x.size:
        return x
    x = x.copy()
    with np.errstate(all="ignore"):
        x.reshape(-1)[rng.randrange(x.size)] = np.array(rng.choice(FLOATS if x.dtype.kind == "f" else INTS)).astype(
            x.dtype
        )
    return x


def _made_up(declared: Any, rng: Any) -> Any:
    if isinstance(declared, SequenceType):
        return [_made_up(declared.elem, rng) for _ in range(rng.randrange(3))]
    if isinstance(declared, OptionalType):
        return None if rng.random() < 0.5 else _made_up(declared.elem, rng)
    if not isinstance(declared, TensorType):
        return np.zeros(2, np.float32)
    shape = [d if isinstance(d, int) and d < 100 else rng.randrange(4) for d in (declared.shape or ())[:64]]
    while shape and np.prod(shape) > 1 << 16:
        shape.pop()
    count = int(np.prod(shape))
    if declared.dtype is None:
        return np.zeros(shape, np.float32)
    if declared.dtype.name == "string":
        return np.array([rng.choice(("", "a", "ç\0", "(a+)+")) for _ in range(count)], object).reshape(shape)
    values = [rng.choice((0, 1, 2, *(FLOATS if declared.dtype.is_float else INTS))) for _ in range(count)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.array(values, np.float64).astype(declared.dtype.numpy).reshape(shape)


def rss() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bound_address_space() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def main(folder: Path, journal: Path, seed: int, start: int, end: int) -> None:
    faulthandler.enable()
    _bound_address_space()
    warnings.simplefilter("ignore")
    seeds = read(folder)
    with journal.open("a") as out:

        def note(**facts: Any) -> None:
            out.write(json.dumps(facts) + "\n")
            out.flush()

        warm = start + (end - start) // 4
        for index in range(start, end):
            if index == warm:  # caches of schemas, operators and code are filled by now
                gc.collect()
                note(memory="before", rss=rss())
            note(at=index)
            mutation = mutate(seeds, seed, index)
            began = time.perf_counter()
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            try:
                outcome = meet(mutation, folder)
                note(index=index, outcome=outcome, seconds=time.perf_counter() - began)
            except Exception:
                note(index=index, failure=traceback.format_exc(), seconds=time.perf_counter() - began)
            finally:
                faulthandler.cancel_dump_traceback_later()
        gc.collect()
        note(memory="after", rss=rss())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]))
