"""Which of the forms a model may have is the fastest that keeps results as near as was asked.

There are three kinds: codes with the rest in float32, or with 16-bit activations; bfloat16 without codes; and codes
with the rest in bfloat16. What each way to compute each node does to results is found out with switches, then forms are
selected by sums, made, and corrected; what they take is measured on whole models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ranvier.errors import RanvierError
from ranvier.graph.extract import copied
from ranvier.graph.ir import Node
from ranvier.runtime.quantizing.batches import apart
from ranvier.runtime.quantizing.choice import BF16, FLOAT32, INT8, INT16, MOST_RUNS, Chosen, Way, Ways, fitting, judge
from ranvier.runtime.quantizing.costs import elements, estimated, measured, seconds_wider, work_of
from ranvier.runtime.quantizing.forms import Form, Names, Telling, Trials
from ranvier.runtime.quantizing.maker import Maker, Range
from ranvier.runtime.quantizing.options import BEST
from ranvier.runtime.quantizing.rounding import weights_of
from ranvier.runtime.quantizing.slopes import Slopes, judge_by_slopes
from ranvier.runtime.quantizing.switches import NarrowSwitches, Switches
from ranvier.runtime.quantizing.tails import tail
from ranvier.runtime.quantizing.words import are_fast
from ranvier.runtime.session import Session

Judged = tuple[dict[str, float], dict[str, Range]]  # squared errors of layers, and ranges by what they read
_LAYERS = ("Conv", "MatMul", "Gemm")
_KINDS = (FLOAT32, BF16, INT16, INT8)
_AMONG = "int8, the rest bf16"  # what coded layers take where they read and write bfloat16
_ROOM = 0.95  # part of an error that coded recurrent layers may take, which are chosen first
_BATCHES = 12  # of layers that are tried the other way round
_EVEN = 1.02  # times the time of a form, up to which another is no slower
_WORTH_IT = 1.05  # times as fast as in float32, from which on 16-bit activations are good for something
_LET_GO = 16  # nodes in float32 that are tried in bfloat16 after all
_MORE, _LITTLE = 1.5, 1e-3  # times what a node was seen to do, and part of the limit, from which on it counts as more
_SAMPLES = 8  # that nodes in bfloat16 are judged by, at most
_QUESTIONS = 80  # about them, at most, for as many samples as there is time for
_PROFILED, _COMPARED = 0.2, 1.0  # seconds of runs that are looked into, and of turns of forms
# parts of the time, from the beginning: for nodes in bfloat16, layers with codes, and models made of what was found
_NARROW, _CODES, _MADE = 0.3, 0.55, (0.65, 0.78, 0.9)
_SWITCHED = 4.0  # times as long as in float32 that a run takes in which codes of layers can be switched on
_SHORT = 0.1  # part of the time that runs with every layer's codes may take, so that they are worth it
_STRICTER = 0.08  # ... and for each kind of these with less room for errors, at least


class Choosing:
    """Chooses among forms of a maker's model. ``codable``: layers that some form had codes for."""

    def __init__(self, maker: Maker, trials: Trials, step: Callable[[int, int], None]) -> None:
        self._maker, self._trials, self._step = maker, trials, step
        self._asked, options = maker.asked, maker.options
        self._start = time.perf_counter()
        self._seconds = max(options.seconds - (self._start - maker.begun), options.seconds / 2)
        self._layers: Names = frozenset(site.name for site in maker.sites)
        self._every = self._layers | maker.recurrent
        self._wide, self._narrow = options.rest != BF16, options.rest in (BF16, BEST)
        self.codable: Names = frozenset()
        self._units = {site.name: frozenset({site.name}) for site in maker.sites}
        self._units_matter = False  # what bfloat16 does to single nodes is known
        # whether sessions in bfloat16 only compute less exactly what is float64 else: layers are what they are
        self._light = False
        self._products = self._stored = frozenset[str]()  # nodes that multiply bfloat16, or store it
        self._sizes = elements(maker.graph, maker.feeds[0])
        self._work = {site.name: work_of(site, maker.shapes[site.data.name]) for site in maker.sites}
        self._times: dict[str, dict[str, float]] = {kind: estimated(self._work, kind) for kind in _KINDS}
        self._errors: dict[str, dict[str, float]] = {kind: {} for kind in _KINDS}
        self._left: Names = frozenset()  # recurrent layers that have no codes
        self._floor = 0.0  # the error of those that do
        self._all_near = False  # with codes of all layers
        self._plain = Form(self._every, frozenset())
        self._look_at_narrow()
        # what multiplies numbers of 16 bits has no need of codes with as many
        asked = options.rest == INT16 or (not self._products and are_fast(maker.config))
        self._words: Names = maker.can_be_words if asked else frozenset()
        self._look_at_words()
        self._look_at_codes()

    @property
    def exact(self) -> Form:
        """What is left where no form is near enough."""
        return Form(self._every, None) if self._wide else self._plain

    @property
    def late(self) -> bool:
        """Whether what was given to find a form is over."""
        return time.perf_counter() > self._until(1.0)

    def _until(self, part: float) -> float:
        return self._start + part * self._seconds

    # -- what is known of nodes ------------------------------------------------------------------------------------

    def _look_at_narrow(self) -> None:
        """What bfloat16 alone does, and if that is too much, which nodes do it."""
        maker, trials = self._maker, self._trials
        if maker.options.timed:
            with Session(copied(maker.graph), maker.config) as session:
                self._profile(FLOAT32, session)
        if not self._narrow:
            return
        maker.told("looking at bfloat16")
        session = trials.session(self._plain)
        session.run(maker.feeds[0])
        found = session.report.precisions
        self._products = frozenset(name for name, each in found.items() if each.computes == "bf16")
        self._stored = frozenset(name for name, each in found.items() if each.stores == "bf16")
        # a processor that does not multiply it may compute something in float32 that is float64 otherwise, and says so
        coarse = bool(session.report.refused and found)
        self._light = coarse and not self._products | self._stored
        if not (self._products | self._stored or coarse) and self._wide:
            self._narrow = False
            trials.drop(self._plain)
            return
        if maker.options.timed:
            self._profile(BF16, session)
        maker.look_at_narrow(session)
        if maker.stays & self._layers:  # their weights were rounded for nothing
            trials.forget(lambda form: form == self._plain)
        shown = self._asked.shown(trials.difference(self._plain))
        if trials.near(self._plain) or not self._wide:
            self._errors[BF16] = self._shared(shown)
            return
        self._judge_narrow()

    def _shared(self, error: float) -> dict[str, float]:
        """Squared errors of layers whose sum is known, and nothing else of them."""
        total = max(sum(self._work.values()), 1e-30)
        return {name: error**2 * work / total for name, work in self._work.items()}

    def _judge_narrow(self) -> None:
        """Squared errors of nodes in bfloat16. What switches do not account for belongs to nodes that have none."""
        maker, asked, products, stored = self._maker, self._asked, self._products, self._stored
        shown = asked.shown(self._trials.difference(self._plain))
        with self._narrow_switches() as switches:
            feeds, expected, count = maker.feeds, maker.expected, 1

            def error(narrow: Names) -> float:
                return asked.judged(switches.difference(feeds[:count], expected[:count], narrow))

            error(frozenset())  # compiles it
            start = time.perf_counter()
            error(frozenset())
            once = max(time.perf_counter() - start, 1e-9)
            left = self._until(_NARROW) - time.perf_counter()
            questions = min(len(switches.names), _QUESTIONS)
            count = max(1, min(_SAMPLES, len(feeds), int(left / (once * questions))))
            maker.told("judging nodes in bfloat16")
            found = apart(switches.names, error, asked.limit, self._until(_NARROW), self._step)
        nodes = {node.name: node for node in maker.graph.all_nodes()}
        self._units |= {name: _kept_for(nodes[name], stored) for name in switches.names}
        strange = (products | stored) - self._units_of(frozenset(self._units))
        if strange:
            self._units[_STRANGE] = strange
            found[_STRANGE] = max(0.0, shown**2 - sum(found.values()))
        times = (shown**2 / max(sum(found.values()), 1e-30)) if found else 1.0  # they are not quite independent
        self._errors[BF16] = {name: error * times for name, error in found.items()}
        self._units_matter = True

    def _look_at_words(self) -> None:
        """What 16-bit activations of all layers do, and take."""
        if not self._words:
            return
        self._maker.told("looking at 16-bit activations")
        form = Form(self._every, words=self._words)
        session = self._trials.session(form)
        if self._maker.options.timed:
            self._profile(INT16, session)
            self._words = self._quicker_words()
        if self._words:
            self._errors[INT16] = self._shared(self._asked.shown(self._trials.difference(form)))
        self._trials.drop(form)

    def _quicker_words(self) -> Names:
        """Those layers, if the model is faster with codes of 16 bits where kernels tell so. They may break up chains
        that one kernel would compute, which no time of a kernel tells."""
        form = Form(self._every, words=frozenset(name for name in self._words if self._quicker(name)))
        if not form.words:
            return frozenset()
        now, plain = self._trials.compared(form, self.exact)
        self._trials.drop(form)
        return self._words if now * _WORTH_IT < plain else frozenset()

    def _look_at_codes(self) -> None:
        """What codes of all layers do, and if that is too much, what each layer's do."""
        maker, trials, asked = self._maker, self._trials, self._asked
        rest = None if self._wide else frozenset[str]()
        joined = Form(frozenset(), rest)
        maker.told("trying with all layers coded")
        self._coded = joined
        session = trials.session(joined)
        if maker.options.timed:
            self._profile(INT8, session)
            if self._narrow and self._wide:
                among = Form(frozenset(), frozenset())
                self._profile(_AMONG, trials.session(among))
                trials.drop(among)
        found = trials.difference(joined)
        if trials.near(joined):
            self._all_near = True
            self._errors[INT8] = self._shared(asked.shown(found))
            return
        separate = Form(frozenset(), rest, joins=False)  # joins round once more; without them layers alone do
        if trials.near(separate) or trials.difference(separate).error < found.error:
            self._coded = separate
        self._look_at_recurrent(rest)
        if trials.near(separate) or not self._layers:
            self._all_near = trials.near(separate)
            self._errors[INT8] = self._shared(asked.shown(trials.difference(separate)))
            return
        maker.told("judging layers")
        seconds = max(self._until(_CODES) - time.perf_counter(), 0.1 * self._seconds)
        self._errors[INT8], ranges = self._by_slopes(seconds) or self._by_switches(seconds)
        maker.take_ranges(ranges)
        trials.forget(lambda form: not form.floats >= self._every)

    def _by_slopes(self, seconds: float) -> Judged | None:
        """Squared errors of layers with codes, by gradients; None where asking them one by one takes no longer, or
        there are no gradients."""
        maker = self._maker
        ways, samples = maker.ways_to_find_ranges(), min(MOST_RUNS, len(maker.feeds))
        runs = len(maker.sites) * len(ways) * samples
        if runs * _SWITCHED * sum(self._times[FLOAT32].values()) < _SHORT * self._seconds:
            return None
        shown = self._asked.shown(self._trials.difference(self._coded))
        names, signed = [site.name for site in maker.sites], maker.options.signed
        how: dict[str, Any] = {"signed": signed, "rounding": maker.rounding}
        try:
            with Slopes(maker.graph, names, maker.means, maker.config, maker.feeds, maker.expected, **how) as slopes:
                errors, ranges = judge_by_slopes(slopes, maker.sites, ways, len(maker.feeds), seconds, self._step)
        except RanvierError:  # whatever it is, there is another way
            return None
        total = sum(errors.values())
        if total <= 0:
            return None
        times = max(shown**2 - self._floor**2, 0.0) / total
        return {name: error * times for name, error in errors.items()}, ranges

    def _by_switches(self, seconds: float) -> Judged:
        """Squared errors of layers with codes, one by one."""
        maker, asked = self._maker, self._asked
        with self._switches() as switches:
            return judge(
                *(switches, maker.sites, maker.ways_to_find_ranges(), maker.feeds, maker.expected),
                *(asked.judged, asked.limit, seconds, self._step),
            )

    def _switches(self) -> Switches:
        maker = self._maker
        names, signed = [site.name for site in maker.sites], maker.options.signed
        return Switches(maker.graph, names, maker.means, maker.config, signed=signed, rounding=maker.rounding)

    def _narrow_switches(self) -> NarrowSwitches:
        maker = self._maker
        return NarrowSwitches(maker.graph, self._products, self._stored, maker.means, maker.config, maker.rounding)

    def _judge_again(self, chosen: Chosen, telling: Telling, until: float) -> bool:
        """Whether nodes do more than was seen of them to the samples that a form does most to. What they do there is a
        part of what they do to all samples, however little the others show."""
        self._maker.told("judging layers again")
        limit, changed = self._asked.limit, False
        for kind, judged in ((INT8, self._codes_do), (BF16, self._narrow_does)):
            names = [name for name, way in chosen.items() if way.kind == kind]
            if names and time.perf_counter() < until:
                errors = self._errors[kind]
                for name, error in judged(names, telling, until).items():
                    if error * telling.part > max(_MORE * errors.get(name, 0.0), _LITTLE * limit**2):
                        errors[name] = error * telling.part
                        changed = True
        return changed

    def _codes_do(self, names: Sequence[str], telling: Telling, until: float) -> dict[str, float]:
        """Squared errors of layers with codes."""
        ranges = {site.name: self._maker.ranges[site.data.name] for site in self._maker.sites}
        with self._switches() as switches:

            def error(those: Names) -> float:
                coded = {name: ranges[name] for name in those}
                return self._asked.judged(switches.difference(telling.feeds, telling.expected, coded))

            return apart(names, error, self._asked.limit / math.sqrt(telling.part), until, self._step)

    def _narrow_does(self, names: Sequence[str], telling: Telling, until: float) -> dict[str, float]:
        """Squared errors of nodes in bfloat16, those that have switches."""
        with self._narrow_switches() as switches:

            def error(those: Names) -> float:
                return self._asked.judged(switches.difference(telling.feeds, telling.expected, those))

            known = [name for name in names if name in switches.names]
            return apart(known, error, self._asked.limit / math.sqrt(telling.part), until, self._step)

    def _look_at_recurrent(self, rest: Names | None) -> None:
        """Recurrent layers are coded where that leaves room for others."""
        maker = self._maker
        if not maker.recurrent:
            return
        coded = Form(self._layers, rest)
        floor = self._asked.shown(self._trials.difference(coded))
        if floor <= self._asked.limit * _ROOM:
            self._floor = floor
        else:
            self._left = maker.recurrent

    def _profile(self, kind: str, session: Session) -> None:
        """What layers take in a session; where none of its kernels tells, as much for their work, or as much less than
        in float32, as others."""
        codes = {f"{tail(site.node).value.name}.quantize": site.name for site in self._maker.sites}
        found = measured(session, self._maker.feeds[0], self._work, codes, _PROFILED)
        known = self._work if kind == FLOAT32 else self._times[FLOAT32]
        part = sum(found.values()) / max(sum(known[name] for name in found), 1e-30)
        if found:
            self._times[kind] = {name: found.get(name, known[name] * part) for name in self._work}

    # -- forms -----------------------------------------------------------------------------------------------------

    def forms(self, strict: float = 1.0) -> list[Form]:
        """Forms that are near enough on the samples of the choice, the fastest first; ``strict``: part of the error
        that they may show."""
        maker, trials = self._maker, self._trials
        exact = self._with_codes(None, strict) if self._wide else None
        narrow = self._without_codes(strict) if self._narrow else None
        kept = frozenset[str]() if narrow is None or narrow.wide is None else narrow.wide
        both = self._lighter(exact, kept, strict) if self._light else None
        if both is None and self._narrow:
            both = self._with_codes(kept, strict)
        found = list(dict.fromkeys(form for form in (both, exact, narrow) if form is not None))
        coded = frozenset[str]().union(*(self._every - form.floats for form in found))
        self.codable |= coded
        if not found:
            return []
        if not maker.options.timed:
            return sorted(found, key=self._estimate)
        maker.told("comparing models")
        ranked = trials.ranked(found, _COMPARED)
        most_coded = both or exact or ranked[0].form
        batches = self._batches(self._every - most_coded.floats)
        maker.told("timing layers")
        plain = narrow.wide if narrow is not None else None

        def other(form: Form, batch: Names) -> Form | None:
            return self._flipped(form, batch, plain)

        def allowed(form: Form) -> bool:
            return self._fits(form, strict)

        def improved(form: Form) -> Form:
            found = trials.improved(form, batches, other, allowed, self._until(1.0), self._step)
            keeps_layers = found.wide is None or self._light
            those = self._batches(self._words & found.floats) if keeps_layers else []
            found = trials.improved(found, those, _reworded, allowed, self._until(1.0), self._step)
            return self._with_sharers(found, other, allowed)

        best = trials.all_improved(ranked, improved, _COMPARED)
        return list(dict.fromkeys([*best, *(each.form for each in ranked)]))

    def _lighter(self, exact: Form | None, kept: Names, strict: float) -> Form | None:
        """The form with what else is not a layer computed less exactly, but for these nodes."""
        if exact is None:
            return None
        form = Form(exact.floats, kept, exact.joins, exact.words)
        return form if self._fits(form, strict) else None

    def _batches(self, layers: Names) -> list[Names]:
        """Of neighbouring layers."""
        order = [site.name for site in self._maker.sites if site.name in layers]
        size = max(1, -(-len(order) // _BATCHES))
        return [frozenset(order[k : k + size]) for k in range(0, len(order), size)]

    def _with_sharers(
        self, form: Form, other: Callable[[Form, Names], Form | None], allowed: Callable[[Form], bool]
    ) -> Form:
        """The form with codes for layers that share weights with coded ones too, if it is no slower: a model that has
        codes of weights need not have them in float32 besides."""
        sites = self._maker.sites
        coded = {weights_of(site) for site in sites if site.name not in form.floats}
        sharers = frozenset(site.name for site in sites if site.name in form.floats and weights_of(site) in coded)
        tried = other(form, sharers) if sharers else None
        if tried is None or not allowed(tried):
            return form
        now, then = self._trials.compared(form, tried)
        return tried if then <= now * _EVEN else form

    def faster(self, a: Form | None, b: Form | None) -> Form | None:
        """The faster of two forms, if there are two."""
        if a is None or b is None or a == b:
            return a or b
        if not self._maker.options.timed:
            return min(a, b, key=self._estimate)
        return self._trials.ranked([a, b], _COMPARED)[0].form

    def _with_codes(self, wide: Names | None, strict: float) -> Form | None:
        """As many codes as save time, the rest in float32, or with codes of 16 bits, or in bfloat16 but for these
        nodes."""
        if self._all_near:
            coded = self._units_of(self._layers)
            form = Form(self._left, None if wide is None else wide - coded, self._coded.joins)
            if self._fits(form, strict):
                return form
        if wide is None:
            return self._fitting((FLOAT32, INT16, INT8) if self._words else (FLOAT32, INT8), strict)
        return self._fitting((FLOAT32, BF16, INT8) if self._units_matter else (BF16, INT8), strict)

    def _units_of(self, layers: Names) -> Names:
        return frozenset[str]().union(*(self._units[name] for name in layers))

    def _without_codes(self, strict: float) -> Form | None:
        if self._fits(self._plain, strict):
            return self._plain
        if self._wide and not self._units_matter:  # it was near enough so far
            self._judge_narrow()
        return self._fitting((FLOAT32, BF16), strict) if self._wide else None

    def _fits(self, form: Form, strict: float) -> bool:
        if strict == 1.0:
            return self._trials.near(form)
        return self._asked.shown(self._trials.difference(form)) <= strict * self._asked.limit

    def _fitting(self, kinds: Sequence[str], strict: float) -> Form | None:
        """The form of these kinds that is estimated to be fastest, of those whose error is low enough as measured."""
        asked, floor = self._asked, self._floor if INT8 in kinds else 0.0
        bound = math.sqrt(max((strict * asked.limit) ** 2 - floor**2, 0.0))

        def measure(chosen: Chosen) -> float:
            form = self._form(kinds, chosen)
            coded = len(self._every - form.floats)
            self._maker.told(f"trying with {coded} of {len(self._every)} layers coded" + _wide_text(form))
            shown = asked.shown(self._trials.difference(form))
            error = math.sqrt(max(shown**2 - floor**2, 0.0))
            return min(error, bound) if self._fits(form, strict) else max(error, bound * (1 + 1e-6))

        until = self._time_for(kinds, strict)

        def again(chosen: Chosen) -> Ways | None:
            telling = self._trials.telling(self._form(kinds, chosen))
            return self._ways(kinds) if telling is not None and self._judge_again(chosen, telling, until) else None

        chosen = fitting(self._ways(kinds), bound, measure, until, again)
        if chosen is None:
            return None
        form = self._form(kinds, chosen)
        if form.wide is None:
            return None if form.floats >= self._every and not form.words else form
        kept = [name for name, way in chosen.items() if way.kind == FLOAT32]
        return self._let_go(form, kept, strict, self._time_for(kinds, strict))

    def _time_for(self, kinds: Sequence[str], strict: float) -> float:
        """When to stop looking for a form of these kinds; late as it may be, some time is left where samples that were
        held back said that what was found will not do."""
        until = self._until(_MADE[len(kinds) - 2 + (BF16 in kinds)])
        return until if strict == 1.0 else max(until, time.perf_counter() + _STRICTER * self._seconds)

    def _let_go(self, form: Form, kept: Sequence[str], strict: float, until: float) -> Form:
        """The form with fewer of the nodes that are ``kept`` in float32, those that cost most first: what each does to
        results was judged on few samples."""
        costs = {name: ways[0].seconds - ways[-1].seconds for name, ways in self._ways((FLOAT32, BF16)).items()}
        left = set(kept)
        for name in sorted(kept, key=lambda name: -costs[name])[:_LET_GO]:
            wide = self._units_of(frozenset(left - {name}))
            tried = Form(form.floats, wide, form.joins)
            if costs[name] <= 0 or time.perf_counter() > until:
                break
            if wide != form.wide and self._fits(tried, strict):
                form = tried
                left.remove(name)
        return form

    def _form(self, kinds: Sequence[str], chosen: Chosen) -> Form:
        floats = frozenset(name for name in self._layers if chosen[name].kind != INT8)
        words = frozenset(name for name in self._layers if chosen[name].kind == INT16)
        left = self._left if INT8 in kinds else self._maker.recurrent
        wide: Names | None = None
        if BF16 in kinds:
            exact = (self._units[name] for name, way in chosen.items() if way.kind == FLOAT32)
            wide = frozenset[str]().union(*exact)
        return Form(floats | left, wide, self._coded.joins, words)

    def _ways(self, kinds: Sequence[str]) -> Ways:
        """Of layers all these kinds, of other nodes those without codes."""
        found: dict[str, list[Way]] = {}
        mixed = BF16 in kinds and FLOAT32 in kinds
        coded = self._time_of_codes(BF16 in kinds)
        wider = self._wider() if mixed else {}
        for name in self._units:
            narrow = Way(BF16, self._errors[BF16].get(name, 0.0), self._times[BF16].get(name, 0.0))
            if name in self._layers:
                # in float32 among nodes in bfloat16 it has more to write, however fast it is by itself
                least = narrow.seconds + wider.get(name, 0.0) if mixed else 0.0
                ways = {
                    FLOAT32: Way(FLOAT32, 0.0, max(self._times[FLOAT32][name], least)),
                    BF16: narrow,
                    INT8: Way(INT8, self._errors[INT8].get(name, 0.0), self._times[coded][name]),
                }
                if name in self._words:
                    ways[INT16] = Way(INT16, self._errors[INT16][name], self._times[INT16][name])
                found[name] = [ways[kind] for kind in kinds if kind in ways]
            elif mixed:
                found[name] = [Way(FLOAT32, 0.0, wider.get(name, 0.0)), narrow]
        return found

    def _time_of_codes(self, narrow: bool) -> str:
        """Which times layers with codes have; where they were not measured among bfloat16, they are the same there."""
        return _AMONG if narrow and _AMONG in self._times else INT8

    def _wider(self) -> dict[str, float]:
        """Seconds that it takes more to have results of nodes in float32."""
        named = {node.name: node for node in self._maker.graph.all_nodes()}
        return {name: seconds_wider(named[name], self._sizes) for name in self._units if name in named}

    def _flipped(self, form: Form, batch: Names, plain: Names | None) -> Form | None:
        """The form with codes for these layers where they had none, and without where they had; ``plain``: what stays
        in float32 without codes."""
        units = self._units_of(batch)
        if batch <= form.floats:
            wide = None if form.wide is None else form.wide - units
            return Form(form.floats - batch, wide, self._coded.joins, form.words - batch)
        floats = form.floats | batch
        if form.wide is None or self._light:
            words = form.words | frozenset(name for name in batch & self._words if self._quicker(name))
            as_it_was = floats >= self._every and not words and form.wide is None
            return None if as_it_was else Form(floats, form.wide, form.joins, words)
        return Form(floats, form.wide | (units if plain is None else units & plain), form.joins)

    def _quicker(self, name: str) -> bool:
        return self._times[INT16][name] < self._times[FLOAT32][name]

    def _estimate(self, form: Form) -> float:
        coded = self._time_of_codes(form.wide is not None)
        kinds = {
            name: coded if name not in form.floats else FLOAT32 if form.wide is None or name in form.wide else BF16
            for name in self._layers
        } | dict.fromkeys(form.words, INT16)
        return sum(self._times[kind][name] for name, kind in kinds.items())


def _reworded(form: Form, batch: Names) -> Form:
    """The form with numbers for these layers where they have 16-bit codes, else with such codes."""
    words = form.words - batch if batch & form.words else form.words | batch
    return Form(form.floats, form.wide, form.joins, words)


_STRANGE = ""  # the unit of nodes that the model as it was given has no names for


def _kept_for(node: Node, stored: Names) -> Names:
    """What has to stay in float32 for a node to read numbers that were not rounded: a layer with its activation, and
    whatever is not a layer that stores what it reads."""
    makers = (value.producer for value in node.inputs if value is not None)
    before = {maker.name for maker in makers if maker is not None and maker.op not in _LAYERS and maker.name in stored}
    behind = {each.name for each in tail(node).nodes} if node.op in _LAYERS else set[str]()
    return frozenset({node.name, *before, *behind})


def _wide_text(form: Form) -> str:
    if form.wide is None:
        return ""
    return f", bfloat16 but for {len(form.wide)} nodes" if form.wide else ", bfloat16"
