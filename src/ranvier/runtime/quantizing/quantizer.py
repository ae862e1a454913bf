"""A quantized model of a model: which layers, by samples; and whether the result is worth having."""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ranvier.config import SessionConfig
from ranvier.errors import InvalidConfig, RanvierError
from ranvier.formats.onnx import read
from ranvier.formats.onnx.retarget import retarget
from ranvier.graph.defaults import can_settle, settle
from ranvier.graph.extract import copied
from ranvier.graph.ir import Graph, Node, Value
from ranvier.graph.verify import verify
from ranvier.passes import default_passes
from ranvier.passes.manager import PassManager
from ranvier.quantize import InputMoments, Observer, observer
from ranvier.quantize.observers import OBSERVERS
from ranvier.records import dataclass
from ranvier.rules import Checked, Choice, Names, Positive, Rule, Whole
from ranvier.runtime.narrowing.search import Search
from ranvier.runtime.quantizing.choice import fewest, judge
from ranvier.runtime.quantizing.equalize import equalize
from ranvier.runtime.quantizing.outdated import replace_outdated
from ranvier.runtime.quantizing.recurrent import find_recurrent, quantize_recurrent, recurrent_weights
from ranvier.runtime.quantizing.report import Difference, LayerReport, QuantizationReport, difference, timed
from ranvier.runtime.quantizing.rest import narrower
from ranvier.runtime.quantizing.rounding import LOOKED, Rounding, SumMoments, mean_of, moments_of
from ranvier.runtime.quantizing.samples import Feed, results, visit
from ranvier.runtime.quantizing.sites import Site, find_sites
from ranvier.runtime.quantizing.static import coded_values, narrow_weights, quantize_static
from ranvier.runtime.quantizing.switches import Switches
from ranvier.runtime.quantizing.tails import tail
from ranvier.runtime.quantizing.weight_only import CALIBRATED, SCHEMES, quantize_weights
from ranvier.runtime.quantizing.worth import without_gain

ALL_SCHEMES = ("int8", *SCHEMES)
# what makes layers plain and keeps a graph that any runtime reads
_PREPARE = ("dead_code", "fold_shapes", "fold_constants", "cancel", "common_subexpressions", "fold_affine")


OPSET = 21  # for models whose own is older than the least; runtimes of 2024 read it
LEAST_OPSET = 19  # has float8, and scales for channels
BEST = "best"
RESTS = ("float32", "bf16")
Range = tuple[float, float]
_FEW = 8  # samples that ways to bring channels to like ranges are chosen by
_ROOM = 0.85  # part of an error that samples may show
_REST = 0.95  # part of that which may be there before layers are chosen
_AGREEMENT, _PLACES = 0.99, 500  # of largest entries, and of how many that says something


class NotWorthIt(RanvierError):
    """The quantized model is slower or further from the original than was asked; ``report`` has the figures."""

    def __init__(self, report: QuantizationReport) -> None:
        super().__init__("; ".join(report.problems))
        self.report = report


@dataclass(frozen=True)
class Quantization(Checked):
    """How a model is to be quantized.

    ``scheme``: "int8" codes weights and activations and needs samples; the others code weights alone.
    ``max_error``: of the results, as a part of their size; layers are left in float32 until it is kept.
    ``cosine`` (int8): between results and the original's, in place of ``max_error``; that the largest entry is the same
    nearly everywhere will do too. ``seconds``: how long layers are judged for either.
    ``rest`` (int8): the precision of sessions that run the result, for what is not coded; "best": bfloat16 where that
    leaves room for codes. ``timed`` (int8): layers whose codes save no time on this machine stay in float32 too.
    ``slower``: how many times as long as the original a run may take.
    """

    scheme: str = "int8"
    ranges: str = "minmax"  # of activations; "best": the way with the least error of results on the samples
    group: int = 32
    signed: bool = False  # activations
    fit: str = "minmax"  # of weights
    equalize: bool = True  # channels of activations, before they share a scale
    max_error: float | None = None
    cosine: float | None = None
    seconds: float = 120.0
    rest: str = "float32"
    timed: bool = False
    keep: tuple[str, ...] = ()  # patterns of names of layers that stay in float32
    slower: float = 1.0
    trials: int = 24

    RULES: ClassVar[Mapping[str, Rule]] = {
        "scheme": Choice(ALL_SCHEMES),
        "ranges": Choice((*OBSERVERS, BEST)),
        "group": Whole(16),
        "fit": Choice(("minmax", "mse")),
        "max_error": Positive(whole=False),
        "cosine": Positive(whole=False),
        "seconds": Positive(whole=False),
        "rest": Choice((*RESTS, BEST)),
        "keep": Names(),
        "slower": Positive(whole=False),
        "trials": Whole(1),
    }


