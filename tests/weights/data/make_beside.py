"""Write ``beside.pt``: tensors among what trainers keep beside them. Needs torch, which the tests do not.

python tests/weights/data/make_beside.py
"""

from __future__ import annotations

import argparse
import datetime
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch


def main(path: Path) -> None:
    noted = torch.tensor([1.0, 2.0])
    noted.note = "a tensor with an attribute"  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    parameter.note = "a parameter with one"  # type: ignore[attr-defined]
    codes = torch.tensor([[0x21, 0x43], [0x65, 0x97]], dtype=torch.uint8)
    tree = {
        "noted": noted,
        "parameter": parameter,
        "pairs": codes.view(torch.float4_e2m1fn_x2),
        "seen": Counter("aab"),
        "lists": defaultdict(list, a=[1]),
        "state": b"bytes",
        "buffer": bytearray(b"more"),
        "root": 1j,
        "names": {"a", "b"},
        "rate": np.float64(0.1),
        "losses": np.ones(3),
        "when": datetime.datetime(2026, 1, 2),
        "took": datetime.timedelta(3),
        "options": argparse.Namespace(depth=3),
        "where": torch.device("cpu"),
        "kind": torch.float32,
    }
    torch.save(tree, path)


if __name__ == "__main__":
    main(Path(__file__).with_name("beside.pt"))
