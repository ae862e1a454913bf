"""Where options come from: the order of the sources as a law, and every way in which one of them can be wrong."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ranvier
from ranvier import logs
from ranvier.config import Limits, MemoryConfig, ProviderConfig, SessionConfig, resolve
from ranvier.config import provider as provider_module
from ranvier.config.files import line_of, user_file
from ranvier.config.leaves import NAMES, OF_A_MODEL
from ranvier.config.resolve import VARIABLES, variable
from ranvier.config.variables import OTHERS, PREFIX
from ranvier.errors import InvalidConfig

EMPTY: dict[str, str] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def write(folder: Path, text: str, name: str = "ranvier.toml") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def home(folder: Path) -> dict[str, str]:
    """An environment whose user keeps options below this folder."""
    return {"XDG_CONFIG_HOME": str(folder), "HOME": str(folder), "APPDATA": str(folder)}


# -- the order ------------------------------------------------------------------------------------------------------

# options with two values that no source has by itself, as text and as they are
OPTIONS: dict[str, list[Any]] = {
    "threads": [3, 5, 7, 9],
    "optimization": ["none", "basic", "aggressive", "none"],
    "fallback": ["off", "on", "off", "on"],
    "plan_cache": [21, 22, 23, 24],
    "limits.memory_bytes": [101, 102, 103, 104],
    "limits.run_seconds": [0.5, 1.5, 2.5, 3.5],
    "memory.pool_size": [201, 202, 203, 204],
    "memory.growth": ["incremental", "dynamic", "incremental", "dynamic"],
    "memory.secure": [True, False, True, False],
    "providers": [("a",), ("b", "c"), ("d",), ("e",)],
}
SOURCES = ("code", "environment", "local", "user")


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


@settings(deadline=None, max_examples=60)
@given(
    said=st.fixed_dictionaries({name: st.sets(st.sampled_from(SOURCES)) for name in OPTIONS}),
    preset_from=st.sampled_from([None, *SOURCES]),
)
def test_the_earlier_source_wins(said: dict[str, set[str]], preset_from: str | None):
    values = {(name, source): OPTIONS[name][k] for name in OPTIONS for k, source in enumerate(SOURCES)}
    by_source = {source: [name for name in OPTIONS if source in said[name]] for source in SOURCES}
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        for source, place in (("local", base / "work"), ("user", base / "ranvier")):
            lines = [f"{name} = {toml(values[name, source])}" for name in by_source[source]]
            write(place, "\n".join([*(["preset = 'edge'"] if preset_from == source else []), *lines]))
        environ = home(base)
        for name in by_source["environment"]:
            value = values[name, "environment"]
            environ[variable(name)] = ",".join(value) if isinstance(value, tuple) else str(value)
        if preset_from == "environment":
            environ["RANVIER_PRESET"] = "edge"
        found = resolve(
            {name: values[name, "code"] for name in by_source["code"]},
            preset="edge" if preset_from == "code" else None,
            environ=environ,
            folder=base / "work",
        )
    edge = resolve(config=ProviderConfig.edge(), environ=EMPTY, file="off")
    plain = resolve(environ=EMPTY, file="off")
    assert found.preset == ("edge" if preset_from else "")
    for name in OPTIONS:
        first = next((source for source in SOURCES if source in said[name]), None)
        setting = next(s for s in found.settings if s.option == name)
        lower = edge if preset_from and edge.origin(name) == "code" else plain
        expected = values[name, first] if first else next(s.value for s in lower.settings if s.option == name)
        assert setting.value == expected
        group, _, leaf = name.rpartition(".")
        owner = getattr(found.config, group) if group else found.config
        assert getattr(owner, leaf) == expected
        origins = {
            "code": "code",
            "environment": variable(name),
            "local": "ranvier.toml:",
            "user": "ranvier.toml:",
            None: "preset edge" if lower is edge else "default",
        }
        assert origins[first] in setting.origin


def test_every_option_has_an_origin(folder):
    found = resolve(environ=EMPTY, folder=folder)
    assert [s.option for s in found.settings] == list(NAMES)
    assert {s.origin for s in found.settings} == {"default"} and found.config == SessionConfig()


def test_a_session_config_sets_everything(folder):
    write(folder, "threads = 3")
    config = SessionConfig(threads=2)
    found = resolve({"debug": 1}, config=config, environ={"RANVIER_THREADS": "5", "RANVIER_DEBUG": "2"}, folder=folder)
    assert found.config == config.updated(debug=1)
    for more in ({"preset": "edge"}, {"file": "x.toml"}):
        with pytest.raises(InvalidConfig, match="sets every option"):
            resolve(config=config, environ=EMPTY, **more)
    with pytest.raises(InvalidConfig, match="must be a SessionConfig or a ProviderConfig, got dict"):
        resolve(config={}, environ=EMPTY)


def test_a_provider_config_says_what_it_says(folder):
    config = ProviderConfig(threads=2, memory_limit=1000, options={"cpu": {"winograd": False}})
    environ = {"RANVIER_THREADS": "5", "RANVIER_OPTIMIZATION": "none"}
    found = resolve({"threads": 1}, config=config, environ=environ, folder=folder).config
    assert (found.threads, found.limits.memory_bytes, found.optimization) == (1, 1000, "none")
    assert found.provider_options == {"cpu": {"winograd": False}} and found.limits.graph_depth == 64


def test_option_sets_in_code_are_whole_and_mappings_are_not(folder):
    environ = {"RANVIER_LIMITS_GRAPH_DEPTH": "9", "RANVIER_MEMORY_SECURE": "1"}
    whole = resolve({"limits": Limits(memory_bytes=7), "memory": MemoryConfig()}, environ=environ, folder=folder).config
    assert (whole.limits.graph_depth, whole.limits.memory_bytes, whole.memory.secure) == (64, 7, False)
    part = resolve({"limits": {"memory_bytes": 7}}, environ=environ, folder=folder).config
    assert (part.limits.graph_depth, part.limits.memory_bytes, part.memory.secure) == (9, 7, True)


def test_options_of_providers_are_laid_over_each_other(folder):
    write(folder, "[provider_options.cpu]\nwinograd = false\nisa = 'avx2'\n[provider_options.sim]\nspeed = 2.5\n")
    found = resolve({"provider_options": {"cpu": {"isa": "portable"}}}, environ=EMPTY, folder=folder)
    assert found.config.provider_options == {"cpu": {"isa": "portable", "winograd": False}, "sim": {"speed": 2.5}}
    assert found.origin("provider_options.cpu.isa") == "code"
    assert found.origin("provider_options.cpu.winograd") == "ranvier.toml:2"


def test_none_from_an_earlier_source_is_a_value(folder):
    write(folder, "threads = 3\n[limits]\ntensor_bytes = 5")
    found = resolve({"threads": None, "limits": {"tensor_bytes": None}}, environ=EMPTY, folder=folder).config
    assert found.threads is None and found.limits.tensor_bytes is None
    environ = {"RANVIER_LIMITS_TENSOR_BYTES": "none"}
    assert resolve(environ=environ, folder=folder).config.limits.tensor_bytes is None


# -- the environment ------------------------------------------------------------------------------------------------


def test_every_option_that_is_not_of_one_model_has_a_variable():
    assert set(VARIABLES.values()) == set(NAMES) - set(OF_A_MODEL)
    assert VARIABLES["RANVIER_LIMITS_MEMORY_BYTES"] == "limits.memory_bytes"
    assert len(VARIABLES) == len(set(VARIABLES.values()))


def test_texts_are_read(folder):
    environ = {
        "RANVIER_PROVIDERS": " cpu , reference",
        "RANVIER_OPTIMIZATION": "Aggressive",
        "RANVIER_LIMITS_MEMORY_BYTES": "1.5G",
        "RANVIER_MEMORY_POOLING": "no",
        "RANVIER_THREADS": "  ",  # as good as unset
    }
    found = resolve(environ=environ, folder=folder).config
    assert found.providers == ("cpu", "reference") and found.optimization == "aggressive"
    assert found.limits.memory_bytes == 3 << 29 and found.memory.pooling is False and found.threads is None


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("RANVIER_THREADS", "many", "must be a number such as"),
        ("RANVIER_THREADS", "0", "whole number of 1 or more"),
        ("RANVIER_THREADS", "1.5", "whole number of 1 or more"),
        ("RANVIER_OPTIMIZATION", "max", "cannot be 'max'"),
        ("RANVIER_MEMORY_SECURE", "2", "must be one of 1, true"),
        ("RANVIER_MEMORY_ALIGNMENT", "100", "power of two"),
        ("RANVIER_PROVIDERS", ",", "at least one"),
        ("RANVIER_PRESET", "edgy", "did you mean 'edge'"),
        ("RANVIER_DEBUG", "9" * 50, "from 0 to 4"),
    ],
)
def test_a_bad_variable_is_named_whoever_wins(folder, name, text, problem):
    with pytest.raises(InvalidConfig, match=f"environment variable {name}: .*{problem}"):
        resolve({"threads": 1, "optimization": "none"}, preset="edge", environ={name: text}, folder=folder)


# -- files ----------------------------------------------------------------------------------------------------------


def test_the_local_file_comes_before_the_users(folder, tmp_path):
    write(folder, "threads = 2")
    own = write(tmp_path / "ranvier", "threads = 3\ndebug = 1")
    found = resolve(environ=home(tmp_path), folder=folder)
    assert (found.config.threads, found.config.debug) == (2, 1)
    assert found.origin("threads") == "ranvier.toml:1" and found.origin("debug") == f"{own}:2"
    assert found.files == ("ranvier.toml", str(own))


def test_a_named_file_is_the_only_one(folder, tmp_path):
    write(folder, "threads = 2\ndebug = 1")
    other = write(tmp_path, "threads = 3", "other.toml")
    third = write(folder, "threads = 4", "third.toml")
    environ = {**home(tmp_path), "RANVIER_CONFIG": str(other)}
    found = resolve(environ=environ, folder=folder)
    assert (found.config.threads, found.config.debug, found.files) == (3, 0, (str(other),))
    assert resolve(environ=environ, folder=folder, file="third.toml").config.threads == 4
    assert resolve(environ=environ, folder=folder, file=third).config.threads == 4
    assert resolve(environ=environ, folder=folder, file="off").files == ()
    assert resolve(environ={"RANVIER_CONFIG": "off"}, folder=folder).config.threads is None


@pytest.mark.parametrize("named", [{"file": "absent.toml"}, {"environ": {"RANVIER_CONFIG": "absent.toml"}}])
def test_a_named_file_must_be_there(folder, named):
    with pytest.raises(InvalidConfig, match=r"absent\.toml: cannot be read"):
        resolve(folder=folder, **{"environ": EMPTY, **named})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("threads = = 1", r"ranvier\.toml: not a TOML file .*line 1"),
        ("\n\nthread = 3", r"ranvier\.toml:3: unknown option 'thread' \(did you mean 'threads'"),
        ("[limits]\n\nmemory_byte = 3", r"ranvier\.toml:3: unknown option 'limits.memory_byte' .*'memory_bytes'"),
        ("limits.memory_byte = 3", r"ranvier\.toml:1: .*'memory_bytes'"),
        ("limits = { memory_byte = 3 }", r"ranvier\.toml:1: .*'memory_bytes'"),
        ("limits = 3", r"ranvier\.toml:1: limits must be a Limits or give its options by name, got 3"),
        ("[limit]\nx = 1", r"ranvier\.toml:1: unknown option 'limit'"),
        ("[memory]\npool_size = '4X'", r"ranvier\.toml:2: memory.pool_size must be a number such as"),
        ("[memory]\nsecure = 1", r"ranvier\.toml:2: memory.secure must be True or False, got 1"),
        ("debug = 1.5", r"ranvier\.toml:1: debug must be a whole number from 0 to 4, got 1.5"),
        ("threads = 1979-05-27", r"ranvier\.toml:1: threads must be a whole number"),
        ("name = 'x'", r"ranvier\.toml:1: 'name' belongs to one model"),
        ("symbol_bounds = { n = [1, 2] }", r"ranvier\.toml:1: 'symbol_bounds' belongs to one model"),
        ("provider_options = 3", r"ranvier\.toml:1: provider_options must give the options"),
        ("[provider_options]\ncpu = 3", r"ranvier\.toml:2: provider_options.cpu must give the options"),
        ("# a\npreset = 'edg'", r"ranvier\.toml:2: unknown preset 'edg' \(did you mean 'edge'"),
        ("preset = 3", r"ranvier\.toml:1: a preset is a name"),
        ("[[memory]]\nx = 1", "memory must be a MemoryConfig"),
        ("[memory]\ngrowth = 'static'", r"memory\.growth from ranvier\.toml:2: .*growth='static' needs a pool_size"),
    ],
)
def test_a_bad_file_is_named_with_its_line(folder, text, problem):
    write(folder, text)
    with pytest.raises(InvalidConfig, match=problem):
        resolve({"threads": 1}, environ=EMPTY, folder=folder)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"threads = 1\x00", b"#" * ((1 << 20) + 1), b"x = " + b"[" * 100_000])
def test_files_that_are_no_files_of_options(folder, data):
    (folder / "ranvier.toml").write_bytes(data)
    with pytest.raises(InvalidConfig, match=r"^ranvier\.toml: "):
        resolve(environ=EMPTY, folder=folder)


def test_a_folder_of_that_name_is_no_file(folder):
    (folder / "ranvier.toml").mkdir()
    assert resolve(environ=EMPTY, folder=folder).files == ()
    with pytest.raises(InvalidConfig, match="cannot be read"):
        resolve(environ=EMPTY, folder=folder, file="ranvier.toml")


@pytest.mark.parametrize(
    ("system", "environ", "expected"),
    [
        ("linux", {"HOME": "/h"}, "/h/.config/ranvier/ranvier.toml"),
        ("linux", {"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x/ranvier/ranvier.toml"),
        ("linux", {}, None),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support/ranvier/ranvier.toml"),
        ("win32", {"APPDATA": "/a", "USERPROFILE": "/h"}, "/a/ranvier/ranvier.toml"),
        ("win32", {"USERPROFILE": "/h"}, "/h/AppData/Roaming/ranvier/ranvier.toml"),
        ("win32", {}, None),
    ],
)
def test_where_the_users_file_is(system, environ, expected):
    assert user_file(environ, system) == (None if expected is None else Path(expected))


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("a = 1\n[b]  # it\n  c = 2", "b.c", 3),
        ("b.c = 2", "b.c", 1),
        ("[b]\nd = 1\n['c']\ne = 2", "c.e", 4),
        ('"a" = 1', "a", 1),
        ("# a = 1\nc = 'a = 2'\na = 1", "a", 3),
        ("b = { c = 1 }", "b.c", 1),
        ("x = 1", "y", None),
    ],
)
def test_lines(text, name, line):
    assert line_of(text, name) == line


# -- presets and faults ---------------------------------------------------------------------------------------------


def test_no_preset_overrides_a_preset(folder):
    write(folder, "preset = 'edge'")
    assert resolve(environ=EMPTY, folder=folder).preset == "edge"
    assert resolve(environ={"RANVIER_PRESET": "Cloud"}, folder=folder).preset == "cloud"
    found = resolve(preset="none", environ={"RANVIER_PRESET": "cloud"}, folder=folder)
    assert found.preset == "" and found.config == SessionConfig()
    with pytest.raises(InvalidConfig, match="did you mean 'cloud'"):
        resolve(preset="clout", environ=EMPTY, folder=folder)


def test_faults_can_be_collected(folder, monkeypatch):
    monkeypatch.setattr(provider_module, "usable_cores", lambda: 3)
    write(folder, "thread = 1\ndebug = 9\nplan_cache = 5\npreset = 'edge'")
    environ = {"RANVIER_THREADS": "many", "RANVIER_FALLBACK": "off"}
    found = resolve({"optimisation": 1}, environ=environ, folder=folder, collect=True)
    assert len(found.problems) == 4
    for part in ("'optimization'", "RANVIER_THREADS", "ranvier.toml:1", "ranvier.toml:2"):
        assert any(part in problem for problem in found.problems)
    config = found.config
    assert (config.plan_cache, config.fallback, config.debug, config.threads) == (5, "off", 0, 3)
    broken = resolve(environ={"RANVIER_MEMORY_GROWTH": "static"}, folder=folder.parent, collect=True)
    assert broken.config == SessionConfig() and "pool_size" in broken.problems[0]
    assert "absent" in resolve(environ=EMPTY, folder=folder, file="absent", collect=True).problems[0]


# -- variables that set nothing -------------------------------------------------------------------------------------


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not warned of anything yet."""
    monkeypatch.setattr(logs, "_said", set())


