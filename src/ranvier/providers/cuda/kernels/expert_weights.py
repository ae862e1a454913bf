"""Weights of layers of experts, and the order in which kernels want tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CODINGS = {"": 0, "int2": 2, "int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}  # and their bits; 0: numbers as they are


@dataclass(frozen=True)
class Experts:
    """A linear layer for each expert: ``weights`` [experts, n, k] of floats, or as many bytes as their codes take, low
    bits first; ``scales`` [experts, n / square, groups], ``zeros`` bytes or floats that can be read as [experts, n,
    groups], ``whole`` [experts], ``bias`` [experts, n]."""

    coding: str
    weights: torch.Tensor
    n: int
    k: int
    group: int  # inputs that share a scale
    scales: torch.Tensor | None = None
    square: int = 1  # outputs that share it
    zeros: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return CODINGS[self.coding]

    @property
    def middle(self) -> int:
        """The code of zero where there are no zero points; 0 for codes that are floats."""
        return 1 << (self.bits - 1) if self.coding.startswith("int") else 0

    @property
    def groups(self) -> int:
        return -(-self.k // self.group)

    # -- as words of 32 bits ------------------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        """Codes of a word. Those of equal place make a plane."""
        return 32 // self.bits if self.coding else 1

    @property
    def suits_kernels(self) -> bool:
        """Rows and groups are of whole words."""
        return self.k % self.planes == 0 and (self.groups == 1 or self.group % self.planes == 0)

    @property
    def words(self) -> torch.Tensor:
        return self.weights.view(torch.int32) if self.coding else self.weights

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.k // self.planes

    @property
    def lane(self) -> int:
        """Words that a thread reads at once: 16 bytes, and no more than share a scale."""
        size = 4 if self.coding else max(1, 16 // self.weights.element_size())
        even = self.width if self.groups == 1 else self.group // self.planes
        while self.width % size or even % size:
            size //= 2
        return size

    def words_of_group(self, size: int) -> int:
        """How many times ``size`` words share a scale; 0 where all of a row do."""
        return self.group // self.planes // size if self.groups > 1 else 0


def in_planes(x: torch.Tensor, planes: int) -> torch.Tensor:
    """Rows with the elements of each plane side by side."""
    if planes == 1:
        return x
    rows, features = x.shape
    return x.reshape(rows, features // planes, planes).mT.reshape(rows, features)
