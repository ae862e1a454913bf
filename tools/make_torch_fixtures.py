"""Write the small PyTorch files that tests/weights reads; needs torch, which the tests do not.

python tools/make_torch_fixtures.py tests/weights/data
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    model = OrderedDict(
        weight=base,
        turned=base.t(),  # two views of one storage
        part=base[1:3, 2:5],
        bias=torch.nn.Parameter(torch.randn(3)),
        half=torch.randn(5).half(),
        brain=torch.randn(5).bfloat16(),
        whole=torch.arange(7),
        bytes=torch.arange(5, dtype=torch.uint8),
        truth=torch.tensor([True, False]),
        number=torch.tensor(3.5),
        empty=torch.empty(0, 4),
        complex=torch.tensor([1 + 2j]),
    )
    tree = {"model": model, "steps": 7, "rates": [0.1, 0.2], "optimizer": {"state": {0: {"moment": torch.ones(2, 2)}}}}
    torch.save(tree, folder / "archive.pt")
    torch.save(tree, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.tensor([0.5, -1.0, 448.0]).to(torch.float8_e4m3fn)}, folder / "float8.pt")
    expected = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    expected["optimizer.state.0.moment"] = torch.ones(2, 2)
    arrays = {name: (t.float() if t.dtype is torch.bfloat16 else t).numpy() for name, t in expected.items()}
    np.savez(folder / "torch.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
