"""Option sets: every field has a rule, a bad value names the range, an unknown name the nearest one."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ranvier as rv
from ranvier.config import PRESETS, Limits, MemoryConfig, ProviderConfig, SessionConfig, provider
from ranvier.devices import DeviceConfig
from ranvier.errors import InvalidConfig
from ranvier.rules import amount, flag

SETS = (SessionConfig, Limits, MemoryConfig, ProviderConfig, DeviceConfig)
GB = 1 << 30


@pytest.mark.parametrize("kind", SETS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_rule(kind):
    assert set(kind.RULES) == {f.name for f in fields(kind)}
    made = kind()
    assert made.updated() == made == kind.make({}) == copy.deepcopy(made) == pickle.loads(pickle.dumps(made))
    with pytest.raises(FrozenInstanceError):
        setattr(made, fields(kind)[0].name, None)


@pytest.mark.parametrize("kind", SETS, ids=lambda kind: kind.__name__)
def test_unknown_names(kind):
    first = fields(kind)[0].name
    for use in (kind, kind.make, kind().updated):
        with pytest.raises(
            InvalidConfig, match=f"{kind.__name__}: unknown option '{first}s?x'.*did you mean '{first}'"
        ):
            use(**{f"{first}x": 1})


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        (ProviderConfig, {"threads": 0}, "threads must be a whole number of 1 or more or None, got 0"),
        (ProviderConfig, {"threads": 2.0}, "threads must be a whole number"),
        (ProviderConfig, {"threads": True}, "threads must be a whole number"),
        (ProviderConfig, {"memory_limit": 0}, "memory_limit must be a positive number or None"),
        (ProviderConfig, {"memory_limit": 1.5}, "memory_limit must be a whole number or None"),
        (ProviderConfig, {"memory_limit": float("inf")}, "memory_limit must be a whole number"),
        (ProviderConfig, {"memory_limit": float("nan")}, "memory_limit must be a positive number"),
        (ProviderConfig, {"optimization_level": "agressive"}, "did you mean 'aggressive'"),
        (ProviderConfig, {"optimization_level": 3}, r"cannot be 3 \(known: none, basic, aggressive\)"),
        (ProviderConfig, {"options": {"winograd": False}}, "a mapping of options for each provider"),
        (ProviderConfig, {"options": {"cpu": {1: 2}}}, "names of options"),
        (ProviderConfig, {"options": []}, "must be a mapping from names of providers"),
        (ProviderConfig, {"memory": {}}, "memory must be a MemoryConfig, got dict"),
        (MemoryConfig, {"pool_size": -1}, "pool_size must be a whole number of 0 or more bytes or None"),
        (MemoryConfig, {"alignment": 32}, "power of two from 64 to 2,097,152 bytes, got 32"),
        (MemoryConfig, {"alignment": 96}, "power of two"),
        (MemoryConfig, {"alignment": 1 << 22}, "power of two"),
        (MemoryConfig, {"growth": "dynamc"}, "did you mean 'dynamic'"),
        (MemoryConfig, {"secure": 1}, "secure must be True or False, got 1"),
        (MemoryConfig, {"growth": "static"}, "growth='static' needs a pool_size"),
        (MemoryConfig, {"growth": "static", "pool_size": 0}, "growth='static' needs a pool_size"),
        (MemoryConfig, {"growth": "static", "pool_size": 1, "pooling": False}, "and pooling"),
        (SessionConfig, {"memory": None}, "memory must be a MemoryConfig"),
        (SessionConfig, {"providers": ()}, "at least one"),
        (SessionConfig, {"providers": [1]}, "must be names"),
        (SessionConfig, {"providers": 3}, "must be names"),
        (SessionConfig, {"plan_cache": 0}, "plan_cache must be a whole number of 1 or more"),
        (SessionConfig, {"debug": 5}, "debug must be a whole number from 0 to 4"),
        (SessionConfig, {"symbol_bounds": {"n": (3, 1)}}, "empty: from 3 to 1"),
        (SessionConfig, {"symbol_bounds": {"n": 3}}, "least, most"),
        (SessionConfig, {"symbol_bounds": 3}, "mapping from names of dimensions"),
        (SessionConfig, {"name": 3}, "name must be text"),
    ],
)
def test_a_bad_value_is_told_with_its_range(kind, options, problem):
    with pytest.raises(InvalidConfig, match=problem):
        kind(**options)


def test_values_take_their_normal_form():
    config = SessionConfig(providers="cpu, reference", disabled_passes=["a"], symbol_bounds={"n": [1, None]})
    assert config.providers == ("cpu", "reference") and config.disabled_passes == ("a",)
    assert config.symbol_bounds == {"n": (1, None)}
    assert Limits(memory_bytes=1e9).memory_bytes == 10**9


def test_a_set_does_not_share_what_it_was_given():
    options = {"cpu": {"winograd": False}}
    config = ProviderConfig(options=options)
    options["cpu"]["winograd"] = True
    assert config.options == {"cpu": {"winograd": False}}


# -- presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "memory", "threads", "limit"),
    [(64, 256 * GB, 4, GB), (2, GB, 2, GB // 2), (1, None, 1, GB), (1, 1, 1, 1)],
)
def test_edge_is_small(monkeypatch, cores, memory, threads, limit):
    monkeypatch.setattr(provider, "usable_cores", lambda: cores)
    monkeypatch.setattr(provider, "usable_memory", lambda: memory)
    config = ProviderConfig.edge()
    assert (config.threads, config.memory_limit, config.optimization_level) == (threads, limit, "aggressive")


@pytest.mark.parametrize(
    ("cores", "memory", "limit"), [(64, 250 * GB, 200 * GB), (2, GB, GB * 4 // 5), (3, None, None), (1, 1, 1)]
)
def test_cloud_takes_the_machine(monkeypatch, cores, memory, limit):
    monkeypatch.setattr(provider, "usable_cores", lambda: cores)
    monkeypatch.setattr(provider, "usable_memory", lambda: memory)
    config = ProviderConfig.cloud()
    assert (config.threads, config.memory_limit, config.optimization_level) == (cores, limit, "basic")


def test_presets_differ_in_what_they_keep():
    edge, cloud = (PRESETS[name]() for name in ("edge", "cloud"))
    assert edge.memory.pool_size < cloud.memory.pool_size
    assert PRESETS["edge"]() == rv.ProviderConfig.edge()


# -- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30),
        ("0.5", 0.5),
        ("512M", 512 << 20),
        ("4GiB", 4 * GB),
        ("1.5k", 1536),
        (" none ", None),
        ("2 tb", 2 << 40),
    ],
)
def test_amounts(text, value):
    assert amount(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1e3", "4X", "M", "nan", "inf", "1,000", "²", "٣"])
def test_what_is_no_amount(text):
    with pytest.raises(ValueError, match="must be a number such as"):
        amount(text)


@given(st.integers(0, 10**40))
def test_whole_amounts_are_exact(number):
    assert amount(str(number)) == number
    assert amount(f"{number}k") == number * 1024


def test_flags():
    assert flag(" Yes") is True and flag("OFF") is False
    with pytest.raises(ValueError, match="must be one of"):
        flag("2")
