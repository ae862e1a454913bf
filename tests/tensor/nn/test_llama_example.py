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
WIDTH, HEADS, SHARED, INNER, BLOCKS, WORDS, EXPERTS, CHOSEN = 64, 4, 2, 96, 2, 300, 5, 2
EPSILON, BASE = 1e-5, 5000.0


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3moe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """A file, and the numbers that are in it."""
    return written(tmp_path_factory.mktemp("llama") / "small.gguf", request.param)


def written(path: Path, kind: str) -> tuple[Path, dict[str, Array]]:
    rng = np.random.default_rng(8)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(BLOCKS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    if kind == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(CHOSEN)
        writer.add_expert_feed_forward_length(INNER)
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    pairs = ["l l", "h e", "he ll", "hell o", "Ġ w", "Ġw o", "( w"]
    words = ["<|im_start|>", "<|im_end|>", *letters, *(pair.replace(" ", "") for pair in pairs)]
    words += [f"unused{k}" for k in range(WORDS - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if kind == "llama" else "qwen2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (WORDS - 2)])
    writer.add_token_merges(pairs)
    writer.add_eos_token_id(1)
    numbers: dict[str, Array] = {}

    def add(name: str, shape: tuple[int, ...], kind: Any = None) -> None:
        array = (rng.standard_normal(shape) * (0.15 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        own = name if name.endswith(".bias") else f"{name}.weight"
        if kind is None:
            numbers[name] = array
            writer.add_tensor(own, array)
        else:
            coded = gguf.quants.quantize(array, kind)
            numbers[name] = gguf.quants.dequantize(coded, kind)
            writer.add_tensor(own, coded, raw_dtype=kind)

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
        if kind == "qwen2":
            for each, count in (("q", WIDTH), ("k", half), ("v", half)):
                add(f"blk.{k}.attn_{each}.bias", (count,))
        if kind != "qwen3moe":
            add(f"blk.{k}.ffn_gate", (INNER, WIDTH), kinds.Q4_0)
            add(f"blk.{k}.ffn_up", (INNER, WIDTH))
            add(f"blk.{k}.ffn_down", (WIDTH, INNER), kinds.Q8_0)
            continue
        add(f"blk.{k}.attn_q_norm", (WIDTH // HEADS,))
        add(f"blk.{k}.attn_k_norm", (WIDTH // HEADS,))
        add(f"blk.{k}.ffn_gate_inp", (EXPERTS, WIDTH))
        add(f"blk.{k}.ffn_gate_exps", (EXPERTS, INNER, WIDTH), kinds.Q4_1)
        add(f"blk.{k}.ffn_up_exps", (EXPERTS, INNER, WIDTH), kinds.Q4_1)
        add(f"blk.{k}.ffn_down_exps", (EXPERTS, WIDTH, INNER), kinds.Q8_0 if k else kinds.Q5_1)
    add("output_norm", (WIDTH,))
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path, numbers


def by_definition(kind: str, w: dict[str, Array], tokens: list[int]) -> Array:
    """Scores after each token, in plain NumPy and double."""

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name])

    def turned(x: Array) -> Array:  # [tokens, heads, size], pairs of neighbours, or of one in each half
        size = x.shape[-1]
        angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(0, size, 2) / size)
        one, other = (x[..., 0::2], x[..., 1::2]) if kind == "llama" else np.split(x, 2, axis=-1)
        pairs = (one + 1j * other) * np.exp(1j * angles)[:, None]
        both = pairs.real, pairs.imag
        return np.stack(both, axis=-1).reshape(x.shape) if kind == "llama" else np.concatenate(both, axis=-1)

    def gated(x: Array, gate: Array, up: Array, down: Array) -> Array:
        opened = x @ gate.T
        return np.asarray((opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T)

    def mixed(x: Array, name: str) -> Array:
        found = np.zeros_like(x)
        for t, row in enumerate(x):
            likes = w[f"{name}.ffn_gate_inp"] @ row
            best = np.argsort(-likes)[:CHOSEN]
            shares = np.exp(likes[best]) / np.exp(likes[best]).sum()
            for share, e in zip(shares, best):
                found[t] += share * gated(row, *(w[f"{name}.ffn_{of}_exps"][e] for of in ("gate", "up", "down")))
        return found

    w = {name: array.astype(np.float64) for name, array in w.items()}
    x, count = w["token_embd"][tokens], len(tokens)
    for k in range(BLOCKS):
        n = norm(x, f"blk.{k}.attn_norm")
        q, key, v = (n @ w[f"blk.{k}.attn_{each}"].T + w.get(f"blk.{k}.attn_{each}.bias", 0) for each in "qkv")
        q, key, v = (each.reshape(count, -1, WIDTH // HEADS) for each in (q, key, v))
        if kind == "qwen3moe":
            q, key = norm(q, f"blk.{k}.attn_q_norm"), norm(key, f"blk.{k}.attn_k_norm")
        q, key = turned(q), turned(key)
        key, v = (np.repeat(each, HEADS // SHARED, axis=1) for each in (key, v))
        likes = np.einsum("ihd,jhd->hij", q, key) / np.sqrt(WIDTH // HEADS)
        likes = np.where(np.tri(count, dtype=bool), likes, -np.inf)
        shares = np.exp(likes - likes.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", shares, v).reshape(count, -1) @ w[f"blk.{k}.attn_output"].T
        n = norm(x, f"blk.{k}.ffn_norm")
        if kind == "qwen3moe":
            x = x + mixed(n, f"blk.{k}")
        else:
            x = x + gated(n, *(w[f"blk.{k}.ffn_{of}"] for of in ("gate", "up", "down")))
    return np.asarray(norm(x, "output_norm") @ w["token_embd"].T)


def test_scores_are_those_of_the_definition(made: tuple[Path, dict[str, Array]]) -> None:
    path, numbers = made
    tensors = WeightLoader(offline=True).open(path)
    model = example.Llama(tensors, "float32").eval()
    tokens = [5, 17, 42, 7, 99, 280]
    wanted = by_definition(tensors.notes["general.architecture"], numbers, tokens)
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
    tensors = WeightLoader(offline=True).open(path)
    model = example.Llama(tensors, "float32").eval()
    runs = [[t for t, _ in example.answer(model, [5, 17, 42], 1, 5, temperature, 3)] for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) <= 5
    if not temperature:
        assert runs[0][0] == int(
            by_definition(tensors.notes["general.architecture"], numbers, [5, 17, 42])[-1].argmax()
        )


def test_words(tmp_path: Path) -> None:
    found = {}
    for kind in ("llama", "qwen2"):
        vocabulary = example.Vocabulary(WeightLoader(offline=True).open(written(tmp_path / kind, kind)[0]).notes)
        tokens = vocabulary.encode("<|im_start|>hello(world) 12\n\n<|im_end|>")
        found[kind] = [vocabulary.tokens[t] for t in tokens]
        assert b"".join(vocabulary.decode(t) for t in tokens[1:-1]) == b"hello(world) 12\n\n"
    rest = ["r", "l", "d", ")", "Ġ", "1", "2"]
    assert found["llama"] == ["<|im_start|>", "hello", "(", "w", "o", *rest, "Ċ", "Ċ", "<|im_end|>"]
    assert found["qwen2"] == ["<|im_start|>", "hello", "(w", "o", *rest, "Ċ", "Ċ", "<|im_end|>"]
    with pytest.raises(SystemExit, match="byte pairs"):
        example.Vocabulary({"tokenizer.ggml.model": "llama"})


def test_other_networks_are_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "other.gguf", "mamba")
    with pytest.raises(SystemExit, match="mamba"):
        example.Llama(WeightLoader(offline=True).open(path))
