"""A GGUF file of a language model with experts and random weights, in the shape of Qwen3-30B-A3B with fewer layers.

    python -m bench.models.random_gguf out.gguf [--kind Q4_K] [--layers 4] [--experts 128] [--chosen 8] [--words 32000]

Kinds of blocks are those of files called Q4_K_M: Q4_K, or another ``--kind``, and Q6_K for what leads back and for the
head. Blocks are random bytes, but for their scales, which let numbers be as large as those of a network that is new.
Four layers are 1.5 GB.
"""

from __future__ import annotations

import argparse
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
WIDTH, INNER, HEADS, SHARED, SIZE = 2048, 768, 32, 4, 128
KINDS = gguf.GGMLQuantizationType
# of a block of 256 weights: bytes; its float16 numbers by where they are: the scale, and what minima are scaled by,
# which makes the mean of weights zero; and bits by their byte, how many and what they are, which let the first group
# have the largest scale (and minimum) that there is, as quantizers do
_BLOCKS = {
    KINDS.Q4_K: (144, {0: 1.2e-4, 2: 9e-4}, {4: (6, 63), 8: (6, 63)}),
    KINDS.Q6_K: (210, {208: 1.6e-5}, {192: (8, 0x80)}),
    KINDS.IQ2_XS: (74, {0: 3.5e-4}, {66: (4, 15)}),
    KINDS.IQ3_S: (110, {0: 1.4e-4}, {106: (4, 15)}),
    KINDS.IQ4_XS: (136, {0: 2e-5}, {2: (2, 0), 4: (4, 0)}),
}


class Writer:
    def __init__(self, path: str, seed: int = 0) -> None:
        self.file = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=True)
        self._rng = np.random.default_rng(seed)

    def coded(self, name: str, shape: tuple[int, ...], kind: Any) -> None:
        size, factors, largest = _BLOCKS[kind]
        blocks = self._rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
        for start, factor in factors.items():
            blocks[..., start : start + 2] = np.frombuffer(np.float16(factor).tobytes(), np.uint8)
        for at, (bits, value) in largest.items():
            blocks[..., at] = blocks[..., at] >> bits << bits | value if bits < 8 else value
        self.file.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def numbers(self, name: str, shape: tuple[int, ...]) -> None:
        array = np.ones(shape, np.float32)
        if len(shape) > 1:
            array = (self._rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        self.file.add_tensor(f"{name}.weight", array)

    def settings(self, layers: int, experts: int, chosen: int, words: int) -> None:
        file = self.file
        file.add_block_count(layers)
        file.add_context_length(4096)
        file.add_embedding_length(WIDTH)
        file.add_feed_forward_length(INNER)
        file.add_head_count(HEADS)
        file.add_head_count_kv(SHARED)
        file.add_key_length(SIZE)
        file.add_value_length(SIZE)
        file.add_rope_freq_base(1e6)
        file.add_layer_norm_rms_eps(1e-6)
        file.add_expert_count(experts)
        file.add_expert_used_count(chosen)
        file.add_expert_feed_forward_length(INNER)
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("qwen2")
        file.add_token_list([f"word{k}" for k in range(words)])
        file.add_token_types([1] * words)
        file.add_token_merges(["w o"])
        file.add_eos_token_id(0)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write(path: str, kind: Any, layers: int, experts: int, chosen: int, words: int) -> None:
    to = Writer(path)
    to.settings(layers, experts, chosen, words)
    to.coded("token_embd", (words, WIDTH), kind)
    for k in range(layers):
        name = f"blk.{k}"
        for norm, size in (("attn", WIDTH), ("ffn", WIDTH), ("attn_q", SIZE), ("attn_k", SIZE)):
            to.numbers(f"{name}.{norm}_norm", (size,))
        to.coded(f"{name}.attn_q", (HEADS * SIZE, WIDTH), kind)
        to.coded(f"{name}.attn_k", (SHARED * SIZE, WIDTH), kind)
        to.coded(f"{name}.attn_v", (SHARED * SIZE, WIDTH), KINDS.Q6_K)
        to.coded(f"{name}.attn_output", (WIDTH, HEADS * SIZE), kind)
        to.numbers(f"{name}.ffn_gate_inp", (experts, WIDTH))
        to.coded(f"{name}.ffn_gate_exps", (experts, INNER, WIDTH), kind)
        to.coded(f"{name}.ffn_up_exps", (experts, INNER, WIDTH), kind)
        to.coded(f"{name}.ffn_down_exps", (experts, WIDTH, INNER), KINDS.Q6_K)
    to.numbers("output_norm", (WIDTH,))
    to.coded("output", (words, WIDTH), KINDS.Q6_K)
    to.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--kind", choices=[kind.name for kind in _BLOCKS], default=KINDS.Q4_K.name)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--words", type=int, default=32000)
    given = parser.parse_args()
    write(given.path, KINDS[given.kind], given.layers, given.experts, given.chosen, given.words)


if __name__ == "__main__":
    main()
