"""Standard normal noise, by several threads where there is much of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["fill_normal", "standard_normal"]

# From this size on a CPU's noise is drawn in pieces, each from a generator of its own. Their number is fixed, so that
# the same seed gives the same numbers whatever the number of threads.
MUCH = 1 << 18
PIECES = 4


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """N(0, 1) with the dtype and device of another tensor.

    Torch's CPU generator works on one core. For large draws it is asked for a few seeds only, and threads fill the
    pieces: the same state of the generator always gives the same numbers.

    Args:
        shape: of the result.
        like: tensor whose dtype and device it has.
        generator: source; None is torch's own.

    Example:
        >>> standard_normal((2, 3), torch.zeros(()), torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3])
    """
    return fill_normal(torch.empty(shape, dtype=like.dtype, device=like.device), generator)


def fill_normal(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """The same into a tensor without gaps, which is returned."""
    if noise.device.type != "cpu" or noise.numel() < MUCH:
        return noise.normal_(generator=generator)
    seeds = torch.randint(2**62, (PIECES,), generator=generator, device="cpu").tolist()
    pieces, inference = noise.view(-1).chunk(PIECES), noise.is_inference()

    def fill(piece: Tensor, seed: int) -> None:
        with torch.inference_mode(inference):  # a thread does not inherit it
            piece.normal_(generator=torch.Generator("cpu").manual_seed(seed))

    # A subclass may run code of its own that only one thread may run at a time; torch's tensors without values do.
    workers = min(PIECES, max(1, torch.get_num_threads())) if type(noise) is Tensor else 1
    if workers == 1:
        list(map(fill, pieces, seeds))
        return noise
    with ThreadPoolExecutor(max_workers=workers) as threads:
        list(threads.map(fill, pieces, seeds))
    return noise
