"""What torch's failures become: typed errors, one more try, others that finish, and a dead device that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ranvier import errors  # noqa: E402
from ranvier.devices.kinds import GpuInfo  # noqa: E402
from ranvier.providers.cuda import provider as module  # noqa: E402
from ranvier.providers.cuda.failures import Health, is_lost, is_out_of_memory, typed  # noqa: E402
from ranvier.providers.cuda.memory import DeviceMemory  # noqa: E402
from ranvier.providers.cuda.options import CudaOptions  # noqa: E402
from ranvier.providers.cuda.place import Twin  # noqa: E402
from ranvier.providers.cuda.provider import CudaProvider  # noqa: E402
from ranvier.providers.cuda.steps import NodeStep  # noqa: E402
from tests.torch.cuda.models import expected, inputs, load  # noqa: E402

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"
LOST = "CUDA error: an illegal memory access was encountered"
LAUNCH = "CUDA error: too many resources requested for launch"
CAPTURING = "CUDA error: operation not permitted when stream is capturing"


class Failing:
    """Makes the relu of the model raise, as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[Exception] = []
        self.calls = 0
        original = NodeStep.run

        def run(step: NodeStep, env: Any) -> None:
            if step.node.op == "Relu":
                self.calls += 1
                if self.left:
                    raise self.left.pop(0)
            original(step, env)

        monkeypatch.setattr(NodeStep, "run", run)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    yield Failing(monkeypatch)


def test_out_of_memory_is_tried_again(failing: Failing) -> None:
    with load() as session:
        failing.left = [torch.OutOfMemoryError(OUT)]
        given = inputs(3)
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert failing.calls == 2 and not session.report.fallbacks


def test_out_of_memory_twice_is_finished_by_others(failing: Failing) -> None:
    with load() as session:
        failing.left = [torch.OutOfMemoryError(OUT), torch.OutOfMemoryError(OUT)]
        given = inputs(3)
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert "OutOfMemory" in session.report.fallbacks[0]


def test_out_of_memory_with_nobody_else(failing: Failing) -> None:
    with load(providers=("cuda",)) as session:
        failing.left = [RuntimeError(OUT)] * 2
        with pytest.raises(errors.OutOfMemory, match="out of memory") as caught:
            session.run(inputs(3))
        assert caught.value.provider == "cuda"
        given = inputs(3)  # and it goes on
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)


def test_a_failed_launch_is_finished_by_others(failing: Failing) -> None:
    with load() as session:
        failing.left = [RuntimeError(LAUNCH)]
        given = inputs(3)
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert "KernelError" in session.report.fallbacks[0] and failing.calls == 1


def test_a_lost_device_is_never_used_again(failing: Failing) -> None:
    with load() as session:
        failing.left = [RuntimeError(LOST)]
        for _ in range(3):
            given = inputs(3)
            np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert failing.calls == 1  # nothing was launched after it
        (provider,) = (p for p in session.providers if p.name == "cuda")
        reason = provider.available()
        assert reason is not None and "lost" in reason


def test_a_device_lost_while_results_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    with load() as session:
        (provider,) = (p for p in session.providers if p.name == "cuda")
        given = inputs(3)
        session.run(given)

        def broken(tensors: Any) -> Any:
            raise RuntimeError(LOST)

        monkeypatch.setattr(provider._open()[1], "download", broken)
        np.testing.assert_allclose(session.run(given)["y"], expected(given), rtol=1e-5, atol=1e-5)
        assert provider.available() is not None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(OUT), errors.OutOfMemory),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), errors.OutOfMemory),
        (MemoryError(), errors.OutOfMemory),
        (RuntimeError(LOST), errors.ProviderFailed),
        (RuntimeError("CUDA error: device-side assert triggered"), errors.ProviderFailed),
        (RuntimeError(LAUNCH), errors.KernelError),
        (
            RuntimeError(f"{CAPTURING}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."),
            errors.KernelError,
        ),
        (ValueError("bad"), errors.KernelError),
    ],
)
def test_errors_have_types(error: Exception, kind: type) -> None:
    found = typed(error, "doing something")
    assert type(found) is kind and "doing something" in str(found)
    assert is_lost(error) == (kind is errors.ProviderFailed)
    assert is_out_of_memory(error) == (kind is errors.OutOfMemory)


def test_a_passing_failure_says_so() -> None:
    found = typed(RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), "starting")
    assert isinstance(found, errors.ProviderFailed) and found.transient


def test_own_errors_pass_through() -> None:
    own = errors.InvalidValue("an index")
    assert typed(own, "x") is own
    with pytest.raises(errors.InvalidValue):
        Health("x").guarded("y", lambda: (_ for _ in ()).throw(own), lambda: None)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_buffers_are_counted_and_limited() -> None:
    memory = DeviceMemory(Twin(), Health("twin"), limit=1000)
    one = memory.alloc(600, "one")
    assert memory.stats().active == 600
    with pytest.raises(errors.OutOfMemory, match="two") as caught:
        memory.alloc(600, "two")
    assert caught.value.part == "two"
    memory.free(one)
    with pytest.raises(errors.InvalidBuffer):
        memory.free(one)
    memory.copy(torch.ones(4, dtype=torch.uint8), two := memory.alloc(4))
    assert two.tolist() == [1, 1, 1, 1]
    assert memory.stats().peak == 600 and memory.stats().failures == 1
    assert memory.trim() == 0


# -- what is missing --------------------------------------------------------------------------------------------------


def _found(monkeypatch: pytest.MonkeyPatch, *found: GpuInfo) -> None:
    monkeypatch.setattr(module, "_gpus", lambda visible: found)


def test_reasons_why_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    _found(monkeypatch)
    assert "no NVIDIA GPU" in str(CudaProvider().available())
    _found(monkeypatch, GpuInfo("cuda", None, "H200", problem="no NVIDIA driver is loaded"))
    assert CudaProvider().available() == "no NVIDIA driver is loaded"
    _found(monkeypatch, GpuInfo("cuda", 0, "K80", capability=(3, 7)))
    assert "compute capability 3.7, and at least 7.0" in str(CudaProvider().available())
    _found(monkeypatch, GpuInfo("cuda", 0, "H200", capability=(9, 0)))
    assert CudaProvider().available() is None
    assert "no cuda:3" in str(CudaProvider(CudaOptions(device=3)).available())
    monkeypatch.setattr(module, "installed", lambda: False)
    assert CudaProvider().available() == "torch is not installed"
