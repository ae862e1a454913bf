"""Write the small PyTorch files that tests/weights reads; needs torch, which the tests do not.

python tools/make_torch_fixtures.py tests/weights/data
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch


class Scripted(torch.nn.Module):
    """With a buffer, layers in a list, a tensor that is neither, and attributes of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 2).half(), torch.nn.Conv1d(2, 2, 1)])
        self.scale = torch.full((2,), 0.5)
        self.sizes, self.notes, self.nothing, self.pair = [1, 2], {"x": 1}, None, (1, "a")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](x) * self.scale[0] + torch.tensor([[2.0]])


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
    script = torch.jit.trace(Scripted(), torch.ones(1, 2, 3))  # traced, so that its code has a constant
    script.save(folder / "script.pt")
    np.savez(folder / "script.npz", **{name: tensor.detach().numpy() for name, tensor in script.state_dict().items()})
    expected = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    expected["optimizer.state.0.moment"] = torch.ones(2, 2)
    arrays = {name: (t.float() if t.dtype is torch.bfloat16 else t).numpy() for name, t in expected.items()}
    np.savez(folder / "torch.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
