"""Decoding runs of a small Llama: prompts and steps against float64, in place and not, and in how many launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ranvier as rv  # noqa: E402
from bench.models import llama  # noqa: E402
from ranvier.errors import InvalidValue  # noqa: E402
from ranvier.providers.cuda import decode  # noqa: E402
from ranvier.providers.cuda.kernels import choose  # noqa: E402
from ranvier.providers.cuda.kernels.jit import Tile  # noqa: E402
from tests.torch.device import options as provider_options  # noqa: E402

Array = np.ndarray[Any, Any]
SIZES = llama.Sizes(layers=2, width=32, heads=8, kv_heads=2, inside=32, vocabulary=16, context=72)
CAPACITY = 70  # more than a tile of the attention kernel: its splits are joined
TOKENS = np.random.default_rng(3).integers(0, SIZES.vocabulary, 7)
PROMPT = 4


@pytest.fixture(scope="module", params=[16, 4], ids=["bf16", "int4"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.write(tmp_path_factory.mktemp("llama"), request.param, SIZES)


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """The interpreter takes its time for every program."""
    with mock.patch.object(choose, "gemv_tile", lambda *_: Tile(16, 256, 1)):
        yield


class Exact:
    """The model in float64, all tokens at once."""

    def __init__(self, path: Path) -> None:
        arrays = iter([a for name, a in llama.weights(path).items() if "/weight_" in name])
        self.coded = "int4" in path.name

        def take() -> Array:
            return np.asarray(next(arrays))

        def matrix(inside: int) -> Array:
            if not self.coded:
                return take().astype(np.float64)
            packed, scales = take(), take().astype(np.float64)
            codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, -1).astype(np.float64)
            wide: Array = ((codes - 8) * scales[..., None]).reshape(-1, inside).T
            return wide

        width = SIZES.width
        self.table, self.cos, self.sin, self.first = (take().astype(np.float64) for _ in range(4))
        self.layers = []
        for _ in range(SIZES.layers):
            q, k, v, o = (matrix(width) for _ in range(4))
            norm = take().astype(np.float64)
            gate, up, down = matrix(width), matrix(width), matrix(SIZES.inside)
            self.layers.append((q, k, v, o, norm, gate, up, down, take().astype(np.float64)))
        self.head = matrix(width)

    def __call__(self, tokens: Array) -> tuple[Array, list[Array]]:
        """Logits of every token, and the keys and values ``[heads, tokens, D]`` of every layer."""
        x = self.table[tokens]
        y = _norm(x, self.first)
        kept: list[Array] = []
        for q, k, v, o, norm, gate, up, down, after in self.layers:
            queries, keys = (self._turned(_heads(y @ w)) for w in (q, k))
            values = _heads(y @ v)
            kept += [keys, values]
            group = SIZES.heads // SIZES.kv_heads
            scores = queries @ keys.repeat(group, axis=0).swapaxes(1, 2) / np.sqrt(SIZES.depth)
            scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights / weights.sum(-1, keepdims=True) @ values.repeat(group, axis=0)
            x = x + mixed.swapaxes(0, 1).reshape(len(tokens), -1) @ o
            y = _norm(x, norm)
            opened = y @ gate
            x = x + (opened / (1 + np.exp(-opened)) * (y @ up)) @ down
            y = _norm(x, after)
        return y @ self.head, kept

    def _turned(self, x: Array) -> Array:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _norm(x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    return normed


def _heads(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, SIZES.depth).swapaxes(0, 1)


def _caches(batch: int = 1) -> dict[str, Array]:
    """What stands past the end of a sequence must not matter."""
    rng = np.random.default_rng(9)
    shape = (batch, SIZES.kv_heads, CAPACITY, SIZES.depth)
    names = [f"past_key_values.{k}.{part}" for k in range(SIZES.layers) for part in ("key", "value")]
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name in names}


def _inputs(tokens: Array, total: int) -> dict[str, Array]:
    last = np.full(tokens.shape[0], total - 1, np.int32)
    return {"input_ids": tokens, "seqlens_k": last, "total_sequence_length": np.asarray(total, np.int32)}


def _off(found: Any, wanted: Array) -> float:
    """The root mean square of the error over that of what is exact."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted))


def _load(path: Path, **options: Any) -> Any:
    given = provider_options(triton=True, **options)
    return rv.load(path, providers=["cuda", "reference"], provider_options=given, fallback="off")


