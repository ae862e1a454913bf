"""Let a language model answer, with weights that stay in few bits: python examples/llama.py model.gguf "a question"

Any GGUF file of a Llama or a Qwen, also one with experts, and with a vocabulary of byte pairs will do
(`general.architecture` llama, qwen2, qwen3, qwen3moe; `tokenizer.ggml.model` gpt2), such as SmolLM2. The network is
written with ranvier.nn in the names of the file. Layers keep the codes they have there. One call reads the prompt, and
every further one is a token after all before it.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

import ranvier as rv
from ranvier import nn
from ranvier import numpy as rnp
from ranvier.nn import functional as F
from ranvier.weights import WeightLoader
from ranvier.weights.quantized import quantized_layers

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "qwen3moe": False}  # whether neighbours turn together


class Parts:
    """What a network is made of, by the names of the file."""

    def __init__(self, tensors: Any, activations: str) -> None:
        self.tensors, self.activations, self.layers = tensors, activations, quantized_layers(tensors)
        self.kind = str(tensors.notes.get("general.architecture"))
        if self.kind not in ARCHITECTURES:
            raise SystemExit(f"only {', '.join(ARCHITECTURES)} are known here, not {self.kind!r}")

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def note(self, name: str, otherwise: Any = None) -> Any:
        return self.tensors.notes.get(f"{self.kind}.{name}", otherwise)

    def numbers(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name].read(), np.float32)

    def linear(self, name: str) -> nn.Module:
        bias = self.numbers(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        if name in self.layers:
            return nn.QuantizedLinear(self.layers[name], bias, activations=self.activations)
        weight = self.numbers(f"{name}.weight")
        layer = holding(nn.Linear(*weight.shape[::-1], bias=bias is not None), weight)
        if bias is not None:
            layer.bias.assign(bias)
        return layer

    def table(self, name: str) -> nn.Module:
        if name in self.layers:
            return nn.QuantizedEmbedding(self.layers[name])
        weight = self.numbers(f"{name}.weight")
        return holding(nn.Embedding(*weight.shape), weight)

    def norm(self, name: str) -> nn.Module:
        weight = self.numbers(f"{name}.weight")
        return holding(nn.RMSNorm(len(weight), eps=float(self.note("attention.layer_norm_rms_epsilon"))), weight)


def holding(module: Any, weight: np.ndarray) -> nn.Module:
    module.weight.assign(weight)
    module.weight.requires_grad = False
    return module


class Gated(nn.Module):
    """Two layers, one of which opens and closes the other, and a third that leads back."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.gate, self.up, self.down = (parts.linear(f"{name}.ffn_{each}") for each in ("gate", "up", "down"))

    def forward(self, x: rv.Tensor) -> rv.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixed(nn.Module):
    """Many of these, of which a token visits the few that suit it best."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        gate, up, down = (parts.layers[f"{name}.ffn_{each}_exps"] for each in ("gate", "up", "down"))
        chosen = int(parts.note("expert_used_count"))
        self.gate_inp = parts.linear(f"{name}.ffn_gate_inp")
        self.exps = nn.QuantizedExperts(up, down, gate, top_k=chosen, activations=parts.activations)

    def forward(self, x: rv.Tensor) -> rv.Tensor:
        return self.exps(x, self.gate_inp(x))


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm and added to what came in."""

    def __init__(self, name: str, parts: Parts) -> None:
        super().__init__()
        self.heads = int(parts.note("attention.head_count"))
        self.shared = int(parts.note("attention.head_count_kv", self.heads))
        self.base, self.neighbours = float(parts.note("rope.freq_base", 10000.0)), ARCHITECTURES[parts.kind]
        self.attn_norm, self.ffn_norm = parts.norm(f"{name}.attn_norm"), parts.norm(f"{name}.ffn_norm")
        self.attn_q, self.attn_k, self.attn_v, self.attn_output = (
            parts.linear(f"{name}.attn_{each}") for each in ("q", "k", "v", "output")
        )
        self.attn_q_norm, self.attn_k_norm = (
            parts.norm(each) if (each := f"{name}.attn_{of}_norm") in parts else nn.Identity() for of in "qk"
        )
        self.ffn = (Mixed if f"{name}.ffn_gate_inp" in parts else Gated)(name, parts)

    def begin(self, length: int) -> None:
        """Room for the keys and values of so many tokens; there are none yet."""
        size = self.attn_k.out_features // self.shared
        for name in ("keys", "values"):
            self.register_buffer(name, np.zeros((self.shared, length, size), np.float32), persistent=False)

    def forward(self, x: rv.Tensor, positions: rv.Tensor, seen: rv.Tensor) -> rv.Tensor:
        normed = self.attn_norm(x)
        q, k, v = (
            rnp.permute_dims(rnp.reshape(layer(normed), (x.shape[0], heads, -1)), (1, 0, 2))
            for layer, heads in ((self.attn_q, self.heads), (self.attn_k, self.shared), (self.attn_v, self.shared))
        )
        q, k = (
            F.rotary_embedding(each, positions, self.base, interleaved=self.neighbours)
            for each in (self.attn_q_norm(q), self.attn_k_norm(k))
        )
        keys, values = (with_these(held, positions, now) for held, now in ((self.keys, k), (self.values, v)))
        found = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=True)
        x = x + self.attn_output(rnp.reshape(rnp.permute_dims(found, (1, 0, 2)), (x.shape[0], -1)))
        return x + self.ffn(self.ffn_norm(x))


