"""Comparing, describing and drawing numbers."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest

from ranvier.cli import values
from ranvier.cli.render import Output, bytes_text, count_text, plain, seconds_text


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (np.array([1.0, 2.0]), np.array([1.0, 2.0]), 0.0),
        (np.array([1.0, 2.0]), np.array([1.0, 4.0]), 0.5),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 0.0),
        (np.array([np.inf]), np.array([np.inf]), 0.0),
        (np.array([np.nan]), np.array([1.0]), math.inf),
        (np.array([1], np.int32), np.array([1], np.int64), math.inf),
        (np.zeros((1, 2)), np.zeros((2, 1)), math.inf),
        (np.zeros(0), np.zeros(0), 0.0),
        (np.array(["a"], object), np.array(["a"]), 0.0),
        (np.array(["a"], object), np.array(["b"]), math.inf),
        ([np.ones(1)], [np.ones(1)], 0.0),
        ([np.ones(1)], [], math.inf),
        ({"k": np.float32(1)}, {"k": np.float32(1)}, 0.0),
        ({"k": 1.0}, {"j": 1.0}, math.inf),
        (None, None, 0.0),
        (None, np.ones(1), math.inf),
    ],
)
def test_difference(ours, theirs, expected):
    assert values.difference(ours, theirs) == expected


def test_description_is_json(capsys):
    odd = [
        np.array([1.5, np.nan, -np.inf], np.float32),
        np.array([0.5], ml_dtypes.bfloat16),
        np.array([3], ml_dtypes.int4),
        np.array([1 + 2j]),
        np.array(["s"], object),
        np.array(True),
        [np.ones(2)],
        {1: 0.5},
        None,
    ]
    Output(json=True).emit([values.describe(x) for x in odd])
    found = json.loads(capsys.readouterr().out)
    assert found[0]["values"] == [1.5, "NaN", "-Infinity"]
    assert found[1]["type"] == "bfloat16[1]" and found[2]["values"] == [3]
    assert [values.head_text(x) for x in odd[5:]] == ["True", "float64[2]", "1: 0.5", "None"]


def test_probabilities_only():
    assert values.top_classes(np.array([[0.1, 0.2, 0.7]]))[0][0] == (2, 0.7)
    assert values.top_classes(np.array([[1.0, 2.0, 3.0]])) == []
    assert values.top_classes(np.array([0.5, 0.5])) == []


def test_numbers_for_people():
    assert [count_text(n) for n in (0, 4096, 1.5e6, 2.56e11)] == ["0", "4,096", "1.5 M", "256 G"]
    assert [bytes_text(n) for n in (None, 12, 1500, 6.6e6)] == ["unknown", "12 B", "1.5 kB", "6.6 MB"]
    assert [seconds_text(s) for s in (1.3e-5, 4.314e-3, 0.25, 2.051)] == ["13 µs", "4.31 ms", "250 ms", "2.05 s"]
    assert plain({"a": (np.int64(1), np.float32(0.5))}) == {"a": [1, 0.5]}
