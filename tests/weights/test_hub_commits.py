"""A repository of the hub whose branch moves on: all files of one checkpoint are of one commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranvier.weights import Access, Context, HubSource, NotCached, WeightCache, WeightLoader, save_safetensors
from tests.weights.test_hub_and_s3 import standing_in

pytest.importorskip("huggingface_hub")
OLD, NEW = "a" * 40, "b" * 40
INDEX = "sub/model.safetensors.index.json"
NAMES = ("w0", "w1", "w2")


@dataclass
class Repository:
    """Two commits with the same index and other weights: zeros first, then ones."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by commit
    main: str = OLD
    moves_after: str = ""  # the file whose answer is the last thing before the branch moves on
    redirects: bool = False  # files lie elsewhere, where nobody knows of commits
    tells: str | None = None  # instead of the commit
    url: str = ""

    def answer(self, method: str, path: str, headers: Any) -> Any:
        if path.startswith("/elsewhere/"):
            _, _, commit, file = path.split("/", 3)
            return self._file({}, commit, file)
        revision, _, file = path.removeprefix("/owner/name/resolve/").partition("/")
        commit = self.main if revision == "main" else revision
        told = {"X-Repo-Commit": commit if self.tells is None else self.tells}
        if file == self.moves_after and method == "GET":
            self.main = NEW
        if file not in self.files.get(commit, {}):
            return 404, {**told, "X-Error-Code": "EntryNotFound"}, b""
        if self.redirects:
            return 302, {**told, "Location": f"{self.url}/elsewhere/{commit}/{file}"}, b""
        return self._file(told, commit, file)

    def _file(self, told: dict[str, str], commit: str, file: str) -> Any:
        data = self.files[commit][file]
        return 200, {**told, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, data


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    found = Repository()
    index = json.dumps({"weight_map": {name: f"{name}.safetensors" for name in NAMES}}).encode()
    for value, commit in enumerate((OLD, NEW)):
        found.files[commit] = {INDEX: index}
        for name in NAMES:
            save_safetensors(tmp_path / name, {name: np.full((2, 3), value, np.float32)})
            found.files[commit][f"sub/{name}.safetensors"] = (tmp_path / name).read_bytes()
    with standing_in(found.answer) as found.url:
        yield found


def source_in(tmp_path: Path, repository: Repository) -> HubSource:
    return HubSource("owner/name", INDEX, cache_dir=str(tmp_path / "hub"), endpoint=repository.url, token=False)


def loader(tmp_path: Path, **options: Any) -> WeightLoader:
    return WeightLoader(cache=tmp_path / "cache", retries=0, **options)


def values(arrays: Any) -> set[float]:
    return {float(each) for array in arrays for each in array.reshape(-1)}


def test_shards_of_the_commit_that_the_cached_index_is_of(repository: Repository, tmp_path: Path) -> None:
    source = source_in(tmp_path, repository)
    source.fetch(Context(WeightCache(tmp_path / "cache"), Access()))  # the index alone
    repository.main = NEW
    assert values(loader(tmp_path).load(source, name) for name in NAMES) == {0.0}
    with pytest.raises(NotCached, match=f"w1.safetensors@{OLD}"):
        loader(tmp_path, offline=True).load(source, "w1")
    assert values(loader(tmp_path).load_many(source).values()) == {1.0}, "which asks where the branch is now"
    assert values(loader(tmp_path, offline=True).load_many(source).values()) == {1.0}


@pytest.mark.parametrize("redirects", [False, True])
def test_a_branch_that_moves_between_index_and_shards(repository: Repository, tmp_path: Path, redirects: bool) -> None:
    repository.redirects = redirects
    source = source_in(tmp_path, repository)
    opened = loader(tmp_path).open(source)
    repository.main = NEW
    assert values(opened[name].read() for name in NAMES) == {0.0}


def test_a_branch_that_moves_during_a_download(repository: Repository, tmp_path: Path) -> None:
    repository.moves_after = INDEX
    source = source_in(tmp_path, repository)
    loader(tmp_path).preload(source)
    assert repository.main == NEW
    assert values(loader(tmp_path, offline=True).load_many(source).values()) == {0.0}


@pytest.mark.parametrize("said", ["", "../../../elsewhere", "main"])
def test_a_hub_that_tells_no_commit(repository: Repository, tmp_path: Path, said: str) -> None:
    """Nothing is known then but the name of the branch, and nothing is made of what is no commit."""
    repository.tells = said
    assert values([loader(tmp_path).load(source_in(tmp_path, repository), "w2")]) == {0.0}
