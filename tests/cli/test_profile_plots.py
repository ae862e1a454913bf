"""Timelines and rooflines of ``ranvier profile``, and the records they are drawn from."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import numpy as np
import pytest

import ranvier as rv
from ranvier.charts.axes import Scale, number_text, round_step
from ranvier.charts.canvas import Canvas, shortened, text_width
from ranvier.cli import exit_codes
from ranvier.cli import profile as profile_command
from ranvier.cli.plots import roofline, timeline
from ranvier.runtime.profile import KernelRecord

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Peaks:
    gflops: float = 100.0
    copy_gbs: float = 10.0
    read_gbs: float = 12.0

    def arithmetic(self, units):
        return {"bfloat16 tiles": 12 * self.gflops, "int8 tiles": 24 * self.gflops}.get(units, self.gflops)


def record(label, kernel, start, end, flops=1e3, nbytes=1e3, threads=1, units=""):
    return KernelRecord(label, kernel, "cpu", start, end, flops, nbytes, threads, units=units)


def made_records(count=120):
    """Kernels one after another, of many kinds."""
    rng = np.random.default_rng(5)
    kinds = ["gemm 6x64", "conv 3x3", "loop add", "copy", "softmax", "norm", "pool", "lstm", "gather", "resize", "dw"]
    found, now = [], 1_000
    for k in range(count):
        kind = kinds[k % len(kinds)]
        end = now + int(rng.integers(2_000, 400_000))
        flops = 0.0 if kind == "copy" else float(rng.uniform(1e4, 1e7))
        found.append(record(f"block.{k}/{kind}", kind, now, end, flops, float(rng.uniform(1e4, 1e6)), 1 + k % 2))
        now = end + 500
    return found, now


def texts(svg):
    """Texts with their boxes."""
    anchors = {"start": 0.0, "middle": 0.5, "end": 1.0}
    for node in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if node.get("transform") is None:
            size = float(node.get("font-size"))
            wide = text_width(node.text, size)
            left = float(node.get("x")) - anchors[node.get("text-anchor", "start")] * wide
            base = float(node.get("y"))
            yield node.text, (left, base - size * 0.75, left + wide, base)


def overlapping(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def check_layout(canvas):
    """Nothing written outside, and no text over another."""
    found = list(texts(canvas.svg()))
    for text, box in found:
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= canvas.width and box[3] <= canvas.height, text
    for (one, a), (two, b) in itertools.combinations(found, 2):
        assert not overlapping(a, b), (one, two)


def test_timeline():
    records, end = made_records()
    canvas = timeline.draw("model.onnx", records, 1_000, end)
    check_layout(canvas)
    root = ElementTree.fromstring(canvas.svg())
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert all(any(r.label in t for t in titles) for r in records)
    legend = [text for text, _ in texts(canvas.svg()) if text.startswith("other")]
    assert len(legend) == 1  # eleven kinds, nine colours
    assert "up to 2" in canvas.svg()


def test_timeline_of_one_run_and_of_none():
    outside = record("late", "gemm", 10_000, 20_000)
    canvas = timeline.draw("model.onnx", [record("early", "gemm", 0, 5_000), outside], 0, 6_000)
    assert "early" in canvas.svg() and "late" not in canvas.svg() and "1 kernel," in canvas.svg()
    check_layout(timeline.draw("empty.onnx", [], 0, 1_000))


def test_bodies_stand_below_what_runs_them():
    outer, inner = record("choose", "If", 0, 1_000_000), record("product", "MatMul", 100_000, 900_000)
    records = [outer, inner, record("after", "Relu", 1_000_001, 1_200_000)]
    assert [r.label for r in timeline.leaves(records)] == ["product", "after"]
    levels = timeline._levels(records)
    assert [levels[id(r)] for r in records] == [0, 1, 0]
    check_layout(timeline.draw("if.onnx", records, 0, 1_200_000))


def test_roofline():
    records, _ = made_records()
    canvas = roofline.draw("model.onnx", records, {1: Peaks(), 2: Peaks(190.0, 14.0)})
    check_layout(canvas)
    assert "190 GFLOP/s, 14 GB/s" in canvas.svg() and "no arithmetic" in canvas.svg()
    alone = roofline.draw("model.onnx", [record("a", "gemm", 0, 100)], {})
    check_layout(alone)
    assert "peaks were not measured" in alone.svg() and "no arithmetic" not in alone.svg()
    check_layout(roofline.draw("empty.onnx", [], {1: Peaks()}))


def test_units_with_other_peaks_have_lines_of_their_own():
    records = [
        record("a", "gemm", 0, 1_000, 9e5, 1e3, units="bfloat16 tiles"),
        record("b", "gemm", 1_000, 2_000, 5e4, 1e3),
    ]
    canvas = roofline.draw("model.onnx", records, {1: Peaks(), 2: Peaks(190.0, 14.0)})
    check_layout(canvas)
    assert "bfloat16 tiles by 2 threads: 2280 GFLOP/s" in canvas.svg() and "int8" not in canvas.svg()
    assert {p.units for p in roofline.points(records)} == {"", "bfloat16 tiles"}


def test_points_sum_up_calls():
    calls = [record("a", "gemm", 0, 1_000, 2e3, 1e3), record("a", "gemm", 2_000, 5_000, 6e3, 3e3)]
    first, second = roofline.points([*calls, record("b", "copy", 0, 1_000, 0.0, 4e3)])
    assert (first.label, second.label) == ("a", "b")
    assert first.gflops == pytest.approx(2.0) and first.gbs == pytest.approx(1.0) and first.intensity == 2.0
    assert first.share == pytest.approx(0.8)


def test_scales():
    scale = Scale(0.5, 50.0, 100.0, 300.0, log=True)
    assert scale(5.0) == pytest.approx(200.0) and list(scale.ticks()) == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])
    linear = Scale(0.0, 12.0, 0.0, 120.0)
    assert linear(3.0) == 30.0 and list(linear.ticks()) == [0, 2, 4, 6, 8, 10, 12]
    assert [round_step(x) for x in (0.13, 1.0, 3.0, 70.0)] == pytest.approx([0.2, 1.0, 5.0, 100.0])
    assert [number_text(x) for x in (0, 0.25, 5000.0, 1e-5)] == ["0", "0.25", "5,000", "1e-05"]


def test_canvas(tmp_path):
    canvas = Canvas(60, 40)
    canvas.rect(1, 2, 3, 4, "#ff0000", title='<"&>')
    canvas.line([(0, 0), (60, 40)], dashes=(3.0, 2.0))
    canvas.circle(30, 20, 5, "#00ff00")
    canvas.text(5, 30, "a < b × µ", 8, turned=True)
    canvas.write(tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert next(root.iter(f"{SVG}title")).text == '<"&>' and next(root.iter(f"{SVG}text")).text == "a < b × µ"
    image = pytest.importorskip("PIL.Image")
    canvas.write(tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as picture:
        assert picture.size == (120, 80) and picture.getpixel((60, 40)) == (0, 255, 0)
    assert shortened("a/long/path/to/Relu", 10, 60).endswith("Relu") and shortened("abc", 10, 100) == "abc"


# -- recording ------------------------------------------------------------------------------------------------------


def test_records_of_steps_have_estimated_work(dense):
    session = rv.load(dense, providers=("reference",), optimization="none")
    with session.profile() as profiler:
        session.run({"x": np.ones((3, 4), np.float32)})
    found = {r.kernel: r for r in profiler.records()}
    assert set(found) == {"MatMul", "Add", "Relu", "Softmax"}
    assert found["MatMul"].flops == 2 * 3 * 4 * 5 and found["MatMul"].bytes == 4 * (12 + 20 + 15)
    (run,) = profiler.runs()
    assert all(run[0] <= r.start_ns <= r.end_ns <= run[1] for r in profiler.records())


def test_bodies_have_estimated_work_too(branching):
    session = rv.load(branching, providers=("reference",), optimization="none")
    with session.profile() as profiler:
        session.run({"c": np.array(True), "x": np.ones(3, np.float32)})
    inner = next(r for r in profiler.records() if r.kernel == "Neg")
    assert inner.flops == 3 and inner.bytes == 24


def test_kernels_stand_for_their_step(dense, tmp_path):
    session = rv.load(dense, providers=("reference",), optimization="none")
    with session.profile() as profiler:
        session.run({"x": np.ones((3, 4), np.float32)})
        step = next(e for e in profiler.events if e.op == "MatMul")
        middle = (step.start + step.end) // 2
        halves = [(step.start, middle, "pack"), (middle, step.end, "gemm 6x64")]
        profiler.add_kernels(
            KernelRecord("multiply", name, "native", start, end, 1e3, 1e2, 2) for start, end, name in halves
        )
    assert [r.kernel for r in profiler.records()] == ["pack", "gemm 6x64", "Add", "Relu", "Softmax"]
    rows = {row.op: row for row in profiler.summary()}
    assert "MatMul" not in rows and rows["gemm 6x64"].provider == "native"
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    profiler.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["threads"] for e in events if e.get("cat") == "gemm 6x64"] == [2]


# -- the command ----------------------------------------------------------------------------------------------------


def test_command_draws(call_json, dense, tmp_path, monkeypatch):
    monkeypatch.setattr(profile_command, "_peaks", lambda threads: Peaks())
    first, second = tmp_path / "new" / "timeline.svg", tmp_path / "roofline.svg"
    options = ("--repeat", 3, "--provider", "reference", "--timeline", first, "--roofline", second)
    found = call_json("profile", dense, *options)
    assert found["timeline"] == str(first) and found["roofline"] == str(second) and found["trace"] is None
    assert all(n["gflops"] >= 0 and n["provider"] == "reference" for n in found["slowest_nodes"])
    for path in (first, second):
        assert "dense.onnx" in path.read_text()
    assert "100 GFLOP/s" in second.read_text()


def test_command_names_what_it_cannot_draw(call, dense, tmp_path):
    result = call("profile", dense, "--provider", "reference", "--timeline", tmp_path / "timeline.pdf")
    assert result.exit_code == exit_codes.USAGE and ".svg or .png" in result.stderr
    assert not (tmp_path / "timeline.pdf").exists()
