"""Counting n-grams of a fixed pool in rows of tokens, all rows at once.

Tokens become positions in a vocabulary. An n-gram is then found token by token: the pool's prefixes of k tokens are
numbered, and a prefix of k + 1 tokens is the pair (number of its first k tokens, last token). Looking up the pairs of
all positions of all rows is one binary search per token of the n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranvier.errors import DTypeMismatch, InvalidValue
from ranvier.ops.prepared import prepared
from ranvier.ops.registry import Array
from ranvier.records import dataclass


@dataclass(frozen=True)
class _Level:
    """All n-grams of one length."""

    longer_prefixes: tuple[Array, ...]  # for 2, 3, … tokens: the known pairs, sorted; a pair's place is its number
    gram_of_prefix: Array  # number of a complete prefix -> n-gram of the pool, -1 where it is none


@dataclass(frozen=True)
class GramPool:
    """The n-grams to look for, numbered from 0 to ``size`` - 1 in the order of the pool."""

    vocabulary: Array | dict[str, int]  # sorted integers, or words with their positions
    levels: tuple[_Level | None, ...]  # by length - 1; None where the pool has no n-gram of that length
    size: int

    def token_ids(self, tokens: Array) -> Array:
        """Positions in the vocabulary, -1 for tokens outside of it."""
        words = self.vocabulary
        if isinstance(words, dict):
            if tokens.dtype != object:
                raise DTypeMismatch(f"TfIdfVectorizer: pool_strings needs a string input, got {tokens.dtype.name}")
            return np.fromiter((words.get(t, -1) for t in tokens.flat), np.int64, tokens.size).reshape(tokens.shape)
        if tokens.dtype.kind not in "iu":
            raise DTypeMismatch(f"TfIdfVectorizer: pool_int64s needs an integer input, got {tokens.dtype.name}")
        return _positions(words, tokens.astype(np.int64))

    def count(self, ids: Array, shortest: int, longest: int, max_skip: int) -> Array:
        """How often each n-gram occurs in each row of token ids, with up to ``max_skip`` tokens left out between two.

        An n-gram of one token has nothing between, so it counts once whatever the skip.
        """
        rows = len(ids)
        counts = np.zeros(rows * self.size, np.int64)
        for length in range(shortest, min(longest, len(self.levels)) + 1):
            level = self.levels[length - 1]
            reach = ids.shape[1] - 1  # a larger stride than the row is long finds nothing
            for stride in range(1, (min(max_skip + 1, reach) if length > 1 else 1) + 1):
                if level is not None:
                    row, gram = self._find(level, ids, length, stride)
                    counts += np.bincount(row * self.size + gram, minlength=counts.size)
        return counts.reshape(rows, self.size)

    def _find(self, level: _Level, ids: Array, length: int, stride: int) -> tuple[Array, Array]:
        """Row and n-gram of every occurrence whose tokens lie ``stride`` apart."""
        starts = max(ids.shape[1] - stride * (length - 1), 0)
        prefix = ids[:, :starts]
        for k, known in enumerate(level.longer_prefixes, start=1):
            token = ids[:, k * stride : k * stride + starts]
            pair = _positions(known, prefix * len(self.vocabulary) + token)
            prefix = np.where((prefix >= 0) & (token >= 0), pair, -1)
        gram = np.where(prefix >= 0, level.gram_of_prefix[prefix], -1)
        row, column = np.nonzero(gram >= 0)
        return row, gram[row, column]


@prepared
def gram_pool(
    pool_int64s: Sequence[int] | None, pool_strings: Sequence[str] | None, ngram_counts: Sequence[int]
) -> GramPool:
    """The pool in TfIdfVectorizer's attributes: the 1-grams, the 2-grams …; ``ngram_counts`` says where each starts."""
    if bool(pool_int64s) == bool(pool_strings):
        raise InvalidValue("TfIdfVectorizer: exactly one of pool_int64s and pool_strings must be given")
    vocabulary: Array | dict[str, int]
    if pool_strings:
        vocabulary = {word: k for k, word in enumerate(dict.fromkeys(pool_strings))}
        ids = np.fromiter(map(vocabulary.__getitem__, pool_strings), np.int64, len(pool_strings))
    else:
        vocabulary, ids = np.unique(np.asarray(pool_int64s, np.int64), return_inverse=True)
    levels: list[_Level | None] = []
    size = 0
    ends = [*ngram_counts[1:], len(ids)]
    for length, (start, end) in enumerate(zip(ngram_counts, ends), start=1):
        if not 0 <= start <= end <= len(ids) or (end - start) % length:
            raise InvalidValue(
                f"TfIdfVectorizer: ngram_counts {list(ngram_counts)} does not cut a pool of {len(ids)} into n-grams"
            )
        grams = ids[start:end].reshape(-1, length)
        levels.append(_level(grams, len(vocabulary), size) if len(grams) else None)
        size += len(grams)
    return GramPool(vocabulary, tuple(levels), size)


def _level(grams: Array, vocabulary_size: int, first_gram: int) -> _Level:
    prefix = grams[:, 0]
    longer_prefixes: list[Array] = []
    for token in grams.T[1:]:
        known, prefix = np.unique(prefix * vocabulary_size + token, return_inverse=True)
        longer_prefixes.append(known)
    gram_of_prefix = np.full(len(longer_prefixes[-1]) if longer_prefixes else vocabulary_size, -1, np.int64)
    gram_of_prefix[prefix] = first_gram + np.arange(len(grams))
    if np.count_nonzero(gram_of_prefix >= 0) != len(grams):
        raise InvalidValue(f"TfIdfVectorizer: the pool holds an n-gram of length {grams.shape[1]} twice")
    return _Level(tuple(longer_prefixes), gram_of_prefix)


def _positions(sorted_values: Array, wanted: Array) -> Array:
    """Where each wanted value stands among the sorted ones, -1 where it is not among them."""
    at = np.minimum(np.searchsorted(sorted_values, wanted), len(sorted_values) - 1)
    return np.where(sorted_values[at] == wanted, at, -1)
