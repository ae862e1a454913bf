"""Which provider has what is needed, and what the others lack."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import pytest

from ranvier.devices import Device
from ranvier.dtypes import DType
from ranvier.errors import InvalidConfig, ProviderFailed, ProviderUnavailable
from ranvier.providers.base import ProviderCapability
from ranvier.providers.reference import ReferenceProvider
from ranvier.providers.registry import REGISTRY, ProviderRegistry
from ranvier.providers.requirements import Requirements


def provider(kind: str = "cpu", problem: str | None = None, **can: Any) -> Any:
    class Made(ReferenceProvider):
        name = "made"

        def __init__(self) -> None:
            super().__init__()
            self.device = Device(kind)

        def available(self) -> str | None:
            return problem

        def capability(self) -> ProviderCapability:
            return ProviderCapability(**can)

    return Made


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ProviderRegistry:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    return ProviderRegistry()


CASES = [
    ({"ops": {"Add", "MatMul"}}, {"ops": frozenset({"Add"})}, "operators MatMul"),
    ({"dtypes": {"float32", "int4"}}, {"dtypes": frozenset({DType.float32})}, "element types int4"),
    ({"device": "cuda"}, {}, "device cuda: it computes on cpu"),
    ({"device": "cuda"}, {"devices": frozenset({"npu", "gpu"})}, "device cuda: it computes on gpu, npu"),
    ({"rank": 6}, {"max_rank": 5}, "rank 6: at most 5"),
    ({"dim": 9}, {"max_dim": 8}, "a dimension of 9: at most 8"),
    ({"batch": 65}, {"max_batch": 64}, "a batch of 65: at most 64"),
    ({"sequence": 4097}, {"max_sequence": 4096}, "a sequence of 4097: at most 4096"),
    ({"flash_attention": True}, {}, "flash attention"),
    ({"paged_attention": True}, {}, "paged attention"),
    ({"cuda_graphs": True}, {}, "CUDA graphs"),
    ({"tensor_parallel": 2}, {}, "tensor parallel 2: at most 1"),
    ({"pipeline_parallel": 4}, {"pipeline_parallel": 2}, "pipeline parallel 4: at most 2"),
    ({"alignment": 16}, {"alignment": 64}, "tensors aligned to 64 bytes, not 16"),
    ({"custom_kernels": {"llvm"}}, {"custom_kernels": frozenset({"loops"})}, "custom kernels llvm"),
    ({"extras": {"sparsity": "2:4"}}, {}, "sparsity '2:4'"),
    ({"extras": {"sparsity": "2:4"}}, {"extras": {"sparsity": "1:2"}}, "sparsity '2:4': it has '1:2'"),
]


@pytest.mark.parametrize(("need", "can", "said"), CASES, ids=[said for *_, said in CASES])
def test_what_a_provider_lacks(own: ProviderRegistry, need: Any, can: Any, said: str) -> None:
    own.register("lacking", provider(**can))
    found = own.find_best(Requirements(**need))
    assert found.provider is None
    assert found.missing == {"lacking": (said,)}
    assert said in str(found)


@pytest.mark.parametrize(
    ("need", "can"),
    [
        ({}, {}),
        ({"ops": {"Add"}}, {}),  # None: everything there is
        ({"ops": {"Add"}}, {"ops": frozenset({"Add", "Mul"})}),
        ({"dtypes": [DType.float32, np.dtype(np.int8)]}, {"dtypes": frozenset({DType.float32, DType.int8})}),
        ({"device": "cpu"}, {}),
        ({"device": "npu"}, {"devices": frozenset({"npu"})}),
        ({"rank": 5, "dim": 8, "batch": 2, "sequence": 3}, {"max_rank": 5, "max_dim": 8, "max_batch": 2}),
        ({"alignment": 64}, {"alignment": 64}),
        ({"alignment": 128}, {"alignment": 64}),
        ({"flash_attention": True, "cuda_graphs": True}, {"flash_attention": True, "cuda_graphs": True}),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, {"tensor_parallel": 4, "pipeline_parallel": 2}),
        ({"custom_kernels": {"llvm"}}, {"custom_kernels": frozenset({"llvm", "loops"})}),
        ({"extras": {"sparsity": "2:4"}}, {"extras": {"sparsity": "2:4", "more": 1}}),
    ],
)
def test_what_suffices(own: ProviderRegistry, need: Any, can: Any) -> None:
    own.register("able", provider(**can))
    assert own.find_best(Requirements(**need)).provider == "able"


def test_the_first_in_order_wins_and_the_others_are_told(own: ProviderRegistry) -> None:
    own.register("small", provider(max_batch=1))
    own.register("second", provider())
    own.register("third", provider())
    found = own.find_best(Requirements(batch=8))
    assert (found.provider, found.others) == ("second", ("third",))
    assert found.missing == {"small": ("a batch of 8: at most 1",)}
    own.register("newest", provider(), first=True)
    assert own.find_best(Requirements(batch=8)).provider == "newest"


def test_absent_and_failing_providers_are_named_with_the_reason(own: ProviderRegistry) -> None:
    class Failing(ReferenceProvider):
        def capability(self) -> ProviderCapability:
            raise ProviderFailed("failing", "no answer")

    own.register("absent", provider(problem="no driver"))
    own.register("failing", Failing)
    own.register("able", provider())
    found = own.find_best(Requirements())
    assert found.provider == "able"
    assert found.missing == {"absent": ("no driver",), "failing": ("provider 'failing' failed: no answer",)}


def test_only_those_that_need_not_be_asked_for(own: ProviderRegistry) -> None:
    own.register("distant", provider(), auto=False)
    own.register("near", provider())
    assert own.find_best(Requirements()).provider == "distant"
    assert own.find_best(Requirements(), auto=True).provider == "near"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches": 1}, "unknown option 'batches' .*'batch'"),
        ({"batch": -1}, "batch must be a whole number"),
        ({"rank": 1.5}, "rank must be"),
        ({"ops": "Add"}, "ops must be a set of names"),
        ({"ops": [1]}, "ops must hold names only"),
        ({"dtypes": ["flaot32"]}, "dtypes cannot hold 'flaot32' .*'float32'"),
        ({"dtypes": [object()]}, "dtypes must hold element types"),
        ({"alignment": 48}, "alignment must be a power of two"),
        ({"tensor_parallel": 0}, "tensor_parallel must be"),
        ({"cuda_graphs": 1}, "cuda_graphs must be True or False"),
        ({"extras": ["x"]}, "extras must be a mapping"),
        ({"device": None}, "device must be text"),
    ],
)
def test_requirements_are_checked(options: Any, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        Requirements(**options)


def test_of_our_own_providers_the_cpu_takes_kernels() -> None:
    found = REGISTRY.find_best(Requirements(ops={"MatMul"}, dtypes={"float32"}, custom_kernels={"llvm"}))
    assert found.provider == "cpu"
    assert found.missing["reference"] == ("custom kernels llvm",)


# -- the environment ------------------------------------------------------------------------------------------------


def test_auto_passes_over_cuda_where_the_cpu_is_insisted_on(
    own: ProviderRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.register("cuda", provider("cuda"))
    own.register("reference", ReferenceProvider)
    monkeypatch.delenv("RANVIER_FORCE_CPU", raising=False)
    assert own.available(auto=True) == ["cuda", "reference"]
    assert own.find_best(Requirements()).provider == "cuda"
    monkeypatch.setenv("RANVIER_FORCE_CPU", "1")
    assert own.available(auto=True) == ["reference"]
    assert own.available() == ["cuda", "reference"]  # it is there, and only passed over
    chain, absent = own.chain(["cuda"])  # who names it gets it
    assert [p.device.kind for p in chain] == ["cuda"] and not absent
    found = own.find_best(Requirements())
    assert found.provider == "reference" and "insists on the CPU" in found.missing["cuda"][0]


def test_an_environment_without_sense_is_an_error(own: ProviderRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    own.register("reference", ReferenceProvider)
    monkeypatch.setenv("RANVIER_FORCE_CPU", "perhaps")
    with pytest.raises(InvalidConfig, match="RANVIER_FORCE_CPU"):
        own.available(auto=True)
    with pytest.raises(ProviderUnavailable):
        own.get("CUDAExecutionProvider")
