"""The example of a plugin: installed, found, used, failing, and taken away again, each in a process of its own."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "plugin_provider"
GROUPS = ("ranvier.providers", "ranvier.ops")


def declared() -> dict[str, dict[str, str]]:
    """The entry points of the example's project file."""
    found: dict[str, dict[str, str]] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as an installer leaves it; no installer and no network are needed."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE / "src" / "ranvier_example", folder / "ranvier_example")
    info = folder / "ranvier_example-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ranvier-example\nVersion: 0.1.0\n")
    lines = [line for group, names in declared().items() for line in [f"[{group}]", *map(" = ".join, names.items())]]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def python(*arguments: str, path: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANVIER_FORCE_CPU")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# What all programs here begin with: a model that uses the plugin's operator.
_COMMON = """
import json, sys
import numpy as np
from onnx import TensorProto, helper
import ranvier as rv

nodes = [helper.make_node("LeakyIntegrator", ["x"], ["y"], domain="example.signal", decay=0.5)]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "n"]) for name in "xy"]
opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example.signal", 1)]
model = helper.make_model(helper.make_graph(nodes, "m", ends[:1], ends[1:]), opset_imports=opsets)
data = model.SerializeToString()
X = {"x": np.float32([[1, 1, 1, 1]])}
"""


def told(program: str, path: Path | None) -> Any:
    """What a program prints, as JSON."""
    done = python("-c", _COMMON + program, path=path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_own_tests_pass(site: Path) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), str(EXAMPLE / "tests"))
    done = python("-m", "pytest", *options, path=site)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_found_and_nothing_is_imported_before_it_is_used(site: Path) -> None:
    found = told(
        """
from ranvier.providers.registry import REGISTRY
seen = [REGISTRY.names(), [m for m in sys.modules if m.startswith("ranvier_example")]]
with rv.load(data, providers=["reference"]) as session:  # the operator alone
    first = session.run(X)["y"].tolist()
seen.append(sorted(m for m in sys.modules if m.startswith("ranvier_example")))
with rv.load(data, providers=["example"]) as session:
    second = session.run(X)["y"].tolist()
    where = [n.provider for n in session.report.nodes]
state, = REGISTRY.status("example")
print(json.dumps([*seen, first, second, where, state.ready, state.operations]))
""",
        site,
    )
    names, before, after_ops, first, second, where, ready, operations = found
    assert names[-1] == "example" and "cpu" in names
    assert before == []
    assert after_ops == ["ranvier_example", "ranvier_example.ops"]
    assert first == second == [[1.0, 1.5, 1.75, 1.875]]
    assert where == ["example"]
    assert ready and operations == 1


def test_what_is_needed_can_be_asked_for(site: Path) -> None:
    found = told(
        """
from ranvier.providers.registry import REGISTRY
from ranvier.providers.requirements import Requirements
best = REGISTRY.find_best(Requirements(ops={"LeakyIntegrator"}), auto=True)
print(json.dumps([best.provider, best.others, best.missing]))
""",
        site,
    )
    best, others, missing = found
    assert best == "reference"  # which takes whatever has a body
    assert "example" in others
    assert missing["cpu"] == ["operators LeakyIntegrator"]


def test_it_fails_and_others_finish(site: Path) -> None:
    found = told(
        """
options = {"example": {"max_elements": 3}}
with rv.load(data, providers=["example", "reference"], provider_options=options) as session:
    result = session.run(X)["y"].tolist()
    fallbacks = session.health["example"].fallbacks
from ranvier.errors import OutOfMemory
try:
    with rv.load(data, providers=["example"], provider_options=options, fallback="off") as session:
        session.run(X)
    raised = ""
except OutOfMemory as error:
    raised = str(error)
from ranvier.providers.registry import REGISTRY
print(json.dumps([result, fallbacks, raised, REGISTRY.status("example")[0].last_error]))
""",
        site,
    )
    result, fallbacks, raised, last = found
    assert result == [[1.0, 1.5, 1.75, 1.875]]
    assert fallbacks == 1
    assert raised == "example: 4 elements, there is room for 3"
    assert last == f"OutOfMemory: {raised}"


def test_its_options_are_checked(site: Path) -> None:
    found = told(
        """
from ranvier.errors import InvalidConfig
said = []
for options in ({"max_elements": 0}, {"max_element": 1}):
    try:
        rv.load(data, providers=["example"], provider_options={"example": options})
    except InvalidConfig as error:
        said.append(str(error))
print(json.dumps(said))
""",
        site,
    )
    assert found == [
        "ExampleOptions: max_elements must be 1 or more, got 0",
        "provider 'example': unknown option 'max_element' (did you mean 'max_elements'?)",
    ]


_AFTER = """
from ranvier.errors import InvalidConfig, UnsupportedOp
from ranvier.providers.registry import REGISTRY
said = []
for providers in (["example"], ["reference"]):
    try:
        rv.load(data, providers=providers)
    except (InvalidConfig, UnsupportedOp) as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps([REGISTRY.names(), said]))
"""


def test_without_it_nothing_is_left() -> None:
    names, said = told(_AFTER, None)
    assert "example" not in names
    assert said[0].startswith("InvalidConfig: unknown provider 'example'")
    assert said[1].startswith("UnsupportedOp: ") and "example.signal::LeakyIntegrator" in said[1]


def test_a_package_whose_code_is_gone_does_no_harm(site: Path, tmp_path: Path) -> None:
    """Entry points may outlive what they point to, as after half an uninstallation."""
    (info,) = site.glob("*.dist-info")
    shutil.copytree(info, tmp_path / info.name)
    names, said = told(_AFTER.replace("InvalidConfig, UnsupportedOp", "RanvierError"), tmp_path)
    assert "example" in names
    assert said[0].startswith("ProviderUnavailable: ") and "cannot be imported" in said[0]
    assert said[1].startswith("UnsupportedOp: ")


def test_unregistered_in_a_process_it_is_gone(site: Path) -> None:
    found = told(
        """
from ranvier.errors import InvalidConfig
from ranvier.providers.registry import REGISTRY
with rv.load(data, providers=["example"]) as session:
    session.run(X)
REGISTRY.unregister("example")
try:
    rv.load(data, providers=["example"])
except InvalidConfig as error:
    print(json.dumps(str(error)))
""",
        site,
    )
    assert found.startswith("unknown provider 'example'")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pip", "hatchling")), reason="needs pip and hatchling"
)
def test_an_installer_makes_the_same_of_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "target"
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--no-cache-dir")
    done = python("-m", "pip", "install", "-q", *flags, "--target", str(target), str(source), path=None)
    assert done.returncode == 0, done.stderr
    (written,) = target.glob("ranvier_example-*.dist-info/entry_points.txt")
    parser = configparser.ConfigParser(delimiters="=")
    parser.read(written)
    assert {group: dict(parser[group]) for group in parser.sections()} == declared()
    assert set(declared()) == set(GROUPS)
    found = told(
        """
with rv.load(data, providers=["example"]) as session:
    print(json.dumps(session.run(X)["y"].tolist()))
""",
        target,
    )
    assert found == [[1.0, 1.5, 1.75, 1.875]]
