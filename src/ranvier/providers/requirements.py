"""What somebody needs of a provider, and what each provider lacks of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any, ClassVar

from ranvier import dtypes
from ranvier.dtypes import DType
from ranvier.errors import nearest
from ranvier.providers.base import ProviderCapability
from ranvier.records import dataclass
from ranvier.rules import Checked, Flag, Rule, Text, Whole


class _NameSet(Rule):
    def check(self, value: Any) -> frozenset[str]:
        if isinstance(value, str) or not isinstance(value, Collection):
            raise ValueError(f"must be a set of names, got {value!r}")
        if not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"must hold names only, got {value!r}")
        return frozenset(value)


class _TypeSet(Rule):
    def check(self, value: Any) -> frozenset[DType]:
        if isinstance(value, str) or not isinstance(value, Collection):
            raise ValueError(f"must be a set of element types, got {value!r}")
        return frozenset(_dtype(item) for item in value)


class _Extras(Rule):
    def check(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"must be a mapping from names to what is needed, got {value!r}")
        return dict(value)


def _dtype(item: Any) -> DType:
    if isinstance(item, DType):
        return item
    names = [d.name for d in DType]
    if isinstance(item, str) and item in names:
        return DType[item]
    if isinstance(item, str):
        raise ValueError(f"cannot hold {item!r}{nearest(item, names)}")
    try:
        return dtypes.of(item)
    except Exception:
        raise ValueError(f"must hold element types, got {item!r}") from None


@dataclass(frozen=True)
class Requirements(Checked):
    """What is needed. Whatever is left at its default is not asked for.

    ``rank``, ``dim``, ``batch`` and ``sequence`` are the largest that will occur; ``alignment`` is where the tensors
    that will be handed over start, in bytes; ``extras`` must be among the provider's own, with equal values.
    """

    ops: frozenset[str] = frozenset()
    dtypes: frozenset[DType] = frozenset()
    device: str = ""  # a kind: "cpu", "cuda" …
    rank: int | None = None
    dim: int | None = None
    batch: int | None = None
    sequence: int | None = None
    flash_attention: bool = False
    paged_attention: bool = False
    cuda_graphs: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    alignment: int | None = None
    custom_kernels: frozenset[str] = frozenset()
    extras: Mapping[str, Any] = field(default_factory=dict)

    RULES: ClassVar[Mapping[str, Rule]] = {
        "ops": _NameSet(),
        "dtypes": _TypeSet(),
        "device": Text(),
        "rank": Whole(0, optional=True),
        "dim": Whole(0, optional=True),
        "batch": Whole(0, optional=True),
        "sequence": Whole(0, optional=True),
        "flash_attention": Flag(),
        "paged_attention": Flag(),
        "cuda_graphs": Flag(),
        "tensor_parallel": Whole(1),
        "pipeline_parallel": Whole(1),
        "alignment": Whole(1, optional=True, power_of_two=True),
        "custom_kernels": _NameSet(),
        "extras": _Extras(),
    }

    def missing(self, can: ProviderCapability, device: str) -> tuple[str, ...]:
        """What a provider whose tensors are on ``device`` (a kind) lacks; empty where it will do."""
        found: list[str] = []
        if can.ops is not None and (lacking := self.ops - can.ops):
            found.append(f"operators {_listed(lacking)}")
        if can.dtypes is not None and (types := self.dtypes - can.dtypes):
            found.append(f"element types {_listed(t.name for t in types)}")
        kinds = can.devices or frozenset({device})
        if self.device and self.device not in kinds:
            found.append(f"device {self.device}: it computes on {_listed(kinds)}")
        for need, allowed, what in (
            (self.rank, can.max_rank, "rank"),
            (self.dim, can.max_dim, "a dimension of"),
            (self.batch, can.max_batch, "a batch of"),
            (self.sequence, can.max_sequence, "a sequence of"),
        ):
            if need is not None and allowed is not None and need > allowed:
                found.append(f"{what} {need}: at most {allowed}")
        for name in ("flash_attention", "paged_attention", "cuda_graphs"):
            if getattr(self, name) and not getattr(can, name):
                found.append(name.replace("_", " ").replace("cuda", "CUDA"))
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) > getattr(can, name):
                found.append(f"{name.replace('_', ' ')} {getattr(self, name)}: at most {getattr(can, name)}")
        if self.alignment is not None and self.alignment < can.alignment:
            found.append(f"tensors aligned to {can.alignment} bytes, not {self.alignment}")
        if kernels := self.custom_kernels - can.custom_kernels:
            found.append(f"custom kernels {_listed(kernels)}")
        for name, wanted in self.extras.items():
            if name not in can.extras:
                found.append(f"{name} {wanted!r}")
            elif can.extras[name] != wanted:
                found.append(f"{name} {wanted!r}: it has {can.extras[name]!r}")
        return tuple(found)


@dataclass(frozen=True)
class BestMatch:
    """The first provider, in the registry's order, that has all that is needed, and what the others lack of it."""

    provider: str | None
    missing: Mapping[str, tuple[str, ...]]  # by provider, of those that will not do
    others: tuple[str, ...] = ()  # that would do as well, and come later

    def __str__(self) -> str:
        lines = [f"{self.provider or 'no provider'} has all that is needed"]
        lines += [f"  {name} would do as well" for name in self.others]
        lines += [f"  {name} lacks {'; '.join(what)}" for name, what in self.missing.items()]
        return "\n".join(lines)


def _listed(names: Any) -> str:
    found = sorted(names)
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ", ".join(found[:8]) + more


__all__ = ["BestMatch", "Requirements"]
