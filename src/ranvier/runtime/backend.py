"""The interface of ``onnx.backend``, for tools and test suites that speak it.

``onnx.backend.test.BackendTest(ranvier.Backend, __name__)`` makes the standard's suite run here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from onnx.backend.base import Backend as BackendBase
from onnx.backend.base import BackendRep, namedtupledict

from ranvier import dtypes
from ranvier.config import SessionConfig
from ranvier.domains import normal_domain
from ranvier.errors import DeviceMismatch, InvalidConfig, InvalidInput, RanvierError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.types import OptionalType, SequenceType, TensorType, Type
from ranvier.ops import NEWEST, registry
from ranvier.ops.proto import type_to_proto
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.control import RunOptions
from ranvier.runtime.partition import unsupported_ops
from ranvier.runtime.session import Session, load

_TOLERANCES = ("rtol", "atol")  # of a comparison; the standard's test runner hands them to everything it calls


class PreparedModel(BackendRep):  # type: ignore[misc]
    """A model made ready by ``Backend.prepare``."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, inputs: Any, run_options: RunOptions | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs in order, for inputs in order or by name; they can be had by name too: ``outputs["y"]``."""
        for name in _session_options(kwargs):
            raise InvalidConfig(f"run: unknown option {name!r}; options belong to prepare")
        outputs = self.session.run(_named(self.session, inputs), options=run_options)
        result: tuple[Any, ...] = namedtupledict("Outputs", list(outputs))(*outputs.values())
        return result


class Backend(BackendBase):  # type: ignore[misc]
    """Runs models on the CPU. Keyword arguments are options of :class:`~ranvier.config.SessionConfig`."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.partition(":")[0].upper() == "CPU"

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """True when the model can be read and a provider takes each of its operators."""
        if not cls.supports_device(device):
            return False
        config = SessionConfig.default(**_session_options(kwargs))
        try:
            graph = onnx_format.read(model, limits=config.limits)
        except RanvierError:
            return False
        return not unsupported_ops(graph, REGISTRY.chain(config.providers)[0])

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """The model, ready to run many times."""
        if not cls.supports_device(device):
            raise DeviceMismatch(f"device {device!r} is not supported, only 'CPU'")
        return PreparedModel(load(model, **_session_options(kwargs)))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare a model and run it once."""
        prepared = cls.prepare(model, device, **kwargs)
        with prepared.session:
            return prepared.run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, Sequence[int]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node. ``opset_version`` is the opset its operator is taken from, the newest when left out."""
        version = kwargs.pop("opset_version", None) or _newest(node)
        given = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        return cls.run_model(_model_of(node, given, outputs_info, version), given, device, **kwargs)


def _session_options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in _TOLERANCES}


def _named(session: Session, inputs: Any) -> Any:
    """Inputs by name. In order they may be the required ones, all of them, or the first few: the rest is optional."""
    if isinstance(inputs, Mapping):
        return inputs
    given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
    every = [value.name for value in session.interface.inputs]
    names = every if len(given) == len(every) else session.signature.required
    if len(given) > len(names):
        raise InvalidInput(f"{len(given)} inputs given, the model takes {len(names)}: {', '.join(names)}")
    return dict(zip(names, given))


def _newest(node: NodeProto) -> int:
    if not normal_domain(node.domain):
        return int(NEWEST)
    try:
        return int(onnx.defs.get_schema(node.op_type, domain=node.domain).since_version)
    except onnx.defs.SchemaError:
        definition = registry.find(node.domain, node.op_type)
        return definition.since if definition is not None else 1


def _model_of(
    node: NodeProto, inputs: Sequence[Any], outputs_info: Sequence[tuple[Any, Sequence[int]]] | None, version: int
) -> ModelProto:
    names = list(dict.fromkeys(name for name in node.input if name))
    if len(names) != len(inputs):
        raise InvalidInput(f"{node.op_type} names {len(names)} inputs, got {len(inputs)}")
    types: list[Type | None] = [None] * len(node.output)
    if outputs_info is not None:
        types = [TensorType(dtypes.of(dtype), tuple(shape)) for dtype, shape in outputs_info]
    graph = helper.make_graph(
        [node],
        "node",
        [_info(name, _type_of(x)) for name, x in zip(names, inputs)],
        [_info(name, t) for name, t in zip(node.output, types) if name],
    )
    opsets = {"": NEWEST, normal_domain(node.domain): version}
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()])


def _info(name: str, value_type: Type | None) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=type_to_proto(value_type))


def _type_of(x: Any) -> Type:
    if x is None:
        return OptionalType(None)
    if isinstance(x, list):
        # the tensors of a sequence may differ in shape
        return SequenceType(TensorType(dtypes.of(np.asarray(x[0])), None) if x else None)
    array = np.asarray(x)
    return TensorType(dtypes.of(array), array.shape)


__all__ = ["Backend", "PreparedModel"]