@pytest.mark.usefixtures("unsaid")
def test_a_misspelt_variable_is_told_of_once(folder: Path, caplog: pytest.LogCaptureFixture):
    environ = {"RANVIER_THREDS": "2", "RANVIER_CACHE_DIRR": "x"}
    for _ in range(2):
        assert resolve(environ=environ, folder=folder).config.threads is None
    assert len(caplog.messages) == 2
    said = "\n".join(caplog.messages)
    assert "RANVIER_THREDS is unknown and has no effect (did you mean 'RANVIER_THREADS'?)" in said
    assert "(did you mean 'RANVIER_CACHE_DIR'?)" in said


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(
    "environ",
    [{"RANVIER_WORKER_TOKEN": "x"}, {"RANVIER_THREDS": " "}, {"RANVIER_ZZZ": "1"}, {"THREDS": "1"}, {"RANVIER_": "1"}],
)
def test_variables_of_others_are_left_in_peace(folder: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture):
    resolve(environ=environ, folder=folder)
    assert not caplog.messages


def test_every_variable_in_the_sources_is_known():
    """Whoever reads a new one has to write it down, or its users are told that it has no effect."""
    root = Path(ranvier.__file__).parent
    named = {found for path in root.rglob("*.py") for found in re.findall(r"\bRANVIER_[A-Z_]+\b", path.read_text())}
    assert {"RANVIER_CPU_ISA", "RANVIER_WORKER_TOKEN", "RANVIER_COMPILER"} <= named
    assert not named - {PREFIX, *OTHERS, *VARIABLES}
