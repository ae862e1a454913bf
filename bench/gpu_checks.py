"""Is the GPU provider right on a real GPU? Its tests, the standard's cases and the compiled printer, in many processes.

    PYTHONPATH=src python -m bench.gpu_checks [--only tests cases printer kernels] [--seconds 150] [--workers 12]
    PYTHONPATH=src python -m bench.gpu_checks --device cpu --match relu --seconds 60       # the same on the twin

``tests``: tests/torch/cuda and test_specialise on the device. ``cases``: the standard's cases through
``providers=["cuda", "reference"]`` with CUDA graphs, four runs each, so that the last ones are captured; the reference
alone is the oracle. ``printer`` and ``kernels``: tests/torch/codegen and tests/torch/kernels with compiled instead of
interpreted kernels. What the time does not suffice for is counted as not run. The exit code is 1 where anything fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HALVES = {  # products of halves are rounded in another order there: one step of float16 beside
    "test_attention_4d_fp16_expanded",
    "test_attention_4d_gqa_with_past_and_present_fp16_expanded",
}
RUNS = 4  # one that prepares, those before a capture, the capture and a replay
CASE_SECONDS = 40.0
SHARES = {"tests": 0.3, "cases": 0.4, "printer": 0.2, "kernels": 0.1}  # of the time
FOLDERS = {
    "tests": ["tests/torch/cuda", "tests/torch/test_specialise.py"],
    "printer": ["tests/torch/codegen"],
    "kernels": ["tests/torch/kernels"],
}
Row = dict[str, Any]


# -- tests in several processes ---------------------------------------------------------------------------------------


def run_tests(kind: str, device: str, workers: int, seconds: float) -> Row:
    """pytest over the folders of a kind, each process with its share of the tests."""
    interpreted = "1" if device == "cpu" else "0"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for k in range(workers):
            env = {
                **os.environ,
                "RANVIER_TEST_SHARE": f"{k}/{workers}",
                "RANVIER_TEST_DEVICE": device,
                "TRITON_INTERPRET": interpreted,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            }
            told = Path(folder) / f"{k}.xml"
            command = [sys.executable, "-m", "pytest", *FOLDERS[kind], "-q", "-p", "no:cacheprovider"]
            command += ["--tb=short", f"--junitxml={told}", "-o", "addopts="]
            log = open(Path(folder) / f"{k}.log", "w+b")  # noqa: SIM115
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            running.append((process, told, log))
        processes = [process for process, _, _ in running]
        late = len(_unfinished(processes, started + seconds))
        # an interrupt lets pytest write down what it has seen; what does not listen is ended
        for sign, patience in ((signal.SIGINT, 8), (signal.SIGKILL, 5)):
            for process in _unfinished(processes, 0):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
            _unfinished(processes, time.monotonic() + patience)
        found: Row = {"counts": Counter(), "failures": {}, "stopped": late}
        for process, told, log in running:
            _read_tests(told, found)
            if not told.exists() or process.returncode not in (0, 1, 2, 5):
                log.seek(0)
                last = log.read().decode(errors="replace").strip()[-1500:]
                found["failures"][f"a process ended with {process.returncode}"] = last
            log.close()
    found["seconds"] = time.monotonic() - started
    return found


def _unfinished(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended by then."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [process for process in processes if process.poll() is None]


def _read_tests(told: Path, found: Row) -> None:
    if not told.exists():
        return
    for case in ElementTree.parse(told).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.torch.')}::{case.get('name')}"
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        if outcome in ("failure", "error"):
            problem = case.find(outcome)
            assert problem is not None
            found["failures"][name] = f"{problem.get('message') or ''}\n{(problem.text or '')[-600:]}".strip()
        found["counts"][outcome] += 1


# -- the standard's cases ---------------------------------------------------------------------------------------------


def _one_case(case: Any, device: str, more: dict[str, Any]) -> Row:
    import ranvier as rv
    from tests.conformance.cases import check

    model = case.model()
    with rv.load(model, optimization="none", providers=["reference"]) as oracle:
        data = [(inputs, list(oracle.run(inputs).values())) for inputs, _ in case.data(model)]
    options = {"cuda": {"device": device, "cuda_graphs": True, **more}}
    with rv.load(model, optimization="none", providers=["cuda", "reference"], provider_options=options) as session:
        for inputs, wanted in data:
            for run in range(RUNS):
                try:
                    check(list(session.run(inputs).values()), wanted, case)
                except AssertionError as error:
                    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
                    raise AssertionError(f"run {run + 1}: {' | '.join(lines[:8])}") from None
        report = session.report
        if report.fallbacks:
            raise AssertionError(f"fallback: {report.fallbacks[0]}")
        told = [line for part in session._parts for line in getattr(part.kernel, "graph_report", list)()]
        return {"providers": dict(report.by_provider()), "graphs": [line.rpartition(": ")[2] for line in told]}


def _case_worker(pipe: Any, device: str, more: dict[str, Any], said: str) -> None:
    """Answers names of cases until there is nobody to ask. What it says goes to a file, for the case that it ends."""
    import faulthandler
    import warnings

    warnings.simplefilter("ignore")
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    from tests.conformance.cases import all_cases

    by_name = {case.name: case for case in all_cases()}
    pipe.send(("ready", None))
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((name, {"ok": True, **_one_case(by_name[name], device, more)}))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:600]
            ends = "ProviderFailed" in text or "lost" in text  # a context that answers everything with one error
            pipe.send((name, {"ok": False, "problem": text, "ends": ends}))
            if ends:
                os._exit(1)


class _Worker:
    def __init__(self, context: Any, device: str, more: dict[str, Any]) -> None:
        self.pipe, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self._said = Path(name)
        self.process = context.Process(target=_case_worker, args=(theirs, device, more, name), daemon=True)
        self.process.start()
        theirs.close()
        self.name = ""
        self.since = time.monotonic()

    def last_words(self) -> str:
        """How the process ended, and what it said then."""
        self.process.join(5)
        lines = [line.strip() for line in self._said.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process ended with {self.process.exitcode}: {' | '.join(lines[-14:])}"[:1500]

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self._said.unlink(missing_ok=True)


def run_cases(device: str, workers: int, seconds: float, match: str, full: bool, more: dict[str, Any]) -> Row:
    os.environ["RANVIER_CONFORMANCE"] = "full" if full else "sample"  # read when the tests are imported
    from tests.conformance.test_providers import _cases
    from tests.torch.test_conformance_cuda import DEVIATIONS

    names = [case.name for case in _cases() if match in case.name]
    waiting = names[::-1]
    started = time.monotonic()
    deadline = started + seconds
    context = multiprocessing.get_context("spawn")
    alive = [_Worker(context, device, more) for _ in range(min(workers, len(names)))]
    results: dict[str, Row] = {}

    def gone(worker: _Worker, why: str) -> None:
        if worker.name:
            results[worker.name] = {"ok": False, "problem": why}
        worker.end()
        alive.remove(worker)
        if waiting:
            alive.append(_Worker(context, device, more))

    while alive and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait([w.pipe for w in alive], timeout=1.0)
        for worker in list(alive):
            if worker.pipe in ready:
                try:
                    name, row = worker.pipe.recv()
                except (EOFError, OSError):
                    gone(worker, worker.last_words())
                    continue
                if row is not None:
                    results[name] = row
                worker.name = ""
                if row is not None and row.get("ends"):
                    gone(worker, "")
                    continue
                if not waiting:
                    worker.end()
                    alive.remove(worker)
                    continue
                worker.name, worker.since = waiting.pop(), time.monotonic()
                try:
                    worker.pipe.send(worker.name)
                except OSError:
                    gone(worker, worker.last_words())
            elif worker.name and time.monotonic() - worker.since > CASE_SECONDS:
                gone(worker, f"took more than {CASE_SECONDS:.0f} s")
    for worker in alive:
        worker.end()
    known = {*DEVIATIONS, *(HALVES if device != "cpu" else ())}
    failures = {name: row["problem"] for name, row in results.items() if not row["ok"]}
    graphs = Counter(line for row in results.values() for line in row.get("graphs", ()))
    return {
        "counts": Counter("passed" if row["ok"] else "failure" for row in results.values()),
        "failures": {name: why for name, why in failures.items() if name not in known},
        "known": {name: why for name, why in failures.items() if name in known},
        "not run": len(names) - len(results),
        "providers": Counter(p for row in results.values() for p in row.get("providers", ())),
        "graphs": dict(graphs.most_common(20)),
        "seconds": time.monotonic() - started,
    }


# -- all of it --------------------------------------------------------------------------------------------------------


def _print(kind: str, row: Row) -> None:
    more = {name: row[name] for name in ("stopped", "not run", "known", "providers") if row.get(name)}
    print(f"{kind}: {dict(row['counts'])} in {row['seconds']:.0f} s; {more}")
    for line, count in row.get("graphs", {}).items():
        print(f"    {count:5} {line[:160]}")
    for name, why in row["failures"].items():
        lines = [line.strip() for line in why.splitlines() if line.strip()]
        print(f"  {name}: {' | '.join(lines[:3])[:300]}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--device", default="0", help="the number of a GPU, or cpu for the twin")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 4, 1))
    parser.add_argument("--match", default="", help="cases whose names have this")
    parser.add_argument("--sample", action="store_true", help="a sample of cases with every operator, not all of them")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of the provider, as JSON")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    for folder in (ROOT, ROOT / "src"):
        sys.path.insert(0, str(folder))
    os.environ["RANVIER_TEST_DEVICE"] = given.device
    os.environ.setdefault("TRITON_INTERPRET", "1" if given.device == "cpu" else "0")
    rows: dict[str, Row] = {}
    left, ends = sum(SHARES[kind] for kind in given.only), time.monotonic() + given.seconds
    for kind in given.only:
        seconds = (ends - time.monotonic()) * SHARES[kind] / left  # what one does not need, the next ones have
        left -= SHARES[kind]
        if kind == "cases":
            row = run_cases(given.device, given.workers, seconds, given.match, not given.sample, given.options)
        else:
            row = run_tests(kind, given.device, given.workers, seconds)
        rows[kind] = row
        _print(kind, row)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(rows, indent=1))
    return 1 if any(row["failures"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