def prepared(model: str | os.PathLike[str] | Graph, config: SessionConfig) -> Graph:
    """The graph with normalizations folded into layers, still of standard operators only; weights that a file lists
    among its inputs are constants."""
    graph = model if isinstance(model, Graph) else read(model, limits=config.limits)
    for value in list(graph.inputs):
        if can_settle(graph, value):
            settle(graph, value)
    names: tuple[str, ...] = _PREPARE
    if graph.opsets.get("", OPSET) < LEAST_OPSET:
        names = ("modernise", *names)
    replace_outdated(graph)
    PassManager([each for each in default_passes() if each.name in names]).run(graph, config)
    if "modernise" in names:
        retarget(graph, OPSET)
    for node in graph:
        node.name = node.name or f"{node.op}:{node.output.name}"
    return graph


class Quantizer:
    """Tries ways to quantize one graph on samples.

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
        self.graph, self.feeds, self.options = graph, list(feeds), options
        self.config = self._running = config or SessionConfig()  # of the original, and of what is made
        self._told = told or (lambda text: None)
        self._step = stepped or (lambda done, of: None)
        self.static = options.scheme == "int8"
        if not self.feeds and (self.static or options.scheme in CALIBRATED):
            raise InvalidConfig(f"scheme {options.scheme!r} needs samples of the inputs")
        every = find_sites(graph, products_only=not self.static)
        recurrent = [node.name for node in find_recurrent(graph)] if self.static else []
        names = [*(site.name for site in every), *recurrent]
        named = [p for p in options.keep if not fnmatch.filter(names, p)]
        if named:
            raise InvalidConfig(f"no layer is called {named[0]!r}")
        self.kept = frozenset(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in options.keep))
        self.sites = [site for site in every if site.name not in self.kept]
        self.recurrent = frozenset(recurrent) - self.kept
        if not self.sites and not self.recurrent:
            raise InvalidConfig(
                "no layer of this model can be quantized: it needs float32 products with constant weights"
            )
        self._joins = True
        self._no_gain: frozenset[str] = frozenset()
        self._ranges: dict[str, Range] = {}
        self._means: dict[str, np.ndarray[Any, Any]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._moments: dict[str, InputMoments] = {}
        self._rounding = Rounding(fit=options.fit)
        self._found: dict[str, dict[str, Range]] = {}  # ranges by the way they were found
        self._looked = self.feeds
        if self.static and len(self.feeds) >= 2 * _FEW:  # what ranges were made for shows too little of their errors
            self._looked, self.feeds = self.feeds[::2], self.feeds[1::2]
        self._expected = list(results(graph, self.feeds, self.config))
        if self.static and options.rest != "float32":
            self._running = self.config.updated(precision="bf16")
        if self.static and options.rest == BEST and self.bound is not None:
            self._told("looking at what is not coded")
            self._look_at_sums()
            allowed, seconds = self._limit * _REST, options.seconds / 2
            self._running = narrower(
                graph, self.feeds, self._expected, self.config, allowed, seconds, self._narrowed, self._shown
            )
        if self.static and options.equalize:
            self._take(self._evened())
        ways = tuple(OBSERVERS) if options.ranges == BEST else (options.ranges,)
        self._observe(ways, self._looked)
        if self.static:
            self._look_at_sums()
        if len(self._found) > 1:
            self._ranges = min(self._found.values(), key=self._error_with)

    def _take(self, graph: Graph) -> None:
        self.graph, self._rounding = graph, Rounding(fit=self.options.fit)
        self.sites = [site for site in find_sites(graph) if site.name not in self.kept]

    def _evened(self) -> Graph:
        """The graph with channels brought to like ranges, in the way that errors of results are least with."""
        original, looked, few = self.graph, self._looked[:_FEW], self.feeds[:_FEW]
        found = [original]
        for with_rows in (False, True):
            self._told("bringing channels to like ranges")
            graph = copied(original)
            if equalize(graph, looked, self.config, with_rows=with_rows):
                found.append(graph)
        if len(found) > 1 and len(found[-1]) == len(found[-2]):
            found.pop()  # no row stayed
        errors = []
        for graph in found if len(found) > 1 else ():
            self._take(graph)
            self._observe(("minmax",), looked)
            errors.append(difference(list(results(self.made(), few, self._running)), self._expected[:_FEW]).error)
        return found[errors.index(min(errors))] if errors else original

    def _observe(self, ways: Sequence[str], feeds: Sequence[Feed]) -> None:
        """Look at the activations that matter once, for all trials."""
        if self.static:
            self._told("looking at activations")
            names = coded_values(self.graph, self.sites)
            watched: dict[str, dict[str, Observer]] = {n: {way: observer(way) for way in ways} for n in names}
            means = {s.data.name: mean_of(s) for s in self.sites}

            def look(name: str, x: np.ndarray[Any, Any]) -> None:
                self._shapes[name] = x.shape
                for each in watched[name].values():
                    each.update(x)
                if name in means:
                    means[name].update(x)

            visit(self.graph, list(watched), feeds, self.config, look)
            self._means = {name: each.mean for name, each in means.items()}
            self._found = {way: {name: each[way].range() for name, each in watched.items()} for way in ways}
            self._ranges = self._found[ways[0]]
        elif self.options.scheme in CALIBRATED:
            self._told("looking at activations")
            self._moments = {s.data.name: InputMoments(s.matrix.shape[1]) for s in self.sites}
            visit(self.graph, list(self._moments), feeds, self.config, lambda n, x: self._moments[n].update(x))

    def _look_at_sums(self) -> None:
        """What sums of layers read, for weights to be rounded by it."""
        moments, means = moments_of(self.sites), {s.data.name: mean_of(s) for s in self.sites}
        readers: dict[str, list[SumMoments]] = {}
        for site in self.sites:
            if site.name in moments:
                readers.setdefault(site.data.name, []).append(moments[site.name])

        def look(name: str, x: np.ndarray[Any, Any]) -> None:
            means[name].update(x)
            for each in readers.get(name, ()):
                each.update(x)

        visit(self.graph, list(means), self._looked[:LOOKED], self.config, look)
        self._rounding = Rounding(moments, self.options.fit)
        self._means = {**{name: each.mean for name, each in means.items()}, **self._means}

    def _narrowed(self, running: SessionConfig) -> Graph:
        """The graph without any codes, for sessions with these options."""
        graph = copied(self.graph)
        self._narrow(find_sites(graph), running)
        return graph

    def _narrow(self, sites: Sequence[Site], running: SessionConfig) -> None:
        """Weights of these layers as numbers of bfloat16, those that are multiplied in it."""
        if running.precision == "bf16":
            stays = (*running.keep_f32, *map(glob.escape, self.kept))
            those = [s for s in sites if not any(fnmatch.fnmatchcase(s.name, pattern) for pattern in stays)]
            narrow_weights(those, self._rounding, self._means)

    def made(self, kept: frozenset[str] = frozenset()) -> Graph:
        """The graph with all layers quantized but these."""
        graph = copied(self.graph)
        left = self.kept | kept
        every = find_sites(graph, products_only=not self.static)
        sites = [s for s in every if s.name not in left]
        if self.static:
            self._narrow([s for s in every if s.name in left], self._running)
            signed, rounding = self.options.signed, self._rounding
            joins, means = self._joins, self._means
            quantize_static(graph, sites, self._ranges, signed=signed, rounding=rounding, means=means, joins=joins)
            quantize_recurrent([node for node in find_recurrent(graph) if node.name not in left])
        else:
            quantize_weights(graph, sites, self.options.scheme, group=self.options.group, moments=self._moments)
        graph.opsets.setdefault("com.microsoft", 1)
        retarget(graph, graph.opsets[""])  # what was added came in its newest version
        PassManager([each for each in default_passes() if each.name == "dead_code"]).run(graph, self.config)
        verify(graph)
        return graph

    def difference(self, kept: frozenset[str]) -> Difference:
        self._told(f"trying with {len(kept)} of {len(self.sites) + len(self.recurrent)} layers in float32")
        return difference(list(results(self.made(kept), self.feeds, self._running)), self._expected)

    def error(self, kept: frozenset[str]) -> float:
        return self.difference(kept).error

    @property
    def bound(self) -> float | None:
        """Of the error; None where none was asked for."""
        if self.options.max_error is not None:
            return self.options.max_error
        return None if self.options.cosine is None else math.sqrt(2 * (1 - self.options.cosine))

    def _near(self, found: Difference) -> bool:
        """Whether results are as near as was asked."""
        if self._shown(found) <= self._limit:
            return True
        by_agreement = self.options.max_error is None and found.places >= _PLACES
        return by_agreement and found.agreement is not None and found.agreement >= _surely(found.places)

    def _shown(self, found: Difference) -> float:
        """The error, or as much of it as the limit has room for where samples differ."""
        return found.error if self.options.max_error is not None else max(found.error, found.most * _ROOM)

    @property
    def _limit(self) -> float:
        """The error that samples may show, with some room: they are not all there is."""
        assert self.bound is not None
        if self.options.max_error is not None:
            return self.bound
        every = [array for arrays in self._expected for array in arrays]
        if all(array.dtype.kind in "iub" for array in every):  # errors of whole numbers are how many are other ones
            places = sum(array.size for array in every)
            if places >= _PLACES:
                return math.sqrt(2 * (1 - _surely(places)))
        return self.bound * _ROOM

    def _chosen(self) -> frozenset[str]:
        """Layers that stay in float32 for results to be as near as was asked."""
        found = self.difference(frozenset())
        if self._near(found):
            return frozenset()
        self._joins = False  # joins of codes round once more; without them layers alone do
        apart = self.difference(frozenset())
        if self._near(apart):
            return frozenset()
        self._joins = found.error <= apart.error
        bound = self._limit
        left, floor = self._floor(bound)
        if not self.sites:
            return left
        until = time.perf_counter() + self.options.seconds
        ways = [self._ranges, *(way for way in self._found.values() if way is not self._ranges)]
        names, expected = [site.name for site in self.sites], self._expected
        options = {"signed": self.options.signed, "rounding": self._rounding}
        self._told("judging layers")
        with Switches(self.graph, names, self._means, self.config, **options) as switches:  # type: ignore[arg-type]
            layers, ranges = judge(
                switches, self.sites, ways, self._shapes, self.feeds, expected, self.options.seconds / 2, self._step
            )
        self._ranges = {**self._ranges, **ranges}

        def measure(kept: frozenset[str]) -> float:
            found = self.difference(kept | left)
            return 0.0 if self._near(found) else math.sqrt(max(self._shown(found) ** 2 - floor**2, 0.0))

        return left | fewest(layers, math.sqrt(max(bound**2 - floor**2, 0.0)), measure, until)

    def _widen(self) -> None:
        """Once layers are chosen every sample is good for ranges, each found in the way that was chosen."""
        if self._looked is self.feeds:
            return
        ways = {
            name: next(way for way, found in self._found.items() if found[name] == bounds)
            for name, bounds in self._ranges.items()
        }
        self._observe(tuple(dict.fromkeys(ways.values())), [*self._looked, *self.feeds])
        self._ranges = {name: self._found[way][name] for name, way in ways.items()}

    def _slower(self, kept: frozenset[str]) -> frozenset[str]:
        """Layers that are no slower without codes."""
        self._told("timing layers")
        layers, until = [site.name for site in self.sites], time.perf_counter() + self.options.seconds / 2
        self._no_gain = without_gain(layers, kept, self.made, self.feeds[0], self._running, until, self._step)
        return self._no_gain

    def _floor(self, bound: float) -> tuple[frozenset[str], float]:
        """The error that is there with every layer that samples decide about in float32; recurrent layers are coded
        where that leaves room for others, and their names are given where not."""
        every = frozenset(site.name for site in self.sites)
        for left in (frozenset[str](), self.recurrent):
            plain = left == self.recurrent and self._running is self.config
            floor = 0.0 if plain else self._shown(self.difference(every | left))
            if floor <= bound * _REST:
                return left, floor
        return self.recurrent, floor

    def _error_with(self, ranges: dict[str, Range]) -> float:
        self._ranges = ranges
        return self.error(frozenset())

    def run(self, *, force: bool = False) -> tuple[Graph, QuantizationReport]:
        """The quantized graph and what became of it; NotWorthIt where it is not what was asked, unless forced."""
        kept: frozenset[str] = frozenset()
        if self.static and self.bound is not None:
            kept = self._chosen()
            if self.options.timed:
                kept |= self._slower(kept)
            self._widen()
        elif self.options.max_error is not None and self.feeds:
            search = Search(self.error, self.options.max_error, self.options.trials)
            kept = search.run([site.name for site in self.sites])
        graph = self.made(kept)
        report = self._report(graph, kept)
        if report.problems and not force:
            raise NotWorthIt(report)
        return graph, report

    def _report(self, graph: Graph, kept: frozenset[str]) -> QuantizationReport:
        self._told("measuring")
        found = difference(list(results(graph, self.feeds, self._running)), self._expected)
        configs = self.config, self._running
        before, after = timed(self.graph, graph, self.feeds[0], configs) if self.feeds else (0.0, 0.0)
        problems = []
        limit, wanted = self.options.max_error, self.options.cosine
        if limit is None and wanted is not None and self.static and found.cosine < wanted and not self._near(found):
            problems.append(f"the cosine of the results is {found.cosine:.6f}, at least {wanted:g} was asked for")
        if limit is not None and found.error > limit:
            problems.append(
                f"the results are off by {found.error:.3g} of their size, at most {limit:.3g} was asked for"
            )
        if len(kept) == len(self.sites) + len(self.recurrent):
            problems.append("no layer can be coded with results as near as was asked")
        if self.feeds and after > before * self.options.slower:
            problems.append(
                f"a run takes {after * 1e3:.3g} ms instead of {before * 1e3:.3g}, "
                f"at most {self.options.slower:g} times as long was asked for"
            )
        return QuantizationReport(
            self.options.scheme,
            tuple(self._layers(graph, kept)),
            len(self.feeds) + (len(self._looked) if self._looked is not self.feeds else 0),
            found,
            self.graph.constant_bytes(),
            graph.constant_bytes(),
            before,
            after,
            tuple(problems),
            self._running.precision,
            self._running.keep_f32,
        )

    def _layers(self, graph: Graph, kept: frozenset[str]) -> list[LayerReport]:
        errors = self._layer_errors(graph)
        found = []
        sites = find_sites(self.graph, products_only=not self.static)
        layers: list[tuple[str, Node, tuple[Value, ...]]] = [(s.name, s.node, (s.weight,)) for s in sites]
        if self.static:
            layers += [(node.name, node, recurrent_weights(node)) for node in find_recurrent(self.graph)]
        for name, node, weights in layers:
            size = sum(value.const.nbytes for value in weights if value.const is not None)
            hurt = "it saved no time" if name in self._no_gain else "it hurt the results" if name in kept else ""
            reason = "asked for" if name in self.kept else hurt
            scheme = "float32" if reason else self.options.scheme
            after = size if reason else sum(_coded_bytes(value, graph) for value in weights)
            found.append(LayerReport(name, node.op, scheme, size, after, errors.get(name), reason))
        return found

    def _layer_errors(self, graph: Graph) -> dict[str, float]:
        """How far the result of each layer, after its activation, is from the original's."""
        if not self.feeds:
            return {}
        names = {s.name: tail(s.node).value.name for s in self.sites}
        there = {value.name for value in graph.values()}
        names = {site: value for site, value in names.items() if value in there}
        one = self.feeds[:1]
        original: dict[str, Any] = {}
        changed: dict[str, Any] = {}
        visit(self.graph, list(names.values()), one, self.config, lambda n, x: original.update({n: x}))
        visit(graph, list(names.values()), one, self.config, lambda n, x: changed.update({n: x}))
        return {
            site: difference([[changed[value]]], [[original[value]]]).error
            for site, value in names.items()
            if original[value].shape == changed[value].shape
        }


def _surely(places: int) -> float:
    """How often largest entries must be the same in this many places for two deviations of chance to be room enough."""
    return _AGREEMENT + 2 * math.sqrt(_AGREEMENT * (1 - _AGREEMENT) / places)


def _coded_bytes(weight: Value, made: Graph) -> int:
    """Bytes of what stands for the weights of a layer in the quantized graph."""
    names = (f"{weight.name}.{part}" for part in ("codes", "scale", "zero", "group", "absmax"))
    found = [made.constants[name].const for name in names if name in made.constants]
    return sum(tensor.nbytes for tensor in found if tensor is not None)
