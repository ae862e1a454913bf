"""Patterns of names: those of real checkpoints, any against Python's own matcher, and those it would never end with."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranvier.errors import WeightError
from ranvier.weights.quantized.patterns import _followed, _parsed, matches


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (".*", "lm_head", None),
        (".*lm_head", "model.lm_head", "model.head"),
        (".*mlp.gate$", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        (".*self_attn.(q|k|v)_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"),
        (r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj", "model.layers.11.mlp.up_proj.x", "model.layers..mlp.up_proj"),
        (
            r".*\.layers\.(0|1[0-9]|2[0-3])\.((self_attn|mlp)\.(.*_proj|[a-z]+))$",
            "m.layers.23.mlp.fc",
            "m.layers.24.mlp.fc",
        ),
        (r"^(?!.*\bnorm\b).*experts\.\d{1,3}\..*", "a.experts.255.up", "norm.experts.255.up"),
    ],
)
def test_patterns_that_checkpoints_have(pattern: str, yes: str, no: str | None) -> None:
    followed = _parsed(pattern)
    assert matches(pattern, yes) and _followed(followed, yes)
    assert no is None or not (matches(pattern, no) or _followed(followed, no))


_PIECES = st.sampled_from(["a", "b", ".", r"\.", r"\w", "[ab]", "[^a]", "[]a-b]", "{", "^", "$", r"\b", r"\B", r"\Z"])
_PATTERNS = st.recursive(
    _PIECES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.builds("({}{}){}".format, st.sampled_from(["", "?:", "?P<n>"]), inner, st.just("")),
        st.builds("({}{})".format, st.sampled_from(["?=", "?!"]), inner),
        st.builds(
            "(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{2,}", "{,}"])
        ),
    ),
    max_leaves=8,
)


@given(_PATTERNS, st.text("ab.\n{", max_size=7))
@settings(max_examples=200, deadline=None)
def test_patterns_mean_what_they_mean_to_python(pattern: str, name: str) -> None:
    try:
        expected = re.match(pattern, name) is not None
    except re.error:
        with pytest.raises(WeightError):
            matches(pattern, name)
    else:
        assert matches(pattern, name) == expected
        assert _followed(_parsed(pattern), name) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|aa)+b",
        "(a*)*b",
        ".*" * 30 + "b",
        "(((a?){999}){999}){999}b",
        "(((a{9}){9}){9}){9}",
        "a?" * 60 + "a" * 60 + "b",
    ],
)
@pytest.mark.parametrize("length", [60, 4000])
def test_patterns_that_would_take_for_ever(pattern: str, length: int) -> None:
    assert not matches(pattern, "a" * length)


@pytest.mark.parametrize("pattern", ["(a(?:" + "|".join(["a*b"] * 200) + ")|a)*b", "(?:(?=a*b)|a)*c"])
def test_patterns_that_take_too_long_all_the_same(pattern: str) -> None:
    with pytest.raises(WeightError, match="more than 200000 steps"):
        matches(pattern, "a" * 1000)
    with pytest.raises(WeightError, match="has 100000 characters"):
        matches(pattern, "a" * 100_000)
