"""Quantized forms of one model, by what its values are on samples."""

from __future__ import annotations

import fnmatch
import glob
import os
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig
from ranvier.formats.onnx import read
from ranvier.formats.onnx.retarget import retarget
from ranvier.graph.defaults import can_settle, settle
from ranvier.graph.exposed import can_be_shown
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.verify import verify
from ranvier.passes import default_passes
from ranvier.passes.fuse.activation import HardActivationFusion
from ranvier.passes.manager import PassManager
from ranvier.quantize import InputMoments, Observer, observer
from ranvier.quantize.observers import OBSERVERS, ChannelMean
from ranvier.runtime.quantizing.asked import Asked
from ranvier.runtime.quantizing.distinct import make_nodes_distinct, make_values_distinct, number_after
from ranvier.runtime.quantizing.dynamic import DYNAMIC, dynamic_sites, quantize_dynamic
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.expert_codes import ExpertCoder
from ranvier.runtime.quantizing.experts import experts_of, find_routers
from ranvier.runtime.quantizing.forms import Form
from ranvier.runtime.quantizing.fused_layers import take_fused_apart
from ranvier.runtime.quantizing.options import BEST, Quantization
from ranvier.runtime.quantizing.outdated import replace_outdated
from ranvier.runtime.quantizing.plain import make_products_plain
from ranvier.runtime.quantizing.projections import take_out_projections
from ranvier.runtime.quantizing.recurrent import find_recurrent, quantize_recurrent
from ranvier.runtime.quantizing.report import difference
from ranvier.runtime.quantizing.rounding import Rounding, SumMoments, mean_of, moments_of
from ranvier.runtime.quantizing.samples import Feed, results, visit
from ranvier.runtime.quantizing.sites import Site, find_sites, named_in_errors, noted_in_errors
from ranvier.runtime.quantizing.static import Shared, coded_values, narrow_weights, quantize_static
from ranvier.runtime.quantizing.weight_only import CALIBRATED, Known, quantize_weights
from ranvier.runtime.quantizing.words import OPSET as OPSET_OF_WORDS
from ranvier.runtime.quantizing.words import quantize_words, takes_words
from ranvier.runtime.session import Session

# what makes layers plain and keeps a graph that any runtime reads
_PREPARE = (
    "loop_invariants",
    "loop_products",
    "dead_code",
    "fold_shapes",
    "fold_constants",
    "cancel",
    "common_subexpressions",
    "fold_affine",
)


OPSET = 21  # for models whose own is older than the least; runtimes of 2024 read it
LEAST_OPSET = 19  # has float8, and scales for channels
GIVEN_BYTES = "given_bytes"  # of the weights of a model before it was prepared, which may fold or join them
Range = tuple[float, float]
Group = tuple[Sequence[Feed], Sequence[Sequence[np.ndarray[Any, Any]]]]
_SPAN = "minmax"  # the way to find ranges that leaves nothing out
_FEW = 8  # samples that ways to find ranges are chosen by
_BEFORE = 0.25  # part of the time after which no more ways to prepare a model and its ranges are tried
_ENOUGH = 16  # samples that are enough for parts of them to serve different ends
_ENOUGH_FOR_TWO = 4  # ... for two ends: some are held back from what weights are made by
_PARTS = {0: "ranges", 1: "choice", 2: "held", 3: "ranges", 4: "choice", 5: "held", 6: "ranges", 7: "choice"}


def prepared(model: str | os.PathLike[str] | Graph, config: SessionConfig) -> Graph:
    """The graph with normalizations and other arithmetic on channels folded into layers, and few operators for an
    activation, still of standard ones only; weights that a file lists among its inputs are constants."""
    graph = model if isinstance(model, Graph) else read(model, limits=config.limits)
    graph.metadata[GIVEN_BYTES] = graph.constant_bytes()
    for value in list(graph.inputs):
        if can_settle(graph, value):
            settle(graph, value)
    names: tuple[str, ...] = _PREPARE
    if graph.opsets.get("", OPSET) < LEAST_OPSET:
        names = ("modernise", *names)
    replace_outdated(graph)
    take_fused_apart(graph)
    passes = [*(each for each in default_passes() if each.name in names), HardActivationFusion()]
    # codes round far more than factors that become part of a layer, or an activation that was written in other steps
    reports = PassManager(passes).run(graph, config.updated(optimization="aggressive"))
    if "modernise" in names:
        left = next((report.declined for report in reports if report.name == "modernise"), {})
        with noted_in_errors("; ".join(left)):
            retarget(graph, OPSET)
    make_nodes_distinct(graph)
    take_out_projections(graph)
    make_products_plain(graph)
    make_values_distinct(graph)
    return graph


