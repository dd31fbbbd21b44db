r"""What a step of SLANG must do at least: operations and bytes, counted from the sizes of the layers.

Counted for a network of linear layers, float32, R = M·S gradient rows. A layer's gradients are outer products
$\delta_r a_r^\top$. The first layer's inputs are the data, the same for all draws, so its sums over rows are sums over
M inputs. Matrices without a P in their size (Gram, Cholesky factor, eigenvectors) and elementwise work are left out:
the counts are a floor, not a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Rates", "Shape", "bytes_of", "least_seconds", "operations_of"]

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Rates:
    """What the machine was measured to do.

    Args:
        flops: operations per second of a large float32 matrix product.
        bytes: bytes per second, read and written, of a large copy.
    """

    flops: float
    bytes: float


@dataclass(frozen=True)
class Shape:
    """A network of linear layers and how it is trained.

    Args:
        sizes: widths from input to output.
        batch: M.
        draws: S.
        rank: L.

    Example:
        >>> Shape((784, 400, 400, 10), batch=200, draws=4, rank=8).num_params
        478410
    """

    sizes: Sequence[int]
    batch: int
    draws: int
    rank: int

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * self.draws

    @property
    def num_params(self) -> int:
        """P."""
        return sum((layer.inputs + 1) * layer.outputs for layer in self.layers())

    def layers(self) -> Iterator[Layer]:
        """Each layer's widths, and how many different inputs it sees."""
        for k, (inputs, outputs) in enumerate(pairwise(self.sizes)):
            yield Layer(inputs, outputs, self.batch if k == 0 else self.rows, k == 0)


class Layer(NamedTuple):
    """Widths, number of different inputs, and whether it is the first."""

    inputs: int
    outputs: int
    seen: int
    first: bool


def operations_of(shape: Shape) -> dict[str, int]:
    """Operations by phase; one multiplication and one addition are two.

    The leading eigenpairs come from the Gram matrix, or, where that costs less, from one more pair of products with
    the gradients.

    Example:
        >>> operations_of(Shape((3, 2), batch=5, draws=1, rank=1))["forward"]
        60
    """
    R, L, P = shape.rows, shape.rank, shape.num_params
    layers = list(shape.layers())
    products = sum(4 * layer.seen * layer.inputs * layer.outputs * L for layer in layers)
    gram = sum(R**2 * layer.outputs + layer.seen**2 * layer.inputs for layer in layers)
    return {
        "forward": sum(2 * R * layer.inputs * layer.outputs for layer in layers),
        "backward": sum(2 * R * layer.inputs * layer.outputs for layer in layers if not layer.first),
        "gradient sum and squares": sum(4 * layer.seen * layer.inputs * layer.outputs for layer in layers),
        "products with U and the eigenvectors": products,
        "leading eigenpairs": min(gram, products),
        "draws": 4 * shape.draws * L * P,
        "U⁺, its factorisation, the solve": (4 * L**2 + 8 * L) * P,
    }


def bytes_of(shape: Shape) -> dict[str, int]:
    """Bytes by what they belong to, when every pass between two reductions over P reads and writes each value once.

    U is read to project the noise, to correct the draws, to meet the gradients and to make U⁺; U⁺ is written, and read
    for the mean. The draws are written once and read forward and backward. Of single vectors, d and μ are read for the
    draws (3), d and m are renewed (4), and the mean is renewed from d⁺, m⁺ and μ (4). Inputs and output gradients of
    the layers are read or written once in each of six passes: forward, backward, sums, eigenpairs, and two products.

    Example:
        >>> bytes_of(Shape((3, 2), batch=5, draws=1, rank=1))["U and U⁺"]
        192
    """
    P, S = shape.num_params, shape.draws
    layers = list(shape.layers())
    first = layers[0].inputs * layers[0].outputs
    return {
        "U and U⁺": FLOAT * 6 * shape.rank * P,
        "draws": FLOAT * S * (3 * P - first),
        "d, μ and m": FLOAT * 11 * P,
        "activations": FLOAT * 6 * sum(layer.seen * layer.inputs + shape.rows * layer.outputs for layer in layers),
    }


def least_seconds(shape: Shape, rates: Rates) -> float:
    """Time below which no step can be on a machine of these rates, arithmetic and memory working side by side."""
    return max(sum(operations_of(shape).values()) / rates.flops, sum(bytes_of(shape).values()) / rates.bytes)
