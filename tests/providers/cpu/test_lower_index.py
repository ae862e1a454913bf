"""Every lowering is listed in the index, under the module that declares it."""

from __future__ import annotations

import subprocess
import sys

from ranvier.providers.cpu.lower import narrow_cast, registry
from ranvier.providers.cpu.lower.index import MODULES


def test_the_index_lists_what_the_modules_declare() -> None:
    declared = {key: each.lower.__module__.rpartition(".")[2] for key, each in registry.table().items()}
    assert declared == MODULES


def test_narrow_types_are_those_that_can_be_converted() -> None:
    known = {*narrow_cast.NARROW_INTEGERS, *narrow_cast.FORMATS, narrow_cast._EXPONENTS}
    assert known == registry.NARROW


def test_a_model_imports_the_lowerings_it_needs() -> None:
    script = """
import sys
from ranvier.graph.ir import Graph, Value
from ranvier.providers.cpu.lower import registry
node = Graph().add("Relu", [Value("x")])
assert registry.find(node) is not None
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("ranvier.providers.cpu.lower.")}
assert "activation" in loaded and not {"trees", "attention", "convolution"} & loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True)
