"""A module whose graph writes its state in place, for tests of backends."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Sliding(nn.Module):
    """A window of the newest rows, in front of a matrix; the old window is read after the new one exists."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 5)

    def forward(self, x: Tensor, window: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """x: (T, 3); window: (4, 3); rows: (9, 3), of which `places` (T,) are written."""
        before = window.clone()
        window.copy_(torch.cat((window, x))[-4:])
        rows.index_put_((places,), x * 2)
        return self.model(window[None])[0] + before.sum(), rows.sum(0)
