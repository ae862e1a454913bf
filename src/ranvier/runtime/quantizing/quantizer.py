"""A quantized model of a model: which form, by samples; and whether the result is worth having."""

from __future__ import annotations

import math
from operator import itemgetter

from ranvier.errors import InvalidConfig, RanvierError
from ranvier.graph.ir import Graph, Node, Value
from ranvier.ops.contrib.quantized_moe import NAME as QMOE
from ranvier.ops.contrib.quantized_moe import PLACES
from ranvier.runtime.narrowing.search import Search
from ranvier.runtime.quantizing.choice import INT16
from ranvier.runtime.quantizing.choosing import Choosing
from ranvier.runtime.quantizing.experts import find_experts
from ranvier.runtime.quantizing.forms import Form, Trials
from ranvier.runtime.quantizing.maker import GIVEN_BYTES, Maker, Range
from ranvier.runtime.quantizing.recurrent import coded_name, recurrent_weights
from ranvier.runtime.quantizing.report import (
    Difference,
    LayerReport,
    Off,
    QuantizationReport,
    chord,
    difference,
    timed,
    told_below,
)
from ranvier.runtime.quantizing.samples import Feed, results, visit_both
from ranvier.runtime.quantizing.tails import tail

# Parts of the error that are tried where samples that were held back show too much: these while a faster form than the
# one that holds may be among them, …
_STRICT = (1.0, 0.85, 0.7)
_STRICTER = (0.5, 0.35)  # … and these where none holds


_SHOWN = 4  # samples that errors of layers are shown of, at most: each is run by both models for every batch of layers
_NOISE = 0.02  # part of a time that two measurements of the same model differ by


class NotWorthIt(RanvierError):
    """The quantized model is slower or further from the original than was asked; ``report`` has the figures."""

    def __init__(self, report: QuantizationReport) -> None:
        super().__init__("; ".join(report.problems))
        self.report = report


