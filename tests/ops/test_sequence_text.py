"""Laws of sequences, optionals and strings; regular expressions against Python's ``re`` and against RE2 itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ranvier.ops.flow.sequence
import ranvier.ops.text.strings  # noqa: F401
from ranvier.errors import DTypeMismatch, InvalidValue, NotSupported, ResourceLimit, ShapeMismatch
from ranvier.ops.allocation import tensor_limit
from ranvier.ops.registry import evaluate
from ranvier.ops.text.linear_regex import full_matcher
from tests.ops.ml_tools import assert_like, onnxruntime_answer


def law(*strategies):
    """``@given`` with few enough examples that the whole file stays quick."""
    return lambda test: settings(max_examples=60, deadline=None)(given(*strategies)(test))


def strings(values) -> np.ndarray:
    return np.array(values, object)


def number(value: int) -> np.ndarray:
    return np.array(value, np.int64)


# -- sequences ---------------------------------------------------------------------------------------------------------

SEQUENCES = st.lists(st.integers(0, 99).map(number), max_size=5)


@law(SEQUENCES, st.integers(-7, 7))
def test_sequences_are_lists(sequence, position):
    before = list(sequence)
    length = len(sequence)
    assert evaluate("SequenceLength", sequence) == length
    if -length <= position < length:
        assert evaluate("SequenceAt", sequence, number(position)) is sequence[position]
        erased = evaluate("SequenceErase", sequence, number(position))
        assert erased == [x for k, x in enumerate(sequence) if k != position % length]
    else:
        for name in ("SequenceAt", "SequenceErase"):
            with pytest.raises(InvalidValue, match=f"^{name}: position {position} is out of range"):
                evaluate(name, sequence, number(position))
    if -length <= position <= length:
        inserted = list(sequence)
        inserted.insert(position, number(-1))
        assert evaluate("SequenceInsert", sequence, number(-1), number(position)) == inserted
    assert sequence == before


@law(SEQUENCES.filter(bool))
def test_the_end_is_the_default_position(sequence):
    longer = evaluate("SequenceInsert", sequence, number(-1))
    assert longer == [*sequence, number(-1)]
    assert evaluate("SequenceErase", longer) == sequence
    assert evaluate("SequenceConstruct", *sequence) == sequence
    assert evaluate("SequenceEmpty", dtype=7) == []


@law(st.integers(0, 5), st.integers(0, 4), st.integers(-2, 1), st.data())
def test_split_and_concat_are_inverse(rows, columns, axis, data):
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    size = x.shape[axis]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    lengths = np.diff([0, *cuts, size]).astype(np.int64)
    parts = evaluate("SplitToSequence", x, lengths, axis=axis)
    assert [p.shape[axis] for p in parts] == lengths.tolist()
    np.testing.assert_array_equal(evaluate("ConcatFromSequence", parts, axis=axis), x)
    chunk = data.draw(st.integers(1, 6))
    parts = evaluate("SplitToSequence", x, number(chunk), axis=axis, keepdims=0)
    assert all(p.shape[axis] == chunk for p in parts[:-1])
    if size:
        np.testing.assert_array_equal(evaluate("ConcatFromSequence", parts, axis=axis), x)
        parts = evaluate("SplitToSequence", x, axis=axis, keepdims=0)
        np.testing.assert_array_equal(evaluate("ConcatFromSequence", parts, axis=axis, new_axis=1), x)


def test_splitting_a_vector_of_strings_gives_scalars():
    parts = evaluate("SplitToSequence", strings(["a", "b"]), keepdims=0)
    assert [(p.shape, p.dtype.kind, p.item()) for p in parts] == [((), "O", "a"), ((), "O", "b")]


def test_optionals():
    x = np.ones(2)
    assert evaluate("Optional", x) is x
    assert evaluate("Optional", None, type=object()) is None
    assert evaluate("OptionalGetElement", [x]) == [x]
    got = [evaluate("OptionalHasElement", value) for value in (x, [], None)]
    assert [g.item() for g in got] == [True, True, False]
    assert all(g.dtype == bool and g.shape == () for g in got)
    assert not evaluate("OptionalHasElement")
    with pytest.raises(InvalidValue, match=r"^OptionalGetElement: the optional is empty"):
        evaluate("OptionalGetElement", None)
    with pytest.raises(InvalidValue, match=r"^Optional: expected an input or the attribute 'type'"):
        evaluate("Optional")


def test_bad_sequences():
    with pytest.raises(DTypeMismatch, match=r"^SequenceConstruct"):
        evaluate("SequenceConstruct", np.ones(1), np.ones(1, np.float32))
    with pytest.raises(DTypeMismatch, match=r"^SequenceInsert"):
        evaluate("SequenceInsert", [np.ones(1)], np.ones(1, np.float32))
    with pytest.raises(InvalidValue, match=r"^SequenceConstruct: expected at least one tensor"):
        evaluate("SequenceConstruct")
    with pytest.raises(ShapeMismatch, match=r"^SequenceAt: 'position' must be a scalar"):
        evaluate("SequenceAt", [np.ones(1)], np.zeros(2, np.int64))
    with pytest.raises(InvalidValue, match="empty sequence"):
        evaluate("ConcatFromSequence", [], axis=0)
    with pytest.raises(ShapeMismatch, match=r"tensor 1 has shape \[2\]"):
        evaluate("ConcatFromSequence", [np.ones(1), np.ones(2)], axis=0, new_axis=1)
    with pytest.raises(InvalidValue, match="axis 2 is out of range"):
        evaluate("ConcatFromSequence", [np.ones(1)], axis=2)
    with pytest.raises(InvalidValue, match=r"lengths \[1, 1\] add up to 2, but axis 0 has 3"):
        evaluate("SplitToSequence", np.ones(3), np.array([1, 1]))
    with pytest.raises(InvalidValue, match="negative"):
        evaluate("SplitToSequence", np.ones(3), np.array([4, -1]))
    with pytest.raises(InvalidValue, match="positive"):
        evaluate("SplitToSequence", np.ones(3), number(0))


# -- strings -----------------------------------------------------------------------------------------------------------


@law(st.lists(st.text(max_size=3), min_size=1, max_size=4), st.text(max_size=3))
def test_string_concat(left, right):
    assert evaluate("StringConcat", strings(left), strings(right)).tolist() == [x + right for x in left]
    scalar = evaluate("StringConcat", strings(left[0]), strings(right))
    assert (scalar.shape, scalar.item()) == ((), left[0] + right)


@law(st.lists(st.text("ab, ", max_size=6), min_size=1, max_size=4), st.sampled_from(["", ",", "ab"]), st.data())
def test_string_split(texts, delimiter, data):
    limit = data.draw(st.none() | st.integers(0, 3))
    attrs = {} if limit is None else {"maxsplit": limit}
    pieces, counts = evaluate("StringSplit", strings(texts), delimiter=delimiter, outputs=2, **attrs)
    assert pieces.shape == (len(texts), max(counts.tolist()))
    for text, row, count in zip(texts, pieces, counts):
        assert limit is None or count <= limit + 1
        assert (row[count:] == "").all()
        if delimiter:
            assert delimiter.join(row[:count]) == text
        else:
            assert "".join(row[:count]).replace(" ", "") == text.replace(" ", "")
            assert all(piece and piece == piece.strip() for piece in row[:count])


def test_string_split_shapes():
    pieces, counts = evaluate("StringSplit", np.empty((2, 0), object), outputs=2)
    assert (pieces.shape, counts.shape, counts.dtype) == ((2, 0, 0), (2, 0), np.int64)
    pieces, counts = evaluate("StringSplit", strings("a b"), outputs=2)
    assert (pieces.tolist(), counts.tolist()) == (["a", "b"], 2)
    with tensor_limit(1000), pytest.raises(ResourceLimit):
        evaluate("StringSplit", strings([","] + ["x" * k + "," * 50 for k in range(9)]), delimiter=",")


@pytest.mark.parametrize(
    ("attrs", "want"),
    [
        ({}, ["Mon", "mon", "İI", "straße"]),
        ({"case_change_action": "LOWER"}, ["mon", "mon", "i̇i", "straße"]),
        ({"case_change_action": "UPPER"}, ["MON", "MON", "İI", "STRASSE"]),
        ({"case_change_action": "LOWER", "locale": "tr_TR.UTF-8"}, ["mon", "mon", "iı", "straße"]),
        ({"case_change_action": "UPPER", "locale": "az"}, ["MON", "MON", "İI", "STRASSE"]),
        ({"stopwords": ("MON",)}, ["İI", "straße"]),
        ({"stopwords": ("mon",), "is_case_sensitive": 1}, ["Mon", "İI", "straße"]),
        ({"stopwords": ("mon", "STRASSE", "straße", "İI"), "case_change_action": "UPPER"}, [""]),
    ],
)
def test_string_normalizer(attrs, want):
    x = strings(["Mon", "mon", "İI", "straße"])
    assert evaluate("StringNormalizer", x, **attrs).tolist() == want
    assert evaluate("StringNormalizer", x[np.newaxis], **attrs).tolist() == [want]


def test_bad_string_normalizers():
    for shape in ((), (2, 2), (0,), (1, 1, 1)):
        with pytest.raises(ShapeMismatch, match=r"^StringNormalizer"):
            evaluate("StringNormalizer", np.full(shape, "a", object))
    with pytest.raises(InvalidValue, match="case_change_action must be one of"):
        evaluate("StringNormalizer", strings(["a"]), case_change_action="TITLE")


# -- regular expressions -----------------------------------------------------------------------------------------------


def patterns() -> st.SearchStrategy[str]:
    """Patterns that mean the same to RE2 and to Python, and cannot make Python backtrack long on short texts."""
    atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\W", r"\b", "^", "$", r"\.", "[b-d1]", "\n"])
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.tuples(inner, inner).map("|".join).map("(?:{})".format),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


@settings(max_examples=300, deadline=None)
@given(patterns(), st.lists(st.text("ab1. \n", max_size=5), min_size=1, max_size=8))
def test_full_matches_like_python(pattern, texts):
    # Python's $ also stands before a last newline, RE2's does not
    python = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    want = [python.fullmatch(text) is not None for text in texts]
    got = evaluate("RegexFullMatch", strings(texts), pattern=pattern)
    assert got.dtype == bool
    assert got.tolist() == want


RE2_PATTERNS = [
    r"(?i)straße|É+",
    r"(?i:a)b",
    r"(?s).+",
    r"(?m)^a$\n^b$",
    r"a$\n",
    r"\pL+\p{Nd}*",
    r"\P{^Lu}x?",
    r"[[:alpha:]]+[[:^digit:]]",
    r"\Qa.b\E*",
    r"[\d\-x]+",
    r"[]a]+",
    r"[^]a]+",
    r"a{,2}",
    r"a{2}|{",
    r"\x41\x{e9}?\101",
    r"\w+\s\S*",
    r"(?P<year>\d{4})-(?P<month>\d\d)",
    r"\Aab\z",
    r"()|(a|b)*?c",
    "",
]


@pytest.mark.parametrize("pattern", RE2_PATTERNS)
def test_full_matches_like_re2(pattern):
    texts = ["", "a", "A", "ab", "AB", "a\nb", "a\n", "É", "é1", "STRASSE", "straße", "x-1", "]]", "a{,2}", "{", "aa"]
    x = strings([*texts, "AéA", "word next", "word\vnext", "2024-05", "a.b", "a.bb", "abc", "c", "é", "π2", "x"])
    want = onnxruntime_answer("RegexFullMatch", x, domain="", version=20, pattern=pattern)
    assert_like(evaluate("RegexFullMatch", x, pattern=pattern), want)


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "*a", "a**", "a++", "[b-a]", "[a", r"\1", "(?=a)", "(?<!a)b", "(?P=n)", "a{2,1}", "a{1001}", r"\Z"]
    + [r"[a-\d]", "[[:word]", "\\", "(?z)", r"\x{110000}", "(?P<>a)", "(" * 200 + ")" * 200, "((a{999}){999}){999}"],
)
def test_patterns_that_re2_refuses(pattern):
    with pytest.raises(InvalidValue, match=r"^RegexFullMatch: "):
        evaluate("RegexFullMatch", strings(["a"]), pattern=pattern)


def test_unsupported_patterns():
    for pattern in (r"\C", r"\p{Greek}"):
        with pytest.raises(NotSupported, match=r"^RegexFullMatch: "):
            evaluate("RegexFullMatch", strings(["a"]), pattern=pattern)
    with pytest.raises(InvalidValue, match="'pattern' is missing"):
        evaluate("RegexFullMatch", strings(["a"]))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*c", "(.*){20}b", "(a?){60}a{60}b"])
def test_no_pattern_backtracks(pattern):
    """Each of these takes a backtracking engine longer than the age of the universe: that it ends is the test."""
    assert not full_matcher(pattern)("a" * 2000)


def test_a_matcher_forgets_states_and_stays_right():
    matches = full_matcher(".*a.{400}")  # has 2⁴⁰⁰ deterministic states
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(["a", "b"], 2000))
    assert matches(text) == (text[-401] == "a")
    assert matches(text + "b") == (text[-400] == "a")


# -- n-grams -----------------------------------------------------------------------------------------------------------


def counted(row: list[int], gram: tuple[int, ...], max_skip: int) -> int:
    """How often an n-gram occurs, by its definition."""
    strides = range(1, max_skip + 2) if len(gram) > 1 else [1]
    return sum(
        tuple(row[start + k * stride] for k in range(len(gram))) == gram
        for stride in strides
        for start in range(len(row) - stride * (len(gram) - 1))
    )


@st.composite
def gram_models(draw):
    by_length = [draw(st.lists(st.tuples(*[st.integers(0, 2)] * n), max_size=3, unique=True)) for n in (1, 2, 3)]
    grams = [gram for level in by_length for gram in level]
    if not grams:
        by_length[0] = grams = [(1,)]
    starts = np.cumsum([0] + [n * len(level) for n, level in enumerate(by_length, start=1)])[:-1].tolist()
    shortest = draw(st.integers(1, 3))
    attrs = {
        "mode": draw(st.sampled_from(["TF", "IDF", "TFIDF"])),
        "ngram_counts": tuple(starts),
        "ngram_indexes": tuple(draw(st.permutations(range(len(grams))))),
        "weights": tuple(draw(st.floats(0.5, 4, width=32)) for _ in grams),
        "max_skip_count": draw(st.integers(0, 3)),
        "min_gram_length": shortest,
        "max_gram_length": draw(st.integers(shortest, 3)),
    }
    return grams, attrs


@settings(max_examples=80, deadline=None)
@given(gram_models(), st.integers(1, 3), st.integers(0, 7), st.booleans(), st.data())
def test_tf_idf_is_its_definition(model, rows, columns, as_words, data):
    grams, attrs = model
    tokens = [[data.draw(st.integers(0, 3)) for _ in range(columns)] for _ in range(rows)]
    want = np.zeros((rows, len(grams)))
    for r, row in enumerate(tokens):
        for gram, column, weight in zip(grams, attrs["ngram_indexes"], attrs["weights"]):
            if attrs["min_gram_length"] <= len(gram) <= attrs["max_gram_length"]:
                count = counted(row, gram, attrs["max_skip_count"])
                want[r, column] = {"TF": count, "IDF": min(count, 1) * weight, "TFIDF": count * weight}[attrs["mode"]]
    pool = tuple(token for gram in grams for token in gram)
    x = np.array(tokens, np.int64).reshape(rows, columns)
    if as_words:
        x = np.array([[str(t) for t in row] for row in tokens], object).reshape(rows, columns)
        attrs["pool_strings"] = tuple(map(str, pool))
    else:
        attrs["pool_int64s"] = pool
    got = evaluate("TfIdfVectorizer", x, **attrs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(evaluate("TfIdfVectorizer", x[0], **attrs), got[0])


def test_tf_idf_like_onnxruntime():
    attrs = {
        "mode": "TFIDF",
        "ngram_counts": (0, 2),
        "ngram_indexes": (2, 0, 1),
        "weights": (10.0, 20.0, 30.0),
        "pool_int64s": (5, 6, 5, 6),
        "max_skip_count": 2,
        "min_gram_length": 1,
        "max_gram_length": 2,
    }
    x = np.array([[5, 6, 6, 5, 6], [6, 6, 6, 0, 5]])
    want = onnxruntime_answer("TfIdfVectorizer", x, domain="", version=9, **attrs)
    assert_like(evaluate("TfIdfVectorizer", x, **attrs), want)


@pytest.mark.parametrize(
    ("error", "complaint", "change"),
    [
        (InvalidValue, "mode must be", {"mode": "BM25"}),
        (InvalidValue, "min_gram_length", {"min_gram_length": 3}),
        (InvalidValue, "exactly one of pool_int64s", {"pool_strings": ("a",)}),
        (InvalidValue, "does not cut a pool", {"ngram_counts": (0, 1)}),
        (InvalidValue, "ngram_indexes needs a column", {"ngram_indexes": (0,)}),
        (InvalidValue, "ngram_indexes needs a column", {"ngram_indexes": (0, 1, -1)}),
        (InvalidValue, "expected a weight", {"weights": (1.0,)}),
        (InvalidValue, "twice", {"pool_int64s": (5, 5, 5, 6)}),
        (ResourceLimit, "tensor_bytes", {"ngram_indexes": (0, 1, 2**40)}),
        (DTypeMismatch, "needs a string input", {"pool_int64s": None, "pool_strings": ("a", "b", "a", "b")}),
    ],
)
def test_bad_tf_idf_models(error, complaint, change):
    attrs = {
        "mode": "TF",
        "ngram_counts": (0, 2),
        "ngram_indexes": (0, 1, 2),
        "pool_int64s": (5, 6, 5, 6),
        "max_skip_count": 0,
        "min_gram_length": 1,
        "max_gram_length": 2,
    }
    with pytest.raises(error, match=complaint):
        evaluate("TfIdfVectorizer", np.array([5, 6]), **attrs | change)
