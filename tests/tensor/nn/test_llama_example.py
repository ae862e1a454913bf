"""The example that lets a language model of a GGUF file answer, on a small one that is made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import llama as example

import ranvier as rv
from ranvier.weights import WeightLoader

gguf = pytest.importorskip("gguf")
Array = np.ndarray[Any, Any]
WIDTH, HEADS, SHARED, INNER, BLOCKS, WORDS = 64, 4, 2, 96, 2, 300
EPSILON, BASE = 1e-5, 5000.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """A file, and the numbers that are in it."""
    path, rng = tmp_path_factory.mktemp("llama") / "small.gguf", np.random.default_rng(8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    pairs = ["l l", "h e", "he ll", "hell o", "Ġ w", "Ġw o"]
    words = ["<|im_start|>", "<|im_end|>", *letters, *(pair.replace(" ", "") for pair in pairs)]
    words += [f"unused{k}" for k in range(WORDS - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (WORDS - 2)])
    writer.add_token_merges(pairs)
    writer.add_eos_token_id(1)
    numbers: dict[str, Array] = {}

    def add(name: str, shape: tuple[int, ...], kind: Any = None) -> None:
        array = (rng.standard_normal(shape) * (0.15 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        if kind is None:
            numbers[name] = array
            writer.add_tensor(f"{name}.weight", array)
        else:
            coded = gguf.quants.quantize(array, kind)
            numbers[name] = gguf.quants.dequantize(coded, kind)
            writer.add_tensor(f"{name}.weight", coded, raw_dtype=kind)

    kinds = gguf.GGMLQuantizationType
    add("token_embd", (WORDS, WIDTH), kinds.Q8_0)
    for k in range(BLOCKS):
        half = WIDTH * SHARED // HEADS
        add(f"blk.{k}.attn_norm", (WIDTH,))
        add(f"blk.{k}.attn_q", (WIDTH, WIDTH), kinds.Q4_0)
        add(f"blk.{k}.attn_k", (half, WIDTH), kinds.Q4_1)
        add(f"blk.{k}.attn_v", (half, WIDTH), kinds.Q5_0)
        add(f"blk.{k}.attn_output", (WIDTH, WIDTH), kinds.Q5_1)
        add(f"blk.{k}.ffn_norm", (WIDTH,))
        add(f"blk.{k}.ffn_gate", (INNER, WIDTH), kinds.Q4_0)
        add(f"blk.{k}.ffn_up", (INNER, WIDTH))
        add(f"blk.{k}.ffn_down", (WIDTH, INNER), kinds.Q8_0)
    add("output_norm", (WIDTH,))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path, numbers


def by_definition(w: dict[str, Array], tokens: list[int]) -> Array:
    """Scores after each token, in plain NumPy and double."""

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name])

    def turned(x: Array) -> Array:  # [tokens, heads, size], pairs of neighbours
        size = x.shape[-1]
        angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(0, size, 2) / size)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    w = {name: array.astype(np.float64) for name, array in w.items()}
    x, count = w["token_embd"][tokens], len(tokens)
    for k in range(BLOCKS):
        n = norm(x, f"blk.{k}.attn_norm")
        q, key, v = (n @ w[f"blk.{k}.attn_{each}"].T for each in "qkv")
        q, key, v = (each.reshape(count, -1, WIDTH // HEADS) for each in (q, key, v))
        q, key = turned(q), turned(key)
        key, v = (np.repeat(each, HEADS // SHARED, axis=1) for each in (key, v))
        likes = np.einsum("ihd,jhd->hij", q, key) / np.sqrt(WIDTH // HEADS)
        likes = np.where(np.tri(count, dtype=bool), likes, -np.inf)
        shares = np.exp(likes - likes.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", shares, v).reshape(count, -1) @ w[f"blk.{k}.attn_output"].T
        n = norm(x, f"blk.{k}.ffn_norm")
        gate = n @ w[f"blk.{k}.ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w[f"blk.{k}.ffn_up"].T)) @ w[f"blk.{k}.ffn_down"].T
    return np.asarray(norm(x, "output_norm") @ w["token_embd"].T)


def test_scores_are_those_of_the_definition(made: tuple[Path, dict[str, Array]]) -> None:
    path, numbers = made
    model = example.Llama(WeightLoader(offline=True).open(path), "float32").eval()
    tokens = [5, 17, 42, 7, 99, 280]
    wanted = by_definition(numbers, tokens)
    model.begin(8)
    step = rv.jit(model.forward)
    found = [step(rv.Tensor(np.array(tokens[:3])), rv.Tensor(np.int64(0))).numpy()]  # a prompt, then one by one
    found += [
        step(rv.Tensor(np.array([token])), rv.Tensor(np.int64(3 + k))).numpy() for k, token in enumerate(tokens[3:])
    ]
    np.testing.assert_allclose(found, wanted[2:], rtol=1e-3, atol=1e-3)
    assert step.graphs == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_the_same_again(made: tuple[Path, dict[str, Array]], temperature: float) -> None:
    path, numbers = made
    model = example.Llama(WeightLoader(offline=True).open(path), "float32").eval()
    runs = [[t for t, _ in example.answer(model, [5, 17, 42], 1, 5, temperature, 3)] for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) <= 5
    if not temperature:
        assert runs[0][0] == int(by_definition(numbers, [5, 17, 42])[-1].argmax())


def test_words(made: tuple[Path, dict[str, Array]]) -> None:
    vocabulary = example.Vocabulary(WeightLoader(offline=True).open(made[0]).notes)
    found = vocabulary.encode("<|im_start|>hello world 12\n<|im_end|>")
    assert [vocabulary.tokens[t] for t in found] == [
        "<|im_start|>", "hello", "Ġwo", "r", "l", "d", "Ġ", "1", "2", "Ċ", "<|im_end|>",
    ]  # fmt: skip
    assert b"".join(vocabulary.decode(t) for t in found[1:-1]) == b"hello world 12\n"
    with pytest.raises(SystemExit, match="byte pairs"):
        example.Vocabulary({"tokenizer.ggml.model": "llama"})