def with_these(held: Any, positions: rv.Tensor, rows: rv.Tensor) -> rv.Tensor:
    """What is held, with these rows at their positions from now on."""
    found = held.value
    found[:, positions] = rows
    held.assign(found)
    return found


class Llama(nn.Module):
    """Tokens [length], the first at a position, to scores of the token that comes next."""

    def __init__(self, tensors: Any, activations: str = "int8") -> None:
        super().__init__()
        parts = Parts(tensors, activations)
        self.token_embd = parts.table("token_embd")
        count = range(int(parts.note("block_count")))
        told = track(count, "reading layers", transient=True, console=Console(stderr=True))
        self.blk = nn.ModuleList([Block(f"blk.{k}", parts) for k in told])
        self.output_norm = parts.norm("output_norm")
        self.output = parts.linear("output" if "output" in parts else "token_embd")  # small models have one for both

    def begin(self, length: int) -> None:
        self.length = length
        for block in self.blk:
            block.begin(length)

    def forward(self, tokens: rv.Tensor, start: rv.Tensor) -> rv.Tensor:
        x = self.token_embd(tokens)
        positions = start + rnp.arange(tokens.shape[0])
        seen = rnp.arange(self.length)[None, :] <= positions[:, None]
        for block in self.blk:
            x = block(x, positions, seen)
        return self.output(self.output_norm(x[-1:]))[0]


class Vocabulary:
    """Text as pairs of bytes that were joined in the order of a list, as GPT-2 has it, and back."""

    def __init__(self, notes: Mapping[str, Any]) -> None:
        kind = notes.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise SystemExit(f"only vocabularies of byte pairs are known here, not {kind!r}")
        self.tokens = list(notes["tokenizer.ggml.tokens"])
        self.numbers = {token: k for k, token in enumerate(self.tokens)}
        self.ranks = {tuple(pair.split(" ")): k for k, pair in enumerate(notes["tokenizer.ggml.merges"])}
        special = [t for t, kind in zip(self.tokens, notes["tokenizer.ggml.token_type"]) if kind == 3]
        self.special = frozenset(special)
        self._apart = re.compile("(" + "|".join(map(re.escape, special)) + ")")
        # letters with a space before them, digits one by one, signs, spaces
        words = r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?[^\s\w]+|_+|\s+(?!\S)|\s+"
        if notes.get("tokenizer.ggml.pre") == "qwen2":  # letters with a sign before them, too, and ends of lines
            words = (
                r"'(?i:[sdmt]|ll|ve|re)|(?:[^\w\r\n]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        self._words = re.compile(words)
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
        others = [b for b in range(256) if b not in plain]
        self._letters = {b: chr(b) for b in plain} | {b: chr(256 + k) for k, b in enumerate(others)}
        self._bytes = {letter: b for b, letter in self._letters.items()}
        self.end = int(notes["tokenizer.ggml.eos_token_id"])

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        for piece in self._apart.split(text):
            if piece in self.special:
                found.append(self.numbers[piece])
            else:
                for word in self._words.findall(piece):
                    found += self._joined([self._letters[b] for b in word.encode()])
        return found

    def _joined(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in pairwise(parts)]
            best = min(ranks)
            if best == len(self.ranks):
                break
            k = ranks.index(best)
            parts[k : k + 2] = [parts[k] + parts[k + 1]]
        return [self.numbers[part] for part in parts]

    def decode(self, token: int) -> bytes:
        return bytes(self._bytes[letter] for letter in self.tokens[token])


def answer(
    model: Llama, prompt: list[int], end: int, most: int, temperature: float, seed: int
) -> Iterator[tuple[int, float]]:
    """Tokens, each with the seconds it took; the first has the prompt's."""
    model.begin(len(prompt) + most)
    step, rng = rv.jit(model.forward), np.random.default_rng(seed)
    given, start = np.array(prompt), 0
    for _ in range(most):
        begun = time.perf_counter()
        row = step(rv.Tensor(given), rv.Tensor(np.int64(start))).numpy().astype(np.float64)
        if temperature:
            likely = np.exp((row - row.max()) / temperature)
            token = int(rng.choice(len(row), p=likely / likely.sum()))
        else:
            token = int(row.argmax())
        yield token, time.perf_counter() - begun
        if token == end:
            return
        start += len(given)
        given = np.array([token])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("question")
    parser.add_argument("--tokens", type=int, default=128, help="at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--activations", default="int8", choices=["float32", "bf16", "int8"])
    options = parser.parse_args()
    tensors = WeightLoader().open(options.model)
    vocabulary = Vocabulary(tensors.notes)
    model = Llama(tensors, options.activations).eval()
    text = f"<|im_start|>user\n{options.question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = vocabulary.encode(text if "<|im_start|>" in vocabulary.special else options.question)
    times = []
    for token, seconds in answer(model, prompt, vocabulary.end, options.tokens, options.temperature, options.seed):
        times.append(seconds)
        if token != vocabulary.end:
            print(vocabulary.decode(token).decode(errors="replace"), end="", flush=True)
    later = sorted(times[2:])  # the first two also compile
    rate = f", {1 / later[len(later) // 2]:.0f} tokens a second" if later else ""
    print(f"\n{len(prompt)} tokens of prompt, {len(times)} of answer{rate}")


if __name__ == "__main__":
    main()
