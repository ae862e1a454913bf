"""The provider ``mlx``: parts of a graph on the GPU of an Apple machine, or on whatever else the package runs.

mlx works in memory that processor and GPU share, so nothing is transferred: operands and results are the host's.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from typing import Any, ClassVar

from ranvier.devices import CPU, Device
from ranvier.errors import InvalidConfig, nearest
from ranvier.graph.ir import Node
from ranvier.providers.base import CompileContext, ProviderCapability, Subgraph
from ranvier.providers.foreign import ForeignProvider
from ranvier.providers.mlx import (  # noqa: F401 - what they declare is what is used
    attention,
    elementwise,
    movement,
    normalization,
    pooling,
    products,
    reductions,
)
from ranvier.providers.mlx.kernel import MlxKernel
from ranvier.providers.mlx.library import mx
from ranvier.providers.mlx.table import ALL, operators, refusal
from ranvier.records import dataclass

DEVICES = ("auto", "gpu", "cpu")


@dataclass(frozen=True)
class MlxOptions:
    """``device``: ``auto`` is the GPU where mlx has one. ``fuse``: let mlx compile each part; by itself it does so on a
    GPU, since on a processor that takes a C++ compiler."""

    device: str = "auto"
    fuse: bool | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise InvalidConfig(f"MlxOptions: device cannot be {self.device!r}{nearest(str(self.device), DEVICES)}")
        if self.fuse not in (None, True, False):
            raise InvalidConfig(f"MlxOptions: fuse must be true or false, got {self.fuse!r}")


class MlxProvider(ForeignProvider):
    name: ClassVar[str] = "mlx"
    aliases: ClassVar[tuple[str, ...]] = ("metal",)
    Options: ClassVar[type] = MlxOptions

    def __init__(self, options: MlxOptions | None = None) -> None:
        super().__init__()
        self.options = options or MlxOptions()
        self.device: Device = CPU  # operands and results are on the host, and so is everything else
        self._gate = threading.Lock()  # mlx promises nothing to several threads, and the device is one

    def configure(self, options: Any) -> MlxProvider:
        if options.device == "gpu" and not mx.is_available(mx.gpu):
            raise InvalidConfig("mlx has no GPU here: device can be 'auto' or 'cpu'")
        return MlxProvider(options)

    def available(self) -> str | None:
        # only looked for: importing it wakes the GPU's driver
        return None if importlib.util.find_spec("mlx") is not None else "mlx is not installed"

    def capability(self) -> ProviderCapability:
        notes = f"mlx {_version()}, {self.options.device}"
        return ProviderCapability(ops=operators(), dtypes=ALL, memory=("system", "shared"), notes=notes)

    def _refuses(self, node: Node) -> str | None:
        return refusal(node)

    def compile(self, part: Subgraph, ctx: CompileContext) -> MlxKernel:
        on_gpu = self.options.device != "cpu" and mx.is_available(mx.gpu)
        fuse = on_gpu if self.options.fuse is None else self.options.fuse
        return MlxKernel(part, ctx, self._gate, mx.gpu if on_gpu else mx.cpu, fuse=fuse)


@functools.cache
def _version() -> str:
    return importlib.metadata.version("mlx")
