"""Decisions from a table: which are asked for, what comes of them, and how they are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ranvier.codegen import tuning, tuning_store
from ranvier.codegen.launch import At, KernelSpec, Launch
from ranvier.codegen.llvm import cache
from ranvier.codegen.llvm.isa import named
from ranvier.codegen.llvm.joined import joined
from ranvier.codegen.llvm.program import SERIAL_NS, chunked, estimated_ns
from ranvier.codegen.llvm.sharing import mark_far, paced, tuned_sharing
from ranvier.codegen.storage import Storage
from ranvier.codegen.tuning_store import Entry
from ranvier.varying import Span, follow


def _others() -> Mapping[str, int]:
    return {"two": 2, "as ever": 1, "also two": 2, "three": 3}


def _key() -> tuple[object, ...]:
    return (4, "float32")


def test_without_a_table_no_alternative_is_made() -> None:
    def never() -> Mapping[str, int]:
        raise AssertionError("asked for alternatives")

    assert tuning.choose("product way", _key, 1, never) == 1
    assert not tuning.consulted()


def test_a_table_decides_and_the_decision_is_written_down() -> None:
    launches = [0, 0]
    table = tuning.Table({"product way (4, 'float32')": "three"})
    with tuning.consulting(table, lambda: len(launches)) as consultation:
        assert consultation is not None and tuning.consulted()
        assert tuning.choose("product way", _key, 1, _others) == 3
        assert tuning.choose("product way", _key, 1, _others) == 3  # asked again, one decision
        assert tuning.choose("conv way", _key, 1, _others) == 1  # not in the table
        launches += [0, 0, 0]
        consultation.settle()
    found = {d.key: d for d in consultation.decisions}
    assert list(found) == ["product way (4, 'float32')", "conv way (4, 'float32')"]
    one = found["product way (4, 'float32')"]
    assert (one.chosen, one.others, one.first, one.end) == ("three", ("two", "three"), 2, 5)
    assert found["conv way (4, 'float32')"].chosen == ""
    assert not tuning.consulted()


def test_a_name_that_is_no_alternative_any_more_is_ignored() -> None:
    with tuning.consulting(tuning.Table({"product way (4, 'float32')": "gone"}), lambda: 0):
        assert tuning.choose("product way", _key, 1, _others) == 1


def test_where_nothing_differs_nothing_is_decided() -> None:
    with tuning.consulting(tuning.Table(), lambda: 0) as consultation:
        assert tuning.choose("product way", _key, 2, lambda: {"two": 2}) == 2
        assert consultation is not None
        consultation.settle()
    assert consultation.decisions == []


def test_sizes_that_vary_are_decided_as_ever() -> None:
    span = Span(4)
    table = tuning.Table({"product way (4, 'float32')": "three"})
    with tuning.consulting(table, lambda: 0), follow(span):
        assert tuning.choose("product way", _key, 1, _others) == 1
    assert span.valid.all()


def test_decisions_are_taken_back_by_an_empty_name() -> None:
    table = tuning.Table({"a": "x", "b": "y"}).having({"a": "", "c": "z"})
    assert table.chosen == {"b": "y", "c": "z"}


@pytest.mark.parametrize(("factor", "name"), [(2.0, "one"), (0.5, "all")])
def test_launches_are_shared_or_not_as_measured(factor: float, name: str) -> None:
    spec = KernelSpec("kernel", ("kernel",), lambda *_: None)
    launch = Launch(spec, (), (), tiles=64, writes=(), flops=factor * SERIAL_NS * 100.0)
    key = f"threads {('kernel', 64, launch.flops, 0.0)!r}"
    usual = chunked(launch, 2)[1] > 1
    assert usual == (factor > 1)
    with tuning.consulting(tuning.Table({key: name}), lambda: 0):
        found = tuned_sharing(launch)
    assert (chunked(found, 2)[1] > 1) != usual
    assert estimated_ns(launch) == factor * SERIAL_NS


def test_slower_arithmetic_is_shared_earlier() -> None:
    spec = KernelSpec("kernel", ("kernel",), lambda *_: None)
    launch = Launch(spec, (), (), tiles=64, writes=(), flops=0.5 * SERIAL_NS * 100.0)
    wide, neon = named("avx512", "x86_64"), named("neon", "aarch64")
    assert [chunked(each, 2)[1] > 1 for isa in (wide, neon) for each in paced([launch], isa)] == [False, True]
    assert [estimated_ns(each) for each in paced([launch], neon)] == [estimated_ns(launch) / neon.pace]


def test_weights_that_no_cache_holds_are_shared_earlier() -> None:
    """442 KB of weights are a matter of microseconds where they are near, and of tens where all of 20 MB are read."""
    spec = KernelSpec("kernel", ("kernel",), lambda *_: None)
    out = Storage("output", 8)

    def reading(nbytes: int, traffic: float, rounds: int = 1) -> Launch:
        weights = Storage("const", nbytes)
        return Launch(spec, (At(weights), At(out)), (), 64, (out,), flops=1e5, traffic=traffic, rounds=rounds)

    small = [reading(442_000, 450_000) for _ in range(48)]
    others = [reading(442_000, 2_000_000), reading(442_000, 450_000, rounds=9)]
    mark_far([*small[:8], *others])
    assert not any(each.far for each in [*small, *others]), "4 MB stay near"
    mark_far([*small[:8] * 6, *others])
    assert not any(each.far for each in small), "the same weights count once"
    assert [chunked(each, 2)[1] for each in small] == [1] * 48
    mark_far([*small, *others])
    assert all(each.far for each in small) and not any(each.far for each in others)
    assert all(chunked(each, 2)[1] > 2 for each in small)
    assert small[0].labelled("x").far and joined(small[:2]).far


# -- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning_store, "folder", lambda: tmp_path / "tuning")
    monkeypatch.setattr(tuning_store, "_read", {})
    return tmp_path / "tuning"


def test_tables_are_kept_by_instruction_set_and_threads(folder: Path) -> None:
    assert tuning_store.table("avx2", 1) is None
    assert tuning_store.save("avx2", 1, {"a": Entry("x", 1.5, 0.001), "b": Entry("", 1.0, 0.002)})
    assert tuning_store.save("avx2", 1, {"c": Entry("z", 1.1, 0.003)})  # beside what is there
    found = tuning_store.table("avx2", 1)
    assert found is not None and found.chosen == {"a": "x", "c": "z"}
    assert tuning_store.entries("avx2", 1)["b"] == Entry("", 1.0, 0.002)
    assert tuning_store.table("avx2", 2) is None and tuning_store.table("avx512", 1) is None
    (kept,) = tuning_store.kept()
    assert (kept.isa, kept.threads, kept.current, len(kept.entries)) == ("avx2", 1, True, 3)
    assert not list(folder.glob("*.new"))
    assert tuning_store.clear() == 1
    assert tuning_store.table("avx2", 1) is None


def test_what_another_version_measured_counts_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_store.save("avx2", 1, {"a": Entry("x", 1.5, 0.001)})
    monkeypatch.setattr(cache, "generator_digest", lambda: "another")
    monkeypatch.setattr(tuning_store, "_read", {})
    assert tuning_store.table("avx2", 1) is None
    assert not tuning_store.kept()[0].current
    tuning_store.save("avx2", 1, {"b": Entry("y", 1.5, 0.001)})
    assert list(tuning_store.entries("avx2", 1)) == ["b"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"key": {}, "entries": 3}'])
def test_broken_files_count_as_absent(folder: Path, content: str) -> None:
    tuning_store.save("avx2", 1, {"a": Entry("x", 1.5, 0.001)})
    (path,) = folder.glob("*.json")
    path.write_text(content)
    tuning_store._read.clear()
    assert tuning_store.entries("avx2", 1) == {}
    assert tuning_store.kept() == []
    assert tuning_store.save("avx2", 1, {"b": Entry("y", 1.5, 0.001)})
    assert json.loads(path.read_text())["entries"] == {"b": ["y", 1.5, 0.001]}


def test_no_folder_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.SWITCH, "off")
    assert tuning_store.folder() is None
    assert not tuning_store.save("avx2", 1, {"a": Entry("x", 1.5, 0.001)})
    assert tuning_store.entries("avx2", 1) == {} and tuning_store.kept() == [] and tuning_store.clear() == 0


def test_where_nothing_was_ever_tuned_the_machine_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> str:
        raise AssertionError("asked for the machine")

    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(tuning_store, "_machine", never)
    assert tuning_store.table("neon", 1) is None
    assert tuning_store.entries("neon", 1) == {}