def finish(graph: Graph, original: Sequence[Value], config: SessionConfig) -> None:
    """Make a graph that codes were put into one for a file; ``original`` values keep their names."""
    graph.opsets.setdefault("com.microsoft", 1)
    retarget(graph, graph.opsets[""])  # what was added came in its newest version
    PassManager([each for each in default_passes() if each.name == "dead_code"]).run(graph, config)
    make_values_distinct(graph, original)
    verify(graph)


class Maker:
    """Looks at samples of one graph, and makes quantized forms of it.

    ``told`` is called with what is being done, ``stepped`` with how much of it is done, of how much.
    """

    def __init__(
        self,
        graph: Graph,
        feeds: Sequence[Feed],
        options: Quantization,
        config: SessionConfig | None = None,
        told: Callable[[str], None] | None = None,
        stepped: Callable[[int, int], None] | None = None,
    ) -> None:
        self.begun = time.perf_counter()
        self.original = self.graph = graph  # as it was given, and with channels brought to like ranges
        self.feeds, self.options = list(feeds), options
        self.samples = len(self.feeds)
        self.config = self._running = config or SessionConfig()  # of the original, and of what is made
        self.told = told or (lambda text: None)
        self.step = stepped or (lambda done, of: None)
        self.static, self._dynamic = options.scheme == "int8", options.scheme == DYNAMIC
        if not self.feeds and (self.static or options.scheme in CALIBRATED):
            raise InvalidConfig(f"scheme {options.scheme!r} needs samples of the inputs")
        self._looked, self.held = self.feeds, list[Feed]()
        self._split()
        every = self.sites_of(graph)
        recurrent = [node.name for node in self.recurrent_of(graph)]
        self._experts = ExpertCoder(graph, options.scheme, options.group, options.bits)
        mixtures = [layer.name for layer in self._experts.layers]
        known = [*(site.name for site in every), *recurrent, *mixtures]
        called = {p: [name for name in known if name == p or fnmatch.fnmatchcase(name, p)] for p in options.keep}
        nobody = next((p for p, found in called.items() if not found), None)
        if nobody is not None:
            raise InvalidConfig(f"no layer is called {nobody!r}")
        self.kept = frozenset(name for found in called.values() for name in found)
        self._experts.check(self.kept)
        self.unfit = dict(self._experts.unfit)
        self.unfit |= self._never_seen(every) if self.static else find_routers(every)
        self.left = self.kept | self.unfit.keys()  # layers that stay as they are
        self.sites = [site for site in every if site.name not in self.left]
        self.recurrent = frozenset(recurrent) - self.kept
        self.experts = [name for name in mixtures if name not in self.left]
        names = [name for name in known if name not in self.unfit]
        if names and not self.sites and not self.recurrent and not self.experts:
            raise InvalidConfig("every layer that could be quantized was asked to be kept")
        if not names:
            bodies = (body for body in graph.all_graphs() if body is not graph)
            inside = any(experts_of(node) for body in bodies for node in body)
            left = "; experts in bodies of If and Loop are left as they are" if inside else ""
            if not self.static and find_sites(graph, bodies=True):
                left += f"; of convolutions int8 codes weights, and {DYNAMIC} those of long sums"
            left += "".join(f"; layer {name!r}: {why}" for name, why in self.unfit.items())
            raise InvalidConfig(
                f"no layer of this model can be quantized: it needs float32 products with constant weights{left}"
            )
        self._joins = True
        self.ranges: dict[str, Range] = {}
        self.spans: dict[str, Range] = {}  # from the least to the largest value
        self.can_be_words = frozenset[str]()
        if self.static and options.allows_words and graph.opsets.get("", 0) >= OPSET_OF_WORDS:
            self.can_be_words = frozenset(site.name for site in self.sites if takes_words(site))
        self.means: dict[str, np.ndarray[Any, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._moments: dict[str, InputMoments] = {}
        self._known: Known = {}  # codes of weights alone, which everything that is made has in common
        self.rounding = Rounding(fit=options.fit)
        self._watched: dict[str, dict[str, Observer]] = {}  # by the way ranges are found, as those:
        self._found: dict[str, dict[str, Range]] = {}
        self._widened: set[str] = set()  # ways that have seen all samples but those held back
        self._averages: dict[str, ChannelMean] = {}
        self.expected = list(results(graph, self.feeds, self.config))
        self.groups: list[Group] = [(self.feeds, self.expected)]  # what forms are chosen by
        if self.static and self.held:
            self.groups.append((self._looked, list(results(graph, self._looked, self.config))))
        self.expected_of_held = list(results(graph, self.held, self.config))
        self.asked = Asked(options.max_error, options.cosine if self.static else None, self.expected)
        narrow = self.config.updated(precision="bf16")
        self.stays: frozenset[str] = frozenset()  # layers that sessions in bfloat16 multiply in float32 all the same
        if self.static and (options.rest == "bf16" or (options.rest == BEST and self._all_in(narrow))):
            self._running = narrow
        if self.static and options.equalize:
            self._take(self._evened())
        ways = tuple(OBSERVERS) if options.ranges == BEST else (options.ranges,)
        self._observe(ways, self._looked, sums=True)
        if len(self._found) > 1:
            self.told("choosing ranges")
            self.ranges = self._nearest_ranges()

    def sites_of(self, graph: Graph) -> list[Site]:
        """The layers that the scheme codes, but for those of experts and recurrent ones."""
        if self._dynamic:
            return dynamic_sites(graph, bodies=True)
        return find_sites(graph, products_only=not self.static, bodies=True)

    def _split(self) -> None:
        """Samples in parts that serve different ends, where there are enough: what ranges, or weights, were made for
        shows too little of their errors."""
        enough = _ENOUGH if self.static else _ENOUGH_FOR_TWO
        if (self.static or self.options.scheme in CALIBRATED) and len(self.feeds) >= enough:
            parts: dict[str, list[Feed]] = {"ranges": [], "choice": [], "held": []}
            for k, feed in enumerate(self.feeds):
                parts[_PARTS[k % len(_PARTS)]].append(feed)
            self._looked, self.feeds, self.held = parts["ranges"], parts["choice"], parts["held"]
            if not self.static:  # weights are rounded by all of the others
                self._looked = self.feeds = [*parts["ranges"], *parts["choice"]]

    def _never_seen(self, sites: Sequence[Site]) -> dict[str, str]:
        """Layers in bodies that no sample is known to have reached, by name, and why. What they read may come from
        around the body; what it is in other cases says little of it."""
        inside = [site for site in sites if site.graph is not self.graph]
        seen = set[str]()
        given = [site.node.output.name for site in inside]
        visit(self.graph, given, self._looked, self.config, lambda name, _: seen.add(name))
        hidden = "no run shows whether it is reached"
        return {
            site.name: "no sample reached it" if can_be_shown(site.node.output) else hidden
            for site in inside
            if site.node.output.name not in seen
        }

    def _nearest_codes(self) -> dict[str, str]:
        """Layers that GPTQ or AWQ was asked for and no sample reached, by name, and the scheme they have instead."""
        if self.options.scheme not in CALIBRATED:
            return {}
        made = {site.name: self._known.get((site.weight.name, site.outputs)) for site in self.sites}
        return {name: x.codes.scheme for name, x in made.items() if x is not None and x.codes.scheme not in CALIBRATED}

    def recurrent_of(self, graph: Graph) -> list[Node]:
        return find_recurrent(graph, bodies=True) if self.static or self._dynamic else []

    def _all_in(self, narrow: SessionConfig) -> bool:
        """Whether bfloat16 is best without a look at results: nothing is asked of them, and the processor multiplies
        it."""
        if self.asked.anything:
            return False
        with Session(copied(self.graph), narrow) as session:
            session.run(self.feeds[0])
            self.look_at_narrow(session)
            return any("bf16" in (found.computes, found.stores) for found in session.report.precisions.values())

    def look_at_narrow(self, session: Session) -> None:
        """Which layers a session in bfloat16 leaves in float32: weights with fewer bits would gain them nothing. A
        processor that multiplies none of them in bfloat16 says nothing about those that do."""
        kinds = {node.name: node.precision for node in session.report.nodes}
        kinds |= {name: found.computes for name, found in session.report.precisions.items()}
        if "bf16" in kinds.values():
            self.stays = frozenset(name for name, kind in kinds.items() if kind != "bf16")

    def _take(self, graph: Graph) -> None:
        self.graph, self.rounding = graph, Rounding(fit=self.options.fit)
        self.sites = [site for site in self.sites_of(graph) if site.name not in self.left]

    def _evened(self) -> Graph:
        """The graph with channels brought to like ranges, in the way that errors of results are least with."""
        original, looked, few = self.graph, self._looked[:_FEW], self.feeds[:_FEW]
        found = [original]
        for with_rows in (False, True):
            if self._late():
                break
            self.told("bringing channels to like ranges")
            graph = copied(original)
            before = [value for each in graph.all_graphs() for value in each.values()]
            number_after(graph)
            if equalize(graph, looked, self.config, with_rows=with_rows):
                make_values_distinct(graph, before)
                found.append(graph)
        if len(found) > 1 and len(found[-1]) == len(found[-2]):
            found.pop()  # no row stayed
        errors = []
        for graph in found if len(found) > 1 else ():
            self._take(graph)
            self._observe(("minmax",), looked)
            errors.append(difference(list(results(self.made(), few, self._running)), self.expected[:_FEW]).error)
        return found[errors.index(min(errors))] if errors else original

    def _observe(self, ways: Sequence[str], feeds: Sequence[Feed], *, sums: bool = False) -> None:
        """Look at the activations that matter once, for all trials; ``sums``: at what sums of layers read too, for
        weights to be rounded by it."""
        if self.static or self.options.scheme in CALIBRATED:
            self.told("looking at activations")
        if self.static:
            watched = dict.fromkeys((*ways, *self._for_words))
            self._watched = {n: {way: observer(way) for way in watched} for n in coded_values(self.sites)}
            self._averages = {s.name: mean_of(s) for s in self.sites}
            moments = moments_of(self.sites) if sums else {}
            self._look(tuple(watched), feeds, moments)
            seen = {name: each for name, each in self._watched.items() if name in self.shapes}
            self._found = {way: {name: each[way].range() for name, each in seen.items()} for way in ways}
            self.ranges = self._found[ways[0]]
            self.spans = {name: each[way].range() for way in self._for_words for name, each in seen.items()}
            if sums:
                self.rounding = Rounding(moments, self.options.fit)
        elif self.options.scheme in CALIBRATED:
            self._moments = {s.data.name: InputMoments(s.matrix.shape[1]) for s in self.sites}
            readers = {s.data.name: s.name for s in self.sites}
            rows = self._experts.rows(self.left)

            def gather(name: str, x: np.ndarray[Any, Any]) -> None:
                rows.look(name, x)
                if name in readers:
                    with named_in_errors(readers[name], "what it reads"):
                        self._moments[name].update(x)

            visit(self.graph, list(dict.fromkeys([*self._moments, *rows.names])), feeds, self.config, gather)

    @property
    def _for_words(self) -> tuple[str, ...]:
        """The way to find ranges that codes of 16 bits have, if any layer may have some."""
        return (_SPAN,) if self.can_be_words else ()

    def _look(self, ways: Sequence[str], feeds: Sequence[Feed], moments: Mapping[str, SumMoments]) -> None:
        """More samples for what is known of activations."""
        readers: dict[str, list[SumMoments | ChannelMean]] = {}  # layers may not take the same for channels
        for site in self.sites:
            for known in (moments, self._averages):
                if site.name in known:
                    readers.setdefault(site.data.name, []).append(known[site.name])

        def look(name: str, x: np.ndarray[Any, Any]) -> None:
            self.shapes[name] = x.shape
            for way in ways:
                self._watched[name][way].update(x)
            for each in readers.get(name, ()):
                each.update(x)

        visit(self.graph, list(self._watched), feeds, self.config, look)
        self.means = {name: each.mean for name, each in self._averages.items()}

    def _narrow(self, sites: Sequence[Site], running: SessionConfig) -> None:
        """Weights of these layers as numbers of bfloat16, those that are multiplied in it."""
        if running.precision == "bf16":
            stays = (*running.keep_f32, *map(glob.escape, self.kept | self.stays))
            those = [s for s in sites if not any(fnmatch.fnmatchcase(s.name, pattern) for pattern in stays)]
            narrow_weights(those, self.rounding, self.means)

    def made(self, kept: frozenset[str] = frozenset()) -> Graph:
        """The graph with all layers quantized but these."""
        return self._made(Form(kept, joins=self._joins), self._running)

    def form(self, form: Form) -> Graph:
        """The graph in this form."""
        return self._made(form, form.running(self.config))

    def _made(self, form: Form, running: SessionConfig) -> Graph:
        graph = copied(self.graph)
        original = [value for each in graph.all_graphs() for value in each.values()]
        number_after(graph)
        left = self.left | form.floats
        every = self.sites_of(graph)
        sites = [s for s in every if s.name not in left]
        if self.static:
            self._narrow([s for s in every if s.name in left], running)
            words, shared = [s for s in every if s.name in form.words], Shared()
            spans = {s.name: self.spans[s.data.name] for s in words}
            how: dict[str, Any] = {"rounding": self.rounding, "means": self.means, "shared": shared}
            quantize_static(graph, sites, self.ranges, signed=self.options.signed, joins=form.joins, **how)
            if words:
                quantize_words(words, spans, **how)
                graph.opsets[""] = max(graph.opsets[""], OPSET_OF_WORDS)
        elif self._dynamic:
            quantize_dynamic(sites)
        else:
            asked = {"group": self.options.group, "bits": self.options.bits, "level": self.options.level}
            quantize_weights(graph, sites, self.options.scheme, **asked, moments=self._moments, known=self._known)
            self._experts.write(graph, left)
        quantize_recurrent([node for node in self.recurrent_of(graph) if node.name not in left])
        finish(graph, original, self.config)
        return graph

    def widened(self) -> dict[str, Range]:
        """Ranges by every sample that had a part in the choice, each found in the way that was chosen."""
        if self._looked is self.feeds:
            return self.ranges
        self.told("looking at activations")
        ways = {
            name: next(way for way, found in self._found.items() if found[name] == bounds)
            for name, bounds in self.ranges.items()
        }
        narrow = tuple(way for way in dict.fromkeys((*ways.values(), *self._for_words)) if way not in self._widened)
        if narrow:
            self._look(narrow, self.feeds, {})
            self._widened.update(narrow)
        self.spans = {name: self._watched[name][_SPAN].range() for name in self.spans}
        return {name: self._watched[name][way].range() for name, way in ways.items()}

    def ways_to_find_ranges(self) -> list[dict[str, Range]]:
        """Ranges by the ways they were found, those that are taken first."""
        return [self.ranges, *(way for way in self._found.values() if way is not self.ranges)]

    def take_ranges(self, ranges: Mapping[str, Range]) -> None:
        self.ranges = {**self.ranges, **ranges}

    def _nearest_ranges(self) -> dict[str, Range]:
        """Those that all layers together have the least error with, of as many as there is time for."""
        errors: list[tuple[float, dict[str, Range]]] = []
        for ranges in self._found.values():
            if errors and self._late():
                break
            self.ranges = ranges
            found = list(results(self.made(), self.feeds[:_FEW], self._running))
            errors.append((difference(found, self.expected[:_FEW]).error, ranges))
        return min(errors, key=itemgetter(0))[1]

    def _late(self) -> bool:
        """Whether what comes before the choice has taken its part of the time."""
        return time.perf_counter() > self.begun + _BEFORE * self.options.seconds
