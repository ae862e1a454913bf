"""Two thousand broken models, in processes of their own: each gives a result or a RanvierError, and soon.

``tools/fuzz.py`` runs the same campaign for longer, replays one mutation and saves what it finds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import corpus
from tests.faults.campaign import run_batch

SEED = 2026
MUTATIONS = 2000
BATCHES = 8
SIZE = MUTATIONS // BATCHES
GROWTH = 64 << 20  # bytes a process may keep after the first quarter of a batch: caches still fill


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.write(folder)
    return folder


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_outcome_is_a_result_or_a_typed_error(batch: int, seeds: Path, tmp_path: Path) -> None:
    tally = run_batch(seeds, SEED, batch * SIZE, (batch + 1) * SIZE, tmp_path, seconds=240)
    report = "\n\n".join(
        f"python tools/fuzz.py --seed {SEED} --replay {finding.index}\n{finding}" for finding in tally.findings
    )
    assert not tally.findings, report
    assert tally.count == SIZE
    assert tally.growth < GROWTH, f"{tally.growth:,} bytes stayed in memory"
    # the mutators reach every stage: some models still run, some fail there, most do not load
    kinds = {name.split()[0] for name in tally.outcomes}
    assert kinds == {"ran", "run:", "load:"} and tally.outcomes["ran"] > SIZE // 20, tally.outcomes


def test_mutations_are_reproducible(seeds: Path) -> None:
    from tests.faults.mutate import mutate

    models = corpus.read(seeds)
    for index in range(50):
        first, second = mutate(models, SEED, index), mutate(models, SEED, index)
        assert (first.model, first.steps, first.optimization) == (second.model, second.steps, second.optimization)
        assert first.model != mutate(models, SEED + 1, index).model
