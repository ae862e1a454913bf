"""Every lowering is listed in the index, under the module that declares it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ranvier.codegen.definitions import registry
from ranvier.codegen.definitions.lower import narrow_cast
from ranvier.codegen.definitions.lower.index import SHARED
from ranvier.codegen.definitions.registry import Lowerings
from ranvier.providers.cpu.lower.index import LOWERINGS


@pytest.mark.parametrize("lowerings", [SHARED, LOWERINGS], ids=["shared", "cpu"])
def test_the_index_lists_what_the_modules_declare(lowerings: Lowerings) -> None:
    declared = {key: each.lower.__module__ for key, each in lowerings.table().items()}
    assert declared == {key: f"{lowerings.package}.{module}" for key, module in lowerings.modules.items()}


def test_a_providers_own_lowering_goes_before_the_shared_one() -> None:
    both = LOWERINGS.modules.keys() & SHARED.modules.keys()
    assert ("", "Gather") in both
    for key in both:
        own = LOWERINGS.at(key)
        assert own is not None and own is not SHARED.at(key)
    assert LOWERINGS.at(("", "Relu")) is SHARED.at(("", "Relu"))


def test_narrow_types_are_those_that_can_be_converted() -> None:
    known = {*narrow_cast.NARROW_INTEGERS, *narrow_cast.FORMATS, narrow_cast._EXPONENTS}
    assert known == registry.NARROW


def test_a_model_imports_the_lowerings_it_needs() -> None:
    script = """
import sys
from ranvier.graph.ir import Graph, Value
from ranvier.providers.cpu.lower.index import LOWERINGS
node = Graph().add("Relu", [Value("x")])
assert LOWERINGS.find(node) is not None
loaded = {name.rpartition(".")[2] for name in sys.modules if ".lower." in name}
assert "activation" in loaded and not {"trees", "attention", "convolution", "pool"} & loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True)
