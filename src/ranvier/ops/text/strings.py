"""Strings: object arrays of ``str``, element by element, and vectors made of words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ranvier.errors import InvalidValue, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.operands import common_shape
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array, op
from ranvier.ops.text.linear_regex import full_matcher
from ranvier.ops.text.ngrams import gram_pool


@op("StringConcat", since=20, traits=("elementwise",))
def string_concat(X: Array, Y: Array) -> Array:
    common_shape("StringConcat", X, Y)
    return np.asarray(X + Y, object)  # two 0-d arrays add up to a bare str


@op("StringSplit", since=20)
def string_split(X: Array, *, delimiter: str = "", maxsplit: int | None = None) -> tuple[Array, Array]:
    limit = -1 if maxsplit is None else maxsplit
    # split() drops white space around the last piece only when it splits there; a limit would leave it
    pieces = [text.split(delimiter, limit) if delimiter else text.strip().split(None, limit) for text in X.flat]
    counts = np.fromiter(map(len, pieces), np.int64, len(pieces))
    width = int(counts.max(initial=0))
    result = np.full(checked_shape((X.size, width), object, "StringSplit"), "", object)
    for row, parts in zip(result, pieces):
        row[: len(parts)] = parts
    return result.reshape(*X.shape, width), counts.reshape(X.shape)


@op("RegexFullMatch", since=20)
def regex_full_match(X: Array, *, pattern: str | None = None) -> Array:
    if pattern is None:
        raise InvalidValue("RegexFullMatch: the attribute 'pattern' is missing")
    matches = full_matcher(pattern)
    return np.fromiter(map(matches, X.flat), np.bool_, X.size).reshape(X.shape)


@op("StringNormalizer", since=10)
def string_normalizer(
    X: Array,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "",
    stopwords: Sequence[str] = (),
) -> Array:
    if X.ndim not in (1, 2) or (X.ndim == 2 and X.shape[0] != 1) or X.size == 0:
        raise ShapeMismatch(f"StringNormalizer: expected a shape [C] or [1, C] with C > 0, got {list(X.shape)}")
    lower, upper = _case_changes(locale)
    changes: dict[str, Callable[[str], str]] = {"LOWER": lower, "UPPER": upper, "NONE": str}
    if case_change_action not in changes:
        raise InvalidValue(
            f"StringNormalizer: case_change_action must be one of {', '.join(changes)}, got {case_change_action!r}"
        )
    key = str if is_case_sensitive else lower
    dropped = {key(word) for word in stopwords}
    kept = [text for text in X.flat if key(text) not in dropped] if dropped else list(X.flat)
    words = [changes[case_change_action](text) for text in kept] or [""]
    return np.array(words, object).reshape((1, -1) if X.ndim == 2 else -1)


def _case_changes(locale: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Lower and upper case by Unicode's rules; of all locales, only the Turkic ones differ in them (dotless i)."""
    language = locale.replace("-", "_").split("_")[0].split(".")[0].lower()
    if language not in ("tr", "az"):
        return str.lower, str.upper
    return (
        lambda text: text.replace("İ", "i").replace("I", "ı").lower(),
        lambda text: text.replace("i", "İ").upper(),
    )


@op("TfIdfVectorizer", since=9)
def tf_idf_vectorizer(
    X: Array,
    *,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    pool_int64s: Sequence[int] | None = None,
    pool_strings: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> Array:
    if mode not in ("TF", "IDF", "TFIDF"):
        raise InvalidValue(f"TfIdfVectorizer: mode must be TF, IDF or TFIDF, got {mode!r}")
    if not 1 <= min_gram_length <= max_gram_length or max_skip_count < 0:
        raise InvalidValue(
            "TfIdfVectorizer: expected 1 <= min_gram_length <= max_gram_length and max_skip_count >= 0, got "
            f"{min_gram_length}, {max_gram_length} and {max_skip_count}"
        )
    if X.ndim not in (1, 2):
        raise ShapeMismatch(f"TfIdfVectorizer: expected a shape [C] or [N, C], got {list(X.shape)}")
    pool = gram_pool(pool_int64s, pool_strings, ngram_counts)
    columns, scale = _gram_columns(pool.size, ngram_indexes, weights)
    tokens = pool.token_ids(X.reshape(1, -1) if X.ndim == 1 else X)
    shape = checked_shape((len(tokens), int(columns.max(initial=-1)) + 1), np.float32, "TfIdfVectorizer")
    checked_shape((len(tokens), pool.size), np.float64, "TfIdfVectorizer")
    counts = pool.count(tokens, min_gram_length, max_gram_length, max_skip_count)
    if mode == "IDF":
        counts = np.minimum(counts, 1)
    result = np.zeros(shape, np.float32)
    np.add.at(result.T, columns, (counts if mode == "TF" else counts * scale).T)  # n-grams may share a column
    return result if X.ndim == 2 else result[0]


@prepared
def _gram_columns(grams: int, ngram_indexes: Sequence[int], weights: Sequence[float] | None) -> tuple[Array, Array]:
    """The output column and the weight of every n-gram of the pool."""
    columns = np.asarray(ngram_indexes, np.int64)
    if columns.size != grams or columns.min(initial=0) < 0:
        raise InvalidValue(
            f"TfIdfVectorizer: ngram_indexes needs a column >= 0 for each of {grams} n-grams, got {columns.size}"
        )
    if weights and len(weights) != grams:
        raise InvalidValue(f"TfIdfVectorizer: expected a weight for each of {grams} n-grams, got {len(weights)}")
    return columns, np.asarray(weights, np.float32) if weights else np.ones(grams, np.float32)
