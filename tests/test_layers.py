"""A layer imports only from the layers above it; providers never import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ranvier

PACKAGE = Path(ranvier.__file__).parent
# from the top down; a name is a module or a package
LAYERS = (
    ("domains", "records", "varying"),
    ("errors",),
    ("dtypes", "logs", "places", "plugged", "rules"),
    ("devices",),
    ("config", "parts"),
    ("memory",),
    ("dlpack",),
    ("interop",),
    ("graph",),
    ("ops",),
    ("formats",),
    ("charts",),
    ("quantize",),
    ("weights",),
    ("passes",),
    ("codegen",),
    ("providers",),
    ("runtime",),
    ("tensor",),
    ("nn", "numpy", "optim", "quantization"),
    ("training",),
    ("brain",),
    ("serve", "deploy"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BUILT_ON = {"bitnet": {"cpu"}}  # a policy on top of another provider
SHARED_BY_PROVIDERS = {"base", "registry", "memory", "distant", "part_model", "foreign", "claims", "own_memory"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py" and "capi" not in p.parts)


def imported(path: Path) -> set[str]:
    """Names of ranvier modules that a file imports, wherever in the file the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("ranvier."))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "ranvier":
            if node.module == "ranvier":
                found.update(f"ranvier.{alias.name}" for alias in node.names)
            else:
                found.add(str(node.module))
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative import")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in RANK, f"{own!r} is in no layer; add it to LAYERS"
    for name in imported(path):
        other = name.split(".")[1]
        assert other in RANK, f"imports {name}, which is in no layer"
        assert RANK[other] <= RANK[own], f"imports {name} from a layer below it"
        assert other == own or RANK[other] < RANK[own], f"imports {name} from its own layer's neighbour"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "providers").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_providers_do_not_import_each_other(path: Path) -> None:
    own = path.relative_to(PACKAGE / "providers").parts[0].removesuffix(".py")
    for name in imported(path):
        parts = name.split(".")
        if parts[1] == "providers" and len(parts) > 2 and own != "registry":
            assert parts[2] in SHARED_BY_PROVIDERS | BUILT_ON.get(own, set()) | {own}, f"imports {name}"
