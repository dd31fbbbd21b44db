"""Letters A to J that nobody trained on: strangers drawn here, so that nothing has to be fetched."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["letters"]

# Five by seven dots each, row by row.
_GLYPHS = {
    "A": ".###. #...# #...# ##### #...# #...# #...#",
    "B": "####. #...# #...# ####. #...# #...# ####.",
    "C": ".#### #.... #.... #.... #.... #.... .####",
    "D": "####. #...# #...# #...# #...# #...# ####.",
    "E": "##### #.... #.... ####. #.... #.... #####",
    "F": "##### #.... #.... ####. #.... #.... #....",
    "G": ".#### #.... #.... #..## #...# #...# .####",
    "H": "#...# #...# #...# ##### #...# #...# #...#",
    "I": "##### ..#.. ..#.. ..#.. ..#.. ..#.. #####",
    "J": "....# ....# ....# ....# #...# #...# .###.",
}
_SIDE = 28


def letters(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Bright letters on dark ground, each of its own size, slant, place and thickness.

    Args:
        count: n; the letters come in turns.
        generator: source of randomness, on the CPU.

    Returns:
        (n, 28, 28) between 0 and 1.

    Example:
        >>> letters(3, torch.Generator().manual_seed(0)).shape
        torch.Size([3, 28, 28])
    """
    dots = torch.stack([_dots(glyph) for glyph in _GLYPHS.values()])[torch.arange(count) % len(_GLYPHS)]
    # With room around them, as large as MNIST's digits.
    wide = F.interpolate(F.pad(dots.unsqueeze(1), (3, 3, 2, 2)), (_SIDE, _SIDE), mode="bilinear")
    chance = 2 * torch.rand(4, count, generator=generator) - 1
    angle, slant = math.radians(15) * chance[0], 0.2 * chance[1]
    zeros = torch.zeros(count)
    first = torch.stack([angle.cos() * (1 + 0.15 * chance[2]), slant - angle.sin(), zeros], -1)
    second = torch.stack([angle.sin(), angle.cos() * (1 + 0.15 * chance[3]), zeros], -1)
    theta = torch.stack([first, second], 1)
    theta[:, :, 2] = 0.1 * (2 * torch.rand(count, 2, generator=generator) - 1)
    drawn = F.grid_sample(
        wide, F.affine_grid(theta, [count, 1, _SIDE, _SIDE], align_corners=False), align_corners=False
    )
    thickness = 1.2 + 1.3 * torch.rand(count, 1, 1, 1, generator=generator)
    return (thickness * drawn).clamp(0.0, 1.0).squeeze(1)


def _dots(glyph: str) -> Tensor:
    return torch.tensor([[float(dot == "#") for dot in row] for row in glyph.split()])
