"""Walks over a file far away: right bytes, and a time near that of the better way, on lines of every kind."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ranvier.errors import WeightError
from ranvier.weights.blob import Bytes
from ranvier.weights.formats import windows
from ranvier.weights.formats.windows import Windows

HEAD = 100  # bytes that are looked at of each tensor
MB = 1 << 20


class Line:
    """A file whose bytes tell where they stand, behind a line that takes its time; the time is pretended."""

    name, near = "m.onnx", False

    def __init__(self, size: int, wait: float, rate: float) -> None:
        self.size, self._wait, self._rate = size, wait, rate
        self.seconds, self.requests, self.nbytes = 0.0, 0, 0

    def read(self, start: int, stop: int) -> Bytes:
        self.seconds += self._wait + (stop - start) / self._rate
        self.requests += 1
        self.nbytes += stop - start
        return np.arange(start, stop, dtype=np.int64).astype(np.uint8)

    def read_many(self, ranges: object) -> list[Bytes]:
        raise NotImplementedError


def walked(monkeypatch: pytest.MonkeyPatch, sizes: list[int], wait: float, rate: float) -> Line:
    starts = np.cumsum([0, *(HEAD + size for size in sizes)]).tolist()
    line = Line(starts[-1], wait, rate)
    monkeypatch.setattr(windows, "time", SimpleNamespace(monotonic=lambda: line.seconds))
    seen = Windows(line, 1 << 20)
    for start in starts[:-1]:
        assert seen[start : start + HEAD] == bytes((start + k) % 256 for k in range(HEAD))
        assert seen[start] == start % 256
    return line


@pytest.mark.parametrize("sizes", [[MB, 2048] * 50, [MB // 2] * 60, [50_000] * 400, [20 * MB] * 12])
@pytest.mark.parametrize(("wait", "rate"), [(0.001, 1e9), (0.03, 1e7), (0.1, 1e7), (0.3, 3e7), (0.4, 1e8)])
def test_about_as_long_as_the_better_way(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], wait: float, rate: float
) -> None:
    line = walked(monkeypatch, sizes, wait, rate)
    whole = wait + line.size / rate
    each = len(sizes) * (wait + (1 << 16) / rate)
    assert line.seconds < 2.1 * min(whole, each) + 12 * wait
    if wait < windows._WAIT and max(sizes) > 2 * MB:
        assert line.nbytes < 0.02 * line.size, "nearby nothing is read but what is looked at"


def test_a_line_that_becomes_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(400 * MB, 0.3, 1e8)
    monkeypatch.setattr(windows, "time", SimpleNamespace(monotonic=lambda: line.seconds))
    seen = Windows(line, 1 << 20)
    for start in range(0, 200 * MB, MB):
        seen[start]
    assert seen._least == windows._MOST
    line._rate = 1e6
    for start in range(200 * MB, 400 * MB, 2 * MB):
        seen[start]
    assert seen._least <= MB, "what takes long is asked for in smaller pieces"


def test_places_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(1000, 0.0, 1e9)
    seen = Windows(line, 1)
    assert seen[999] == 999 % 256
    with pytest.raises(WeightError):
        seen[990:1001]
    with pytest.raises(WeightError, match="too many places"):
        seen[0]
