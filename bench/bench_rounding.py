"""GPTQ and AWQ against rounding to the nearest, layer by layer, on the trained models of the CPU suite.

    RANVIER_MODELS=folder python -m bench.bench_rounding [--only PATTERN] [--samples 16] [--unseen 64] [--group 32]

Codes of four bits are made by samples, and a layer's output error (not squared, as a part of that of the nearest codes)
is that on other samples, for the same inputs: errors of layers before it are not in it, as they are in the report of
``ranvier quantize``. Products with constant weights are compared; `int4` is symmetric and `uint4` has zero points, both
with ranges cut where that lessens the error of the weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bench_quantize import UNSEEN, coded, of_real_models, sample
from ranvier.cli.suites import catalogue
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph
from ranvier.quantize import InputMoments
from ranvier.runtime.quantizing import prepared
from ranvier.runtime.quantizing.samples import visit
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.weight_only import codes_of

_NEAREST, _BY_SAMPLES = ("int4", "uint4"), ("gptq", "awq")


@dataclass(frozen=True)
class Layer:
    """``errors`` by scheme, of one layer's output."""

    model: str
    layer: str
    shape: tuple[int, int]
    errors: dict[str, float]

    def part(self, scheme: str, nearest: str) -> float:
        return self.errors[scheme] / self.errors[nearest]


def moments_of(graph: Graph, sites: Sequence[Site], feeds: Sequence[Any], config: SessionConfig) -> Any:
    found = {site.data.name: InputMoments(site.matrix.shape[1]) for site in sites}
    visit(graph, list(found), feeds, config, lambda name, x: found[name].update(x))
    return found


def measure(case: catalogue.Case, options: argparse.Namespace) -> list[Layer]:
    original = onnx_format.read(str(case.path))
    if coded(original):
        raise InvalidConfig("it is quantized already")
    config = SessionConfig.default()
    graph = prepared(original, config)
    sites = find_sites(graph, products_only=True)
    if not sites:
        raise InvalidConfig("no product with constant weights")
    known, unseen = (
        moments_of(graph, sites, [sample(graph, case, first + k) for k in range(count)], config)
        for first, count in ((1, options.samples), (UNSEEN, options.unseen))
    )
    rows = []
    for site in sites:
        if not known[site.data.name].count or not unseen[site.data.name].count:
            continue
        matrix, errors = site.matrix, {}
        for scheme in (*_NEAREST, *_BY_SAMPLES):
            moments = [known[site.data.name]] if scheme in _BY_SAMPLES else []
            made = codes_of(matrix, scheme, options.group, moments)
            back = made.codes.dequantize().astype(np.float64) / (1 if made.factors is None else made.factors)
            errors[scheme] = unseen[site.data.name].error(back - matrix) ** 0.5
        if errors["uint4"] > 0 and errors["int4"] > 0:
            rows.append(Layer(case.name, site.name, matrix.shape, errors))
    return rows


def show(rows: Sequence[Layer], left_out: dict[str, str], options: argparse.Namespace) -> None:
    console = Console()
    what = (
        f"made by {options.samples} samples, on {options.unseen} others: in the middle, the worst layer, how many lower"
    )
    table = Table(title=f"Errors of layers' outputs, {what}")
    table.add_column("model")
    table.add_column("layers", justify="right")
    pairs = [(scheme, nearest) for scheme in _BY_SAMPLES for nearest in _NEAREST]
    for scheme, nearest in pairs:
        table.add_column(f"{scheme} by {nearest}", justify="right", no_wrap=True)
    for model in dict.fromkeys(row.model for row in rows):
        those = [row for row in rows if row.model == model]
        cells = []
        for scheme, nearest in pairs:
            parts = [row.part(scheme, nearest) for row in those]
            cells.append(f"{np.median(parts):.2f}, {max(parts):.3f}, {sum(p < 1 for p in parts)}/{len(parts)}")
        table.add_row(model, str(len(those)), *cells)
    console.print(table)
    for scheme, nearest in pairs:
        lower = sum(row.part(scheme, nearest) < 1 for row in rows)
        console.print(f"{scheme}: lower than {nearest} in {lower} of {len(rows)} layers")
    for name, why in left_out.items():
        console.print(f"{name}: {why}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", action="append", default=[], help="patterns of names")
    arguments.add_argument("--samples", type=int, default=16, help="that codes are made by")
    arguments.add_argument("--unseen", type=int, default=64, help="that they are compared on")
    arguments.add_argument("--group", type=int, default=32)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    rows, left_out = of_real_models(options.only, lambda case: measure(case, options))
    if options.json:
        print(json.dumps({"layers": [asdict(row) for row in rows], "left_out": left_out}))
    else:
        show(rows, left_out, options)


if __name__ == "__main__":
    main()
