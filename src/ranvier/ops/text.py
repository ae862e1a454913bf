"""Strings: object arrays of ``str``, element by element, and the counting of n-grams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue, ShapeMismatch
from ranvier.ops.allocation import checked_shape
from ranvier.ops.linear_regex import full_matcher
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array, op


@op("StringConcat", since=20, traits=("elementwise",))
def string_concat(X: Array, Y: Array) -> Array:
    try:
        joined = X + Y
    except ValueError:
        raise ShapeMismatch(
            f"StringConcat: shapes {list(X.shape)} and {list(Y.shape)} do not broadcast together"
        ) from None
    return np.asarray(joined, object)


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
def regex_full_match(X: Array, *, pattern: str) -> Array:
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
    pool = _gram_pool(pool_int64s, pool_strings, ngram_counts, ngram_indexes, weights)
    tokens = pool.token_ids(X.reshape(1, -1) if X.ndim == 1 else X)
    rows = tokens.shape[0]
    shape = checked_shape((rows, pool.width), np.float32, "TfIdfVectorizer")
    counts = np.zeros(rows * pool.width, np.int64)
    for length in range(min_gram_length, min(max_gram_length, len(pool.grams)) + 1):
        for skip in range(max_skip_count + 1 if length > 1 else 1):  # a single token skips nothing
            row, gram = pool.find(tokens, length, skip + 1)
            counts += np.bincount(row * pool.width + pool.columns[gram], minlength=counts.size)
    result: Array = counts.reshape(shape).astype(np.float32)
    if mode == "IDF":
        result = np.minimum(result, 1)
    if mode != "TF":
        result = result * pool.column_weights
    return result if X.ndim == 2 else result[0]


@dataclass(frozen=True)
class _GramLevel:
    """All n-grams of one length: ``steps[k]`` holds, sorted, the prefixes of k + 2 tokens as (prefix, token) keys."""

    steps: tuple[Array, ...]
    first_gram: int  # position of this length's first n-gram in the whole pool
    by_prefix: Array  # complete prefix -> n-gram of this length
    length: int


@dataclass(frozen=True)
class _GramPool:
    vocabulary: Array | dict[str, int]  # sorted integers, or words
    tokens: int  # size of the vocabulary
    grams: tuple[_GramLevel | None, ...]  # by length - 1; None where the pool has none
    columns: Array  # n-gram -> output column
    column_weights: Array
    width: int

    def token_ids(self, X: Array) -> Array:
        """Positions in the vocabulary, -1 for tokens outside of it."""
        if isinstance(self.vocabulary, dict):
            if X.dtype != object:
                raise DTypeMismatch(f"TfIdfVectorizer: pool_strings needs a string input, got {X.dtype.name}")
            lookup = self.vocabulary
            return np.fromiter((lookup.get(token, -1) for token in X.flat), np.int64, X.size).reshape(X.shape)
        if X.dtype.kind not in "iu":
            raise DTypeMismatch(f"TfIdfVectorizer: pool_int64s needs an integer input, got {X.dtype.name}")
        return _positions(self.vocabulary, X.astype(np.int64))

    def find(self, tokens: Array, length: int, stride: int) -> tuple[Array, Array]:
        """Row and n-gram of every occurrence in ``tokens`` [N, C] of an n-gram whose tokens lie ``stride`` apart."""
        level = self.grams[length - 1]
        starts = tokens.shape[1] - stride * (length - 1)
        if level is None or starts <= 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        prefix = tokens[:, :starts]
        for k, known in enumerate(level.steps, start=1):
            token = tokens[:, k * stride : k * stride + starts]
            found = _positions(known, prefix * self.tokens + token)
            prefix = np.where((prefix >= 0) & (token >= 0), found, -1)
        if length == 1:  # any word of the vocabulary got here; it need not be a 1-gram
            prefix = np.where(prefix >= 0, level.by_prefix[prefix], -1)
            row, column = np.nonzero(prefix >= 0)
            return row, level.first_gram + prefix[row, column]
        row, column = np.nonzero(prefix >= 0)
        return row, level.first_gram + level.by_prefix[prefix[row, column]]


@prepared
def _gram_pool(
    pool_int64s: Sequence[int] | None,
    pool_strings: Sequence[str] | None,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    weights: Sequence[float] | None,
) -> _GramPool:
    if bool(pool_int64s) == bool(pool_strings):
        raise InvalidValue("TfIdfVectorizer: exactly one of pool_int64s and pool_strings must be given")
    vocabulary: Array | dict[str, int]
    if pool_strings:
        vocabulary = {word: k for k, word in enumerate(dict.fromkeys(pool_strings))}
        ids = np.fromiter(map(vocabulary.__getitem__, pool_strings), np.int64, len(pool_strings))
    else:
        vocabulary, ids = np.unique(np.asarray(pool_int64s, np.int64), return_inverse=True)
    levels, total = _levels(ids, len(vocabulary), ngram_counts)
    columns = np.asarray(ngram_indexes, np.int64)
    if columns.size != total or columns.min(initial=0) < 0:
        raise InvalidValue(
            f"TfIdfVectorizer: ngram_indexes needs one column >= 0 for each of {total} n-grams, got {columns.size}"
        )
    width = int(columns.max(initial=-1)) + 1
    column_weights = np.ones(checked_shape((width,), np.float32, "TfIdfVectorizer"), np.float32)
    if weights:
        if len(weights) != columns.size:
            raise InvalidValue(f"TfIdfVectorizer: expected {columns.size} weights, got {len(weights)}")
        column_weights[columns] = weights
    return _GramPool(vocabulary, len(vocabulary), tuple(levels), columns, column_weights, width)


def _levels(ids: Array, tokens: int, starts: Sequence[int]) -> tuple[list[_GramLevel | None], int]:
    """The n-grams of each length, and how many there are in all."""
    ends = [*starts[1:], len(ids)]
    levels: list[_GramLevel | None] = []
    total = 0
    for length, (start, end) in enumerate(zip(starts, ends), start=1):
        if not 0 <= start <= end <= len(ids) or (end - start) % length:
            raise InvalidValue(
                f"TfIdfVectorizer: ngram_counts {list(starts)} does not cut a pool of {len(ids)} into n-grams"
            )
        grams = ids[start:end].reshape(-1, length)
        levels.append(_level(grams, tokens, total) if len(grams) else None)
        total += len(grams)
    return levels, total


def _level(grams: Array, tokens: int, first_gram: int) -> _GramLevel:
    prefix = grams[:, 0]
    steps = []
    for k in range(1, grams.shape[1]):
        known, prefix = np.unique(prefix * tokens + grams[:, k], return_inverse=True)
        steps.append(known)
    by_prefix = np.full(len(steps[-1]) if steps else tokens, -1, np.int64)
    by_prefix[prefix] = np.arange(len(grams))
    if np.count_nonzero(by_prefix >= 0) != len(grams):
        raise InvalidValue(f"TfIdfVectorizer: the pool holds an n-gram of length {grams.shape[1]} twice")
    return _GramLevel(tuple(steps), first_gram, by_prefix, grams.shape[1])


def _positions(sorted_values: Array, wanted: Array) -> Any:
    """Where each wanted value stands among the sorted ones, -1 where it does not."""
    at = np.searchsorted(sorted_values, wanted)
    at = np.minimum(at, len(sorted_values) - 1)
    return np.where(sorted_values[at] == wanted, at, -1)