@pytest.fixture
def made() -> Iterator[list[Counter[str]]]:
    """How many steps of each kind every variant has."""
    seen: list[Counter[str]] = []
    whole = decode.Decoding.__call__

    def watched(self: Any, *given: Any) -> Any:
        steps = whole(self, *given)
        seen.append(Counter(type(getattr(step, "step", step)).__name__ for step in steps))
        return steps

    with mock.patch.object(decode.Decoding, "__call__", watched):
        yield seen


LAUNCHES = Counter(LookUpStep=1, LengthsStep=1, ProductStep=4 * SIZES.layers + 1, DecodeStep=SIZES.layers)


def test_a_prompt_and_the_steps_after_it(path: Path, made: list[Counter[str]]) -> None:
    wanted, kept = Exact(path)(TOKENS)
    state = _caches()
    with _load(path, cuda_graphs=True) as session:
        for repeated in range(2):  # the first run of some sizes is torch's
            found = session.run({**_inputs(TOKENS[None, :PROMPT], PROMPT), **state})
            assert _off(found["logits"][0], wanted[:PROMPT]) < 0.03, repeated
        for at in range(PROMPT, len(TOKENS)):
            state = {f"past_key_values.{name[8:]}": found[name] for name in found if name != "logits"}
            found = session.run({**_inputs(TOKENS[None, at : at + 1], at + 1), **state})
            assert _off(found["logits"][0, 0], wanted[at]) < 0.03, at
        presents = [found[name] for name in found if name != "logits"]
        for present, exact in zip(presents, kept):
            assert _off(present[0, :, : len(TOKENS)], exact) < 0.03
            assert not present[0, :, len(TOKENS) :].any()
    assert len(made) == 2  # one for the prompt, one for all steps
    assert made[0]["PromptStep"] == SIZES.layers and made[1] == LAUNCHES


def test_steps_in_place(path: Path, made: list[Counter[str]]) -> None:
    wanted, kept = Exact(path)(TOKENS)
    with _load(path, cuda_graphs=True) as session:
        found = session.run({**_inputs(TOKENS[None, :PROMPT], PROMPT), **_caches()})
        provider = session.providers[0]
        state = {f"past_key_values.{name[8:]}": found[name] for name in found if name != "logits"}
        given = {**_inputs(TOKENS[None, PROMPT : PROMPT + 1], PROMPT + 1), **state}
        tensors = dict(zip(given, provider.hand_out(provider.upload(list(given.values())))))
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        replaced = {name.replace("past_key_values", "present"): name for name in state}
        run = session.tied(tensors, replaced)
        for at in range(PROMPT, PROMPT + 2):
            tensors["input_ids"].fill_(int(TOKENS[at]))
            tensors["seqlens_k"].fill_(at)
            results = run()
            assert _off(results["logits"].float().cpu().numpy()[0, 0], wanted[at]) < 0.03, at
        for (present, past), exact in zip(replaced.items(), kept):
            assert results[present].data_ptr() == addresses[past]
            assert _off(results[present].float().cpu().numpy()[0, :, : at + 1], exact[:, : at + 1]) < 0.03
    assert made[-1] == LAUNCHES


def test_sequences_of_different_lengths(path: Path, made: list[Counter[str]]) -> None:
    """Two sequences, of which one is shorter, decode together; each as if it were alone."""
    exact = Exact(path)
    lengths = (2, 6)
    state = _caches(2)
    for row, length in enumerate(lengths):
        for cache, right in zip(state.values(), exact(TOKENS[:length])[1]):
            cache[row, :, :length] = right.astype(ml_dtypes.bfloat16)
    given = {
        "input_ids": np.array([[TOKENS[n]] for n in lengths]),
        "seqlens_k": np.array(lengths, np.int32),
        "total_sequence_length": np.asarray(max(lengths) + 1, np.int32),
    }
    with _load(path) as session:
        for _ in range(2):
            found = session.run({**given, **state})["logits"]
            for row, length in enumerate(lengths):
                assert _off(found[row, 0], exact(TOKENS[: length + 1])[0][-1]) < 0.03
    assert made[0]["DecodeStep"] == SIZES.layers and made[0]["ProductStep"] == 4 * SIZES.layers + 1


def test_inputs_that_are_wrong_are_told_and_touch_nothing(tmp_path: Path) -> None:
    given = {**_inputs(TOKENS[None, :1], 3), **_caches()}
    with _load(llama.write(tmp_path, 16, SIZES)) as session:
        session.run(given)
        fine = session.run(given)["logits"]
        for name, value in (("input_ids", 16), ("input_ids", -17), ("seqlens_k", CAPACITY), ("seqlens_k", -1)):
            with pytest.raises(InvalidValue):
                session.run({**given, name: np.full_like(given[name], value)})
        np.testing.assert_array_equal(session.run(given)["logits"], fine)
