"""Which column goes with which row: the one-to-one assignment with the highest total score."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations

import torch
from torch import Tensor

__all__ = ["FEW", "best_assignment"]

# Up to here all permutations are tried at once, 120 of them, for all members of a batch together and without a look at
# a number.
FEW = 5


def best_assignment(scores: Tensor) -> Tensor:
    r"""The permutation with the highest total score.

    $$ \pi = \arg\max_\pi \sum_l s_{l\,\pi(l)} $$

    Args:
        scores: s, (..., L, L). Where some are not finite, any permutation may come out.

    Returns:
        π(l) for each row l, (..., L).

    Example:
        >>> best_assignment(torch.tensor([[3.0, 2.0], [2.9, 0.1]])).tolist()
        [1, 0]
    """
    count = scores.shape[-1]
    if count <= FEW:
        candidates = _all_permutations(count, scores.device)
        totals = scores[..., torch.arange(count, device=scores.device), candidates].sum(-1)
        return candidates[totals.argmax(-1)]
    # What is not finite would let no row find its column.
    members = scores.nan_to_num(0.0, 0.0, 0.0).reshape(-1, count, count).tolist()
    return torch.tensor([_hungarian(member) for member in members], device=scores.device).view(scores.shape[:-1])


@lru_cache(maxsize=16)
def _all_permutations(count: int, device: torch.device) -> Tensor:
    """(count!, count), the identity first, which therefore wins ties."""
    return torch.tensor(list(permutations(range(count))), dtype=torch.long, device=device)


def _hungarian(scores: list[list[float]]) -> list[int]:
    """The Hungarian method with potentials, O(L³): rows enter one by one, each along the cheapest augmenting path."""
    count = len(scores)
    by_row, by_column = [0.0] * (count + 1), [0.0] * (count + 1)
    owner = [count] * (count + 1)  # row of each column; index `count` stands for none
    for row in range(count):
        owner[count], column = row, count
        slack, previous = [float("inf")] * count, [count] * count
        seen = [False] * (count + 1)
        while owner[column] != count:
            seen[column] = True
            current, nearest, best = owner[column], count, float("inf")
            for j in range(count):
                if seen[j]:
                    continue
                cost = -scores[current][j] - by_row[current] - by_column[j]
                if cost < slack[j]:
                    slack[j], previous[j] = cost, column
                if slack[j] < best:
                    best, nearest = slack[j], j
            for j in range(count + 1):
                if seen[j]:
                    by_row[owner[j]] += best
                    by_column[j] -= best
                elif j < count:
                    slack[j] -= best
            column = nearest
        while column != count:
            owner[column], column = owner[previous[column]], previous[column]
    columns = [0] * count
    for column, row in enumerate(owner[:count]):
        columns[row] = column
    return columns
