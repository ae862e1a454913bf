"""Numbers that vary: arithmetic for all calls at once, and which calls decide as the first does."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable

import numpy as np
import pytest

from ranvier.varying import Span, content, follow, following, largest, most, smallest, value_at, varies, whole


def test_arithmetic_is_that_of_every_call() -> None:
    span = Span(20)
    n = span.growing(7, 3)
    found = [
        n + 1, 5 - n, n * n, -n, abs(-n), n // 4, -(-n // 16), 100 // n, n % 5, n / 2, 1.0 * n, n & 6, n >> 1,
        math.prod((2, n, 3)), sum([1, n, n]), round(n / 4), math.ceil(n / 4), math.floor(n / 4), *divmod(n, 3),
        np.int64(3) * n, np.float64(0.5) * n,
    ]  # fmt: skip
    for call in range(20):
        m = 7 + 3 * call
        wanted = [
            m + 1, 5 - m, m * m, -m, abs(-m), m // 4, -(-m // 16), 100 // m, m % 5, m / 2, 1.0 * m, m & 6, m >> 1,
            math.prod((2, m, 3)), sum([1, m, m]), round(m / 4), math.ceil(m / 4), math.floor(m / 4), *divmod(m, 3),
            np.int64(3) * m, np.float64(0.5) * m,
        ]  # fmt: skip
        assert value_at(found, call) == tuple(wanted)
    assert span.calls == 20


def test_what_stays_the_same_is_a_plain_number() -> None:
    n = Span(9).growing(4, 1)
    assert type(n - (n - 1)) is int and n - (n - 1) == 1
    assert Span(9).growing(4, 0) == 4


def test_seen_as_a_number() -> None:
    n = Span(4).growing(3, 1)
    assert isinstance(n, int) and not isinstance(n, float)
    assert isinstance(n / 2, float) and not isinstance(n / 2, int)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
@pytest.mark.parametrize("bound", [0, 10, 13, 40])
def test_a_decision_keeps_the_calls_that_agree(compare: Callable[[int, int], bool], bound: int) -> None:
    span = Span(16)
    n = span.growing(10, 1)
    first = compare(n, bound)
    assert first is compare(10, bound)
    assert [bool(v) for v in span.valid] == [compare(10 + k, bound) is first for k in range(16)]


@pytest.mark.parametrize(
    "need",
    [int, operator.index, hash, float, str, repr, lambda n: range(n), lambda n: [0] * n, lambda n: np.zeros(n),
     lambda n: np.array([n], np.int64), lambda n: {n: 1}, lambda n: f"{n}", lambda n: "abcdefghij"[n:]],
)  # fmt: skip
def test_where_the_number_itself_is_needed_only_calls_with_the_same_stay(need: Callable[[int], object]) -> None:
    span = Span(5)
    need(span.growing(3, 1))
    assert span.calls == 1


def test_a_cut_off_fraction_keeps_the_calls_with_the_same_whole() -> None:
    span = Span(9)
    assert int(span.growing(8, 1) / 4) == 2
    assert span.calls == 4


def test_calls_where_something_is_divided_by_zero_are_not_of_the_span() -> None:
    span = Span(5)
    assert varies(12 // span.growing(3, -1))
    assert span.calls == 3
    with pytest.raises(ZeroDivisionError):
        1 // Span(3).growing(0, 1)


def test_programs_follow_as_if_each_call_ran_alone() -> None:
    """Random arithmetic with decisions in it: where the span says so, every call gets what it would get alone."""

    def program(a: int, b: int, rng: random.Random) -> list[int]:
        values = [a, b, 3]
        for _ in range(12):
            x, y = rng.choice(values), rng.choice(values)
            kind = rng.randrange(6)
            if kind == 0:
                values.append(x + y)
            elif kind == 1:
                values.append(x - y)
            elif kind == 2:
                values.append(x // (abs(y) + 1))
            elif kind == 3:
                values.append(max(x, y))
            elif kind == 4:
                values.append(-(-x // 8) * 8)
            else:
                values.append(x * 2 if x % 4 == 1 else y)
        return values

    longer = 0
    for seed in range(60):
        span = Span(12)
        found = program(span.growing(20, 1), span.growing(50, 2), random.Random(seed))
        assert span.calls >= 1
        longer += span.calls > 1
        for call in range(12):
            if span.valid[call]:
                assert value_at(found, call) == tuple(program(20 + call, 50 + 2 * call, random.Random(seed)))
    assert longer > 20


def test_helpers() -> None:
    span = Span(6)
    n = span.growing(2, 2)
    assert whole(n) is n and whole(np.int32(4)) == 4 and most(n) == 12 and most(7) == 7
    assert content(n) == content(span.growing(2, 2)) != content(span.growing(3, 2))
    assert varies(n) and not varies(3)
    assert value_at((smallest(n, 5, 9), largest(n, 5)), 0) == (2, 5) and value_at(
        (smallest(n, 5), largest(n, 5)), 5
    ) == (5, 12)
    assert smallest(3, 4) == 3 and largest(3, 4) == 4 and smallest(n, 1) == 1
    assert span.calls == 6
    assert not following()
    with follow(span):
        assert following()
    assert not following()
