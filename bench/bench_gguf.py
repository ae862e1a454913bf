"""A language model of a GGUF file: tokens a second, against llama.cpp, on the same file.

    pip install llama-cpp-python          # builds llama.cpp for this processor
    python -m bench.bench_gguf model.gguf [--threads 1,2] [--activations int8,float32] [--json]

Ours is the network of ``examples/llama.py``, compiled whole, weights as they are in the file. In turns, each round: a
prompt of ``--prompt`` tokens, then ``--tokens`` tokens one by one, both always the same ones. Medians over rounds of
the seconds of a prompt, and of those of one token. Scores differ by what activations are rounded to: shown is how far
they are from those of the first row at most, and how often the largest score is the same token's.

With ``--memory`` each has a process of its own, which reads the model, the prompt and two tokens: seconds until the
model is there and until the tokens are, and the megabytes that are its own then. Pages of the file are not: the system
takes them back where others need them. The most at once has these pages too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from examples.llama import Llama
from rich.console import Console
from rich.table import Table

import ranvier as rv
from ranvier.weights import WeightLoader

Array = np.ndarray[Any, Any]


class Ours:
    def __init__(self, path: str, length: int, activations: str) -> None:
        self._model = Llama(WeightLoader().open(path), activations).eval()
        self._model.begin(length)
        self._step = rv.jit(self._model.forward)
        self.name = f"ranvier, {activations} activations"

    def begin(self) -> None:
        self._past = 0

    def read(self, tokens: list[int]) -> Array:
        start = rv.Tensor(np.int64(self._past))
        self._past += len(tokens)
        return self._step(rv.Tensor(np.array(tokens)), start).numpy()


class Theirs:
    def __init__(self, path: str, length: int, threads: int) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(
            path, n_ctx=length, n_threads=threads, n_threads_batch=threads, n_batch=length, verbose=False
        )
        self._api = llama_cpp
        self.name = f"llama.cpp ({llama_cpp.__version__})"

    def begin(self) -> None:
        self._model.reset()

    def read(self, tokens: list[int]) -> Array:
        self._model.eval(tokens)
        scores = self._api.llama_get_logits(self._model.ctx)
        return np.ctypeslib.as_array(scores, (self._model.n_vocab(),)).copy()


def measure(runners: list[Any], prompt: list[int], tokens: list[int], rounds: int) -> list[dict[str, Any]]:
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in runners]
    scores: list[list[Array]] = [[] for _ in runners]
    for k in range(rounds + 1):  # the first compiles
        for runner, (long, short), said in zip(runners, times, scores):
            runner.begin()
            begun = time.perf_counter()
            row = runner.read(prompt)
            spent = [time.perf_counter() - begun]
            said.append(row)
            for token in tokens:
                begun = time.perf_counter()
                row = runner.read([token])
                spent.append(time.perf_counter() - begun)
                if k == rounds:
                    said.append(row)
            if k:
                long.append(spent[0])
                short += spent[1:]
    found = []
    for runner, (long, short), said in zip(runners, times, scores):
        exact = scores[0]
        off = max(float(np.abs(a - b).max()) for a, b in zip(said, exact))
        same = statistics.mean(float(a.argmax() == b.argmax()) for a, b in zip(said, exact))
        rates = {"prompt": len(prompt) / statistics.median(long), "decode": 1 / statistics.median(short)}
        found.append({"runner": runner.name, **rates, "off": off, "same": same})
    return found


def footprint(path: str, length: int, threads: int, activations: str | None, prompt: list[int]) -> dict[str, Any]:
    """Of one of them, alone in its process; llama.cpp without ``activations``."""
    os.environ["RANVIER_THREADS"] = str(threads)
    empty = _megabytes("RssAnon")
    begun = time.perf_counter()
    runner: Any = Theirs(path, length, threads) if activations is None else Ours(path, length, activations)
    loaded = time.perf_counter() - begun
    runner.begin()
    runner.read(prompt)
    for _ in range(2):
        runner.read(prompt[:1])
    found = {"load": loaded, "tokens": time.perf_counter() - begun}
    return {"runner": runner.name, **found, "own": _megabytes("RssAnon") - empty, "most": _megabytes("VmHWM")}


def _megabytes(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{what}:"))


def _alone(*given: Any) -> dict[str, Any]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(footprint, *given).result()


def _headed(title: str, *columns: str) -> Table:
    """A table without rows; those begin with who ran and how many threads it had."""
    table = Table(title=title)
    table.add_column("")
    for column in ("threads", *columns):
        table.add_column(column, justify="right")
    return table


def memory_table(path: str, rows: list[dict[str, Any]]) -> Table:
    title = f"{Path(path).name}, {Path(path).stat().st_size / 1e6:.0f} MB"
    table = _headed(title, "model there, s", "tokens there, s", "own memory, MB", "most at once, MB")
    for row in rows:
        seconds = f"{row['load']:.1f}", f"{row['tokens']:.1f}"
        table.add_row(row["runner"], str(row["threads"]), *seconds, f"{row['own']:.0f}", f"{row['most']:.0f}")
    return table


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("model")
    arguments.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=[2])
    arguments.add_argument("--activations", type=lambda text: text.split(","), default=["float32", "int8"])
    arguments.add_argument("--prompt", type=int, default=128)
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--memory", action="store_true", help="what each of them takes, instead")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    rng = np.random.default_rng(0)
    prompt, tokens = ([int(t) for t in rng.integers(100, 20000, count)] for count in (options.prompt, options.tokens))
    length = options.prompt + options.tokens
    rows = []
    has_peer = importlib.util.find_spec("llama_cpp") is not None
    if options.memory:
        kinds = [*options.activations, *([None] if has_peer else [])]
        for threads in options.threads:
            rows += [{"threads": threads, **_alone(options.model, length, threads, x, prompt)} for x in kinds]
        if options.json:
            print(json.dumps(rows))
        else:
            Console().print(memory_table(options.model, rows))
        return
    for threads in options.threads:
        os.environ["RANVIER_THREADS"] = str(threads)  # of sessions that are made from now on
        runners: list[Any] = [Ours(options.model, length, each) for each in options.activations]
        if has_peer:
            runners.append(Theirs(options.model, length, threads))
        rows += [{"threads": threads, **row} for row in measure(runners, prompt, tokens, options.rounds)]
    if options.json:
        print(json.dumps(rows))
        return
    title = f"{Path(options.model).name}: tokens a second, {options.prompt} of prompt, {options.tokens} after"
    table = _headed(title, "prompt", "decode", "scores off by at most", "same largest score")
    for row in rows:
        rates = f"{row['prompt']:.0f}", f"{row['decode']:.1f}"
        table.add_row(row["runner"], str(row["threads"]), *rates, f"{row['off']:.3g}", f"{row['same']:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
