"""``ranvier inspect``: what a model holds, without running it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ranvier.cli import exit_codes
from ranvier.cli.options import Setup, model_argument, session_options, with_output
from ranvier.cli.render import Output, bytes_text, count_text, facts, table
from ranvier.cli.samples import RandomSource
from ranvier.cli.training_memory import show_training, training_facts
from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, RanvierError
from ranvier.formats import onnx as onnx_format
from ranvier.graph.ir import Graph, Node
from ranvier.graph.types import TensorType
from ranvier.ops.estimate import graph_cost, node_cost


@click.command()
@model_argument
@click.option("--text", "as_text", is_flag=True, help="Print the graph itself, one line a node.")
@click.option("--nodes", "list_nodes", is_flag=True, help="List the nodes with types and estimated work.")
@click.option("--memory", "with_memory", is_flag=True, help="Plan the memory of a run and show what it takes.")
@click.option("--training", "with_training", is_flag=True, help="Estimate the memory of a training step.")
@click.option("--batch", type=click.IntRange(min=1), help="Samples in a batch, for --training.")
@click.option("--optimizer", default="adamw", show_default=True, help="What trains it, for --training.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the graph into this file.")
@click.option(
    "--check", "with_checks", is_flag=True, help="Check the model against the standard; exit code 1 if wrong."
)
@session_options
@with_output
def command(
    output: Output,
    model: str,
    as_text: bool,
    list_nodes: bool,
    with_memory: bool,
    with_training: bool,
    batch: int | None,
    optimizer: str,
    svg: Path | None,
    with_checks: bool,
    setup: Setup,
) -> None:
    """Show what MODEL holds: the graph as it is in the file, or with --level as the optimizer leaves it."""
    config = setup.config()
    with output.busy("reading"):
        graph = load_graph(model, config, optimized=setup.level is not None)
        dims = setup.dims(graph)
        if dims:
            bind_types(graph, dims)
    data: dict[str, Any] = {"model": model, "level": setup.level, **describe(graph, model)}
    data["unsupported"] = unsupported(graph, config.providers)
    if as_text:
        data["text"] = str(graph)
    if list_nodes:
        data["nodes"] = [_node_facts(node) for node in graph.all_nodes()]
    if with_memory:
        data["memory"] = memory_facts(model, setup, output)
    if with_training:
        with output.busy("deriving"):
            data["training"] = training_facts(graph, batch, optimizer, dims)
    if with_checks:
        data["checks"] = run_checks(model, graph)
    if svg is not None:
        data["svg"] = str(svg)
        _draw(graph, svg, output)
    _show(output, data, only_text=as_text, drawn=svg)
    if any(check["problem"] for check in data.get("checks", ())):
        raise SystemExit(exit_codes.CHECK_FAILED)


# -- facts ----------------------------------------------------------------------------------------------------------


def load_graph(model: str, config: SessionConfig, *, optimized: bool) -> Graph:
    """The graph of a model file, as it is or optimized; no provider is asked, so any model can be shown."""
    graph = onnx_format.read(model, limits=config.limits)
    if optimized:
        from ranvier.passes import default_passes
        from ranvier.passes.manager import passes_for

        passes_for(config.optimization, default_passes(), config.disabled_passes).run(graph, config)
    return graph


def bind_types(graph: Graph, dims: Mapping[str, int]) -> None:
    """Write the types that all values have once these dims are given."""
    from ranvier.ops import TypeInference

    inference = TypeInference(dims)
    inference.run(graph)
    for value, found in inference.types.items():
        if found is not None:
            value.type = found


def describe(graph: Graph, model: str) -> dict[str, Any]:
    """Everything that is said of a model, as plain data."""
    metadata = graph.metadata
    nodes = list(graph.all_nodes())
    constants = [v.const for g in graph.all_graphs() for v in g.constants.values() if v.const is not None]
    constants += graph.defaults.values()
    weights: Counter[str] = Counter()
    for tensor in constants:
        weights[tensor.dtype.name] += tensor.size
    cost = graph_cost(graph)
    return {
        "name": graph.name,
        "producer": " ".join(filter(None, (metadata.get("producer_name"), metadata.get("producer_version")))),
        "ir_version": metadata.get("ir_version"),
        "opsets": {domain or "ai.onnx": version for domain, version in graph.opsets.items()},
        "doc": graph.doc or metadata.get("doc_string", ""),
        "metadata": dict(metadata.get("custom", {})),
        "file_bytes": _file_size(model),
        "inputs": {v.name: str(v.type) for v in graph.required_inputs()},
        "optional_inputs": {v.name: str(v.type) for v in graph.inputs if v.name in graph.defaults},
        "outputs": {v.name: str(v.type) for v in graph.outputs},
        "symbols": list(graph.symbols),
        "node_count": len(nodes),
        "subgraphs": sum(1 for _ in graph.all_graphs()) - 1,
        "parameters": sum(weights.values()),
        "parameter_bytes": sum(tensor.nbytes for tensor in constants),
        "parameters_by_type": dict(weights.most_common()),
        "estimated_flops": cost.flops,
        "estimated_bytes_moved": cost.bytes,
        "operators": _operators(nodes),
        "problems": list(metadata.get("problems", ())),
    }


def unsupported(graph: Graph, providers: Sequence[str]) -> list[str]:
    """Operators that none of the providers would run."""
    from ranvier.providers.registry import REGISTRY
    from ranvier.runtime.partition import unsupported_ops

    return [str(missing) for missing in unsupported_ops(graph, REGISTRY.chain(providers)[0])]


def _file_size(model: str) -> int | None:
    try:
        return Path(model).stat().st_size
    except OSError:
        return None


def _operators(nodes: list[Node]) -> list[dict[str, Any]]:
    """How often each operator occurs and its share of the arithmetic, the most frequent first."""
    counts: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for node in nodes:
        name = f"{node.domain}::{node.op}" if node.domain else node.op
        counts[name] += 1
        flops[name] += int(node_cost(node).flops)
    total = sum(flops.values()) or 1
    return [{"op": name, "count": n, "flops_share": flops[name] / total} for name, n in counts.most_common()]


def _node_facts(node: Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "domain": node.domain,
        "version": node.version,
        "name": node.name,
        "origin": node.origin,
        "inputs": [None if v is None else {"name": v.name, "type": str(v.type)} for v in node.inputs],
        "outputs": [{"name": v.name, "type": str(v.type)} for v in node.outputs],
        "estimated_flops": node_cost(node).flops,
    }


def memory_facts(model: str, setup: Setup, output: Output) -> dict[str, Any]:
    """What the memory planner makes of one run with these sizes."""
    with setup.open(model, output) as session:
        sizes = RandomSource(0, setup.dims(session.graph))
        for value in session.graph.inputs:
            if isinstance(value.type, TensorType):
                sizes.shape(value.name, value.type)
        plan = session.bind(**sizes.sizes)
        names = {slot: value.name for value, slot in plan.program.slots.items()}
        memory, inside = plan.memory, plan.inside()
        # one partition is the whole run: then its own plan is the plan
        whole = inside[0] if len(inside) == 1 and not plan.layout.placed else memory
        return {
            "level": session.config.optimization,
            "sizes": sizes.sizes,
            "chosen": sizes.chosen,
            "arena_bytes": memory.arena,
            "all_tensors_bytes": whole.total,
            "lower_bound_bytes": whole.lower_bound,
            "planned": len(plan.layout.placed) + sum(len(each.offsets) for each in inside),
            "took_over": memory.shared + sum(each.shared for each in inside),
            "output_bytes": plan.output_bytes(),
            "weight_bytes": session.graph.constant_bytes(),
            "weight_bytes_used": plan.weight_bytes(),
            "run_bytes": plan.weight_bytes() + memory.arena + plan.output_bytes(),
            "unplanned": [names[slot] for slot in plan.layout.unplanned],
        }


def run_checks(model: str, graph: Graph) -> list[dict[str, str]]:
    """The standard's own checker with type inference, and the graph's invariants; each with its problem, or none."""
    import onnx

    from ranvier.graph.verify import verify

    found = []
    try:
        onnx.checker.check_model(model, full_check=True)
        problem = ""
    except Exception as error:  # the checker raises its own errors, the inference's, and the parser's
        problem = str(error).strip() or type(error).__name__
    found.append({"check": "onnx.checker, full", "problem": problem})
    try:
        verify(graph)
        problem = ""
    except RanvierError as error:
        problem = str(error)
    found.append({"check": "graph invariants", "problem": problem})
    return found


def _draw(graph: Graph, target: Path, output: Output) -> None:
    from ranvier.cli.files import write_text
    from ranvier.graph.draw import draw_svg

    with output.busy("drawing"):
        picture = draw_svg(graph)
    if str(target) == "-":
        if output.json:
            raise InvalidConfig("--svg -: a picture and JSON cannot both go to stdout")
        sys.stdout.write(picture)
    else:
        write_text(target, picture)


# -- for people -----------------------------------------------------------------------------------------------------


def _show(output: Output, data: dict[str, Any], *, only_text: bool, drawn: Path | None) -> None:
    if output.json:
        output.emit(data)
        return
    if drawn is not None:
        if str(drawn) != "-":
            output.note(f"wrote {drawn}")
        if not any(key in data for key in ("text", "nodes", "memory", "checks")):
            return
    if only_text:
        click.echo(data["text"])
    elif "nodes" in data:
        _show_nodes(output, data["nodes"])
    elif not {"memory", "training", "checks"} & data.keys():
        _show_model(output, data)
    if "memory" in data:
        _show_memory(output, data["memory"])
    if "training" in data:
        show_training(output, data["training"])
    for check in data.get("checks", ()):
        output.show(f"{check['check']}: {check['problem'] or 'ok'}")


def _show_model(output: Output, data: dict[str, Any]) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in data["opsets"].items())
    types = ", ".join(f"{count_text(n)} {dtype}" for dtype, n in data["parameters_by_type"].items())
    nested = f", {data['subgraphs']} subgraphs" if data["subgraphs"] else ""
    level = f" after optimization ({data['level']})" if data["level"] else ""
    work = f"about {count_text(data['estimated_flops'])} operations, {bytes_text(data['estimated_bytes_moved'])} moved"
    rows = [
        ("graph", data["name"]),
        ("producer", data["producer"]),
        ("opset", f"{opsets}  (IR version {data['ir_version']})"),
        ("file", bytes_text(data["file_bytes"])),
        ("nodes", f"{data['node_count']}{nested}{level}"),
        ("parameters", f"{count_text(data['parameters'])} in {bytes_text(data['parameter_bytes'])}  ({types})"),
        ("one run", f"{work}{_free(data['symbols'])}"),
        ("about", data["doc"].strip().splitlines()[0] if data["doc"].strip() else ""),
    ]
    output.show(facts(rows), "")
    interface = [("input", name, kind) for name, kind in data["inputs"].items()]
    interface += [("optional input", name, kind) for name, kind in data["optional_inputs"].items()]
    interface += [("output", name, kind) for name, kind in data["outputs"].items()]
    output.show(table(["", "name", "type"], interface), "")
    operators = [(o["op"], o["count"], f"{o['flops_share']:.1%}") for o in data["operators"]]
    output.show(table(["!operator", ">count", ">share of work"], operators))
    if data["metadata"]:
        output.heading("metadata")
        pairs = [(key, text if len(text) <= 200 else text[:199] + "…") for key, text in data["metadata"].items()]
        output.show(facts(pairs))
    if data["unsupported"]:
        output.show("\nno provider here runs:", *(f"  {line}" for line in data["unsupported"]))
    for problem in data["problems"]:
        output.note(f"type inference: {problem}")


def _free(symbols: list[str]) -> str:
    return f"  (with {', '.join(symbols)} as 1 unless --set)" if symbols else ""


def _show_nodes(output: Output, nodes: list[dict[str, Any]]) -> None:
    rows = []
    for k, node in enumerate(nodes):
        operands = ", ".join(v["type"] for v in node["inputs"] if v is not None)
        results = ", ".join(v["type"] for v in node["outputs"])
        op = f"{node['domain']}::{node['op']}" if node["domain"] else node["op"]
        rows.append((k, op, node["name"], operands, results, count_text(node["estimated_flops"])))
    output.show(table([">", "!operator", "name", "operands", "results", ">operations"], rows))


def _show_memory(output: Output, memory: dict[str, Any]) -> None:
    arena, total, bound = memory["arena_bytes"], memory["all_tensors_bytes"], memory["lower_bound_bytes"]
    saved = f"  ({total / arena:.1f} times as much)" if arena else ""
    above = f"  (the plan is {arena / bound - 1:.1%} above it)" if bound else ""
    sizes = ", ".join(f"{k}={v}" for k, v in memory["sizes"].items())
    if memory["chosen"]:
        output.note(f"chosen sizes: {', '.join(memory['chosen'])}; --set changes that")
    output.heading(f"memory of one run, optimization {memory['level']}{f', {sizes}' if sizes else ''}")
    rows = [
        ("arena", f"{bytes_text(arena)} for {memory['planned']} tensors"),
        ("without reuse", f"{bytes_text(total)}{saved}"),
        ("lower bound", f"{bytes_text(bound)}{above}"),
        ("in place", f"{memory['took_over']} tensors took over the memory of an operand"),
        ("outputs", f"{bytes_text(memory['output_bytes'])} (they belong to the caller)"),
        ("weights", f"{bytes_text(memory['weight_bytes_used'])} as kernels read them{_in_model(memory)}"),
        ("one run", f"{bytes_text(memory['run_bytes'])} of weights, arena and outputs"),
        ("not planned", _unplanned(memory)),
    ]
    output.show(facts(rows))


def _in_model(memory: dict[str, Any]) -> str:
    own, used = memory["weight_bytes"], memory["weight_bytes_used"]
    return "" if own == used else f"  ({bytes_text(own)} in the model)"


def _unplanned(memory: dict[str, Any]) -> str:
    names = memory["unplanned"]
    if not names:
        return "none"
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{len(names)} tensors whose size is known only when they are computed: {shown}"