class Quantizer(Maker):
    """Tries ways to quantize one graph on samples, and takes the fastest that keeps what was asked."""

    _codable: frozenset[str] = frozenset()  # layers that could have codes as far as results are concerned
    _words: frozenset[str] = frozenset()  # layers among those without codes of 8 bits that read codes of 16
    _holds = False  # what was chosen is as near as was asked on all samples
    _chosen_by: dict[str, Range] | None = None  # ranges that a run begins with: it widens them, and may be asked again

    def error_without(self, kept: frozenset[str]) -> float:
        """Of results, as it was asked for, with codes in all layers but these."""
        every = len(self.sites) + len(self.recurrent) + len(self.experts)
        self.told(f"trying with {len(kept)} of {every} layers in float32")
        found = self._compared(self.made(kept))
        return found.error if self.options.max_error is not None else found.turn

    def run(self, *, force: bool = False) -> tuple[Graph, QuantizationReport]:
        """The quantized graph and what became of it; NotWorthIt where it is not what was asked, unless forced."""
        self.ranges = self._chosen_by = self._chosen_by or self.ranges
        graph, kept, found = self._settled() if self.static and self.asked.anything else self._at_once()
        report = self._report(graph, kept, found)
        if report.problems and not force:
            raise NotWorthIt(report)
        return graph, report

    def _at_once(self) -> tuple[Graph, frozenset[str], Difference]:
        """All layers coded, or of weights alone as many as results allow."""
        kept = frozenset[str]()
        if (limit := self._limit()) is not None:
            layers = [*(site.name for site in self.sites), *sorted(self.recurrent), *self.experts]
            kept = Search(self.error_without, limit, self.options.trials).run(layers)
        self.ranges = self.widened()
        graph = self.made(kept)
        return graph, kept, self._compared(graph)

    def _limit(self) -> float | None:
        """Of the error of results, where layers are left in float32 until it is kept."""
        limit, wanted = self.options.max_error, self.options.cosine
        if (limit is not None or wanted is not None) and not self.feeds:
            raise InvalidConfig("how near results stay cannot be told without samples of the inputs")
        bound = chord(wanted) if limit is None and wanted is not None else limit
        return None if bound == math.inf else bound

    def _settled(self) -> tuple[Graph, frozenset[str], Difference]:
        """The fastest form that holds on samples which had no part in the choice; where none does, the nearest.

        Where only a slower one holds, those that were faster are looked for again with less room for errors."""
        nearest: tuple[float, Form] | None = None
        settled: Form | None = None
        with Trials(self.form, self.config, self.groups, self.asked.near) as trials:
            choosing = Choosing(self, trials, self.step)
            chosen_by, widened = self.ranges, dict[str, Range]()
            for strict in (*_STRICT, *_STRICTER):
                if settled is not None and strict in _STRICTER:
                    break
                self.ranges = chosen_by
                forms = choosing.forms(strict)
                self._codable = choosing.codable
                self.ranges = widened = widened or self.widened()
                holding: Form | None = None
                for form in forms:
                    self.told("looking at samples that were held back")
                    _, found = self._taken(form)
                    if self.asked.holds(found, trials.difference(form)):
                        holding = form
                        break
                    nearest = min(nearest or (math.inf, form), (self.asked.shown(found), form), key=itemgetter(0))
                settled = choosing.faster(settled, holding)
                if not forms or holding == forms[0] or (settled is not None and choosing.late):
                    break
        self._holds = settled is not None
        form = settled or (choosing.exact if nearest is None else nearest[1])
        graph, found = self._taken(form)
        self._words = form.words
        return graph, form.floats, found

    def _taken(self, form: Form) -> tuple[Graph, Difference]:
        """A form as it will be, and what is true of it on the samples it was chosen by and on those held back."""
        self._running = form.running(self.config)
        graph = self.form(form)
        return graph, self._compared(graph)

    def _compared(self, graph: Graph) -> Difference:
        every = [*self.feeds, *self.held]
        rows = list(results(graph, every, self._running))
        count = len(self.feeds)
        found = difference(rows[:count], self.expected)
        if self.held:
            found = found.worse(difference(rows[count:], self.expected_of_held))
        return found

    def _report(self, graph: Graph, kept: frozenset[str], found: Difference) -> QuantizationReport:
        if self.feeds:
            self.told("measuring")
        configs = self.config, self._running
        before, after = timed(self.original, graph, self.feeds[0], configs) if self.feeds else (0.0, 0.0)
        problems = []
        limit, wanted = self.options.max_error, self.options.cosine
        if limit is None and wanted is not None and not found.cosine >= wanted and not self._holds:
            told = told_below(found.cosine, wanted)
            problems.append(f"the cosine of the results is {told}, at least {wanted:g} was asked for")
        if not math.isfinite(found.error) and limit is None:
            problems.append("results are not numbers where the original's are, or the other way round")
        if limit is not None and not found.error <= limit:
            problems.append(
                f"the results are off by {found.error:.3g} of their size, at most {limit:.3g} was asked for"
            )
        plain = not self._words and self._running is self.config
        if len(kept) == len(self.sites) + len(self.recurrent) + len(self.experts) and plain:
            idle, far = "codes save no time in any layer", "no layer can be coded with results as near as was asked"
            problems.append(idle if kept <= self._codable else far)
        if self.feeds and after > before * self.options.slower * (1 + _NOISE):
            problems.append(
                f"a run takes {after * 1e3:.3g} ms instead of {before * 1e3:.3g}, "
                f"at most {self.options.slower:g} times as long was asked for"
            )
        return QuantizationReport(
            self.options.scheme,
            tuple(self._layers(graph, kept)),
            self.samples,
            found,
            self.original.metadata.get(GIVEN_BYTES, self.original.constant_bytes()),
            graph.constant_bytes(),
            before,
            after,
            tuple(problems),
            self._running.precision,
            self._running.keep_f32,
            len(self.held),
            len(self._shown),
        )

    def _layers(self, graph: Graph, kept: frozenset[str]) -> list[LayerReport]:
        errors = self._layer_errors(graph)
        found = []
        sites = self.sites_of(self.graph)
        layers: list[tuple[str, Node, tuple[Value, ...]]] = [(s.name, s.node, (s.weight,)) for s in sites]
        layers += [(node.name, node, recurrent_weights(node)) for node in self.recurrent_of(self.graph)]
        experts = {layer.name: layer for layer in self._experts.layers}
        layers += [(layer.name, layer.node, layer.weights) for layer in experts.values()]
        nearest = self._nearest_codes()
        made = {node.name: node for node in graph.all_nodes()}
        for name, node, weights in layers:
            size = sum(value.const.nbytes for value in weights if value.const is not None)
            why = "it saved no time" if name in self._codable else "it hurt the results"
            hurt = why if name in kept else self.unfit.get(name, "")
            reason = "asked for" if name in self.kept else hurt
            scheme, after = "float32", size
            if name in self._words:
                scheme, reason = INT16, f"in 8 bits {why}"
                after = _coded_bytes(made.get(name, node))
            elif not reason:
                scheme = nearest.get(name, self.options.scheme)
                if name in experts:
                    scheme, reason = self._experts.told(experts[name])
                after = _coded_bytes(made.get(coded_name(name), made.get(name, node)))
            found.append(LayerReport(name, node.op, scheme, size, after, errors.get(name), reason))
        return found

    @property
    def _shown(self) -> list[Feed]:
        """Samples that errors of layers are of: those that layers were made by show too little of them."""
        return (self.held or self.feeds)[:_SHOWN]

    def _layer_errors(self, graph: Graph) -> dict[str, float | None]:
        """How far the result of each layer, after its activation, is from the original's."""
        if not self.feeds:
            return {}
        names = {s.name: tail(s.node).value.name for s in self.sites_of(self.graph)}
        recurrent = self.recurrent_of(self.graph)
        names |= {node.name: next(v.name for v in node.outputs if v.uses or v.is_graph_output) for node in recurrent}
        names |= {layer.name: tail(layer.node).value.name for layer in find_experts(self.graph)}
        there = {value.name for each in graph.all_graphs() for value in each.values()}
        names = {site: value for site, value in names.items() if value in there}
        off = {value: Off() for value in names.values()}
        both, configs = (self.graph, graph), (self.config, self._running)
        visit_both(both, list(off), self._shown, configs, lambda name, was, now: off[name].add(now, was))
        return {site: off[value].error for site, value in names.items()}


def _coded_bytes(layer: Node) -> int:
    """Bytes of what stands for the weights of a layer in the quantized graph."""
    if layer.op == "DynamicQuantizeLSTM":
        parts = (*layer.inputs[1:3], *layer.inputs[8:])
    elif layer.op == QMOE:
        places = (k for weights, scales, _, zeros, _ in PLACES.values() for k in (weights, scales, zeros))
        parts = tuple(layer.input(k) for k in places)
    elif layer.domain:  # codes, scales and zeros of a product
        parts = layer.inputs[1:4]
    else:  # behind a DequantizeLinear
        weight = layer.inputs[1]
        parts = weight.producer.inputs if weight is not None and weight.producer is not None else (weight,)
    return sum(value.const.nbytes for value in parts if value is not None and value.const is not None)
