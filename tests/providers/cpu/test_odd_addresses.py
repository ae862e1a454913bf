"""Constants that lie in their file at an address which does not suit their type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import ranvier as rv
from ranvier.graph.ir import Value

TABLE = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)


def loaded(folder: Path) -> tuple[rv.Session, Value]:
    """A session whose table lies at such an address, and the table."""
    text = "g (int64[n] x) => (float[n,64] y) { y = Gather(table, x) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    model.graph.initializer.append(numpy_helper.from_array(TABLE, "table"))
    for shift in range(1, 5):
        model.producer_name = "x" * shift  # stands before the graph
        path = folder / f"{shift}.onnx"
        path.write_bytes(model.SerializeToString())
        session = rv.load(path, providers=["cpu"])
        (table,) = session.graph.constants.values()
        assert table.const is not None
        if not table.const.raw().flags.aligned:
            return session, table
    raise AssertionError("all of them are aligned")


def test_they_are_copied_once_for_all_sizes(tmp_path: Path) -> None:
    session, table = loaded(tmp_path)
    with session:
        for count in (3, 5):
            picked = np.arange(count) * 7
            np.testing.assert_array_equal(session.run({"x": picked})["y"], TABLE[picked])
        (part,) = session._parts
        kept = [array for made in part.kernel._made.values() for array in made._keep if array.shape == TABLE.shape]
        assert len(kept) == 2 and kept[0] is kept[1] and kept[0].flags.aligned
        assert part.kernel.memory_usage().constants >= TABLE.nbytes
        assert table.const is not None and table.const._array is None  # and nobody made another copy
