"""Kernels and operators of the user's own, and what a device does by its own measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx.parser
import pytest

torch = pytest.importorskip("torch")

import ranvier as rv  # noqa: E402
from ranvier import errors  # noqa: E402
from ranvier.providers.base import OffersKernels  # noqa: E402
from ranvier.providers.cuda.dispatch import GpuDispatch, gpu_dispatch  # noqa: E402
from ranvier.providers.cuda.figures import measured  # noqa: E402
from ranvier.providers.cuda.options import CudaOptions  # noqa: E402
from ranvier.providers.cuda.place import make_place  # noqa: E402
from ranvier.providers.cuda.provider import CudaProvider  # noqa: E402
from tests.torch.device import DEVICE, ON_TWIN, TORCH_DEVICE, options  # noqa: E402


@pytest.fixture
def provider() -> Iterator[CudaProvider]:
    made = CudaProvider(CudaOptions(device=DEVICE))
    yield made
    made.close()


@pytest.fixture(scope="module")
def doubling() -> Any:
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(y + at, tl.load(x + at, mask=inside) * 2, mask=inside)

    double.fn.__globals__["tl"] = tl
    return double


def test_a_function_of_triton(provider: CudaProvider, doubling: Any) -> None:
    assert isinstance(provider, OffersKernels) and "triton" in provider.capability().custom_kernels
    kernels = provider.kernels
    handle = kernels.load(doubling, "double", {"BLOCK": 16})
    x = torch.arange(20, dtype=torch.float32, device=TORCH_DEVICE)
    y = torch.zeros(20, device=TORCH_DEVICE)
    kernels.launch(handle, 2, 0, [x, y, 20])
    np.testing.assert_array_equal(y.cpu().numpy(), 2 * np.arange(20))
    info = kernels.info(handle)
    assert (info.name, info.kind, info.launches) == ("double", "triton", 1) and info.seconds > 0
    kernels.unload(handle)
    with pytest.raises(errors.InvalidInput, match="not loaded"):
        kernels.launch(handle, 2, 0, [x, y, 20])


def test_arguments_are_looked_at_before_anything_runs(provider: CudaProvider, doubling: Any) -> None:
    kernels = provider.kernels
    handle = kernels.load(doubling, "double", {"BLOCK": 16})
    x, y = (torch.full((4,), v, device=TORCH_DEVICE) for v in (1.0, 0.0))
    for grid, args, wrong in (
        (0, [x, y, 4], "grid"),
        ((1, 1, 1, 1), [x, y, 4], "grid"),
        (1, [x, "y", 4], "argument 1"),
    ):
        with pytest.raises(errors.InvalidInput, match=wrong):
            kernels.launch(handle, grid, 0, args)
    elsewhere = torch.empty(4, device="meta")
    with pytest.raises(errors.RanvierError):
        kernels.launch(handle, 1, 0, [elsewhere, y, 4])
    assert kernels.info(handle).launches == 0 and not y.any()


def test_what_cannot_be_loaded(provider: CudaProvider) -> None:
    with pytest.raises(errors.InvalidConfig, match="source"):
        provider.kernels.load(42, "k", None)


SAXPY = """extern "C" __global__ void saxpy(const float* x, float* y, float a, long long n) {
    long long k = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (k < n) y[k] += a * x[k];
}"""


def test_source_of_cuda_c(provider: CudaProvider) -> None:
    kernels = provider.kernels
    if ON_TWIN:
        with pytest.raises(errors.KernelError, match="needs a GPU"):
            kernels.load(SAXPY, "saxpy", None)
        return
    handle = kernels.load(SAXPY, "saxpy", None)
    x, y = (torch.full((1000,), v, device=TORCH_DEVICE) for v in (2.0, 1.0))
    kernels.launch(handle, (4,), (256,), [x, y, 3.0, 1000])
    assert y.tolist() == [7.0] * 1000
    info = kernels.info(handle)
    assert (info.kind, info.launches) == ("cuda", 1) and info.registers > 0 and info.max_threads >= 256  # type: ignore[attr-defined]
    with pytest.raises(errors.KernelError):
        kernels.load("not C at all", "broken", None)
    kernels.unload(handle)


@pytest.fixture
def scale() -> Iterator[GpuDispatch]:
    calls: list[str] = []

    @gpu_dispatch("test.dispatch::Scale")
    def scale(x, *, factor=2.0):  # type: ignore[no-untyped-def]
        calls.append("host")
        return x * np.float32(factor)

    @scale.on_gpu
    def _(x, *, factor=2.0):  # type: ignore[no-untyped-def]
        calls.append("device")
        return x * factor

    scale.calls = calls  # type: ignore[attr-defined]
    yield scale
    scale.withdraw()


MODEL = """<ir_version: 10, opset_import: ["" : 20, "test.dispatch" : 1]>
g (float[n, 3] x) => (float[n, 3] y) { y = test.dispatch.Scale<factor = 3.0>(x) }"""


def test_an_operator_with_two_bodies(scale: GpuDispatch) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    calls: list[str] = scale.calls  # type: ignore[attr-defined]
    np.testing.assert_array_equal(scale(x, factor=4.0), x * 4)
    np.testing.assert_array_equal(scale(torch.from_numpy(x).to(TORCH_DEVICE)).cpu().numpy(), x * 2)
    assert calls == ["host", "device"]
    with pytest.raises(errors.DeviceMismatch):
        scale(x, torch.from_numpy(x).to(TORCH_DEVICE))
    model = onnx.parser.parse_model(MODEL)
    for providers, where in ((["reference"], "host"), (["cuda", "reference"], "device")):
        calls.clear()
        with rv.load(model, optimization="none", providers=providers, provider_options=options()) as session:
            np.testing.assert_array_equal(session.run({"x": x})["y"], x * 3)
        assert calls == [where]


def test_a_name_without_a_domain() -> None:
    with pytest.raises(errors.InvalidInput, match="domain::Name"):
        gpu_dispatch("Scale")


def test_a_device_measured() -> None:
    found = measured(make_place(CudaOptions(device=DEVICE).device))
    assert not found.kernel and found.copy_bytes > 0 and found.matrix_flops > 0
