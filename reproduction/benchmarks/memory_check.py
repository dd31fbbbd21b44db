"""Plans of `slangvi.estimate_memory` against what a GPU's allocator gave out, for the same steps.

    python reproduction/benchmarks/memory_check.py [--large]

One line for each case: the plan, torch.cuda.max_memory_allocated over three steps, and their ratio. The second ratio
leaves the workspace of cuBLAS out, which is allocated once per process; it was measured by a product beforehand.
`--large` adds a network of 1.4e8 parameters at rank 8, which takes about 30 GB.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slangvi


class Encoder(nn.Module):
    """Six layers of attention on 128 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Token indices (M, T) to logits (M, 10)."""
        return self.head(self.layers(self.words(x)).mean(1))  # type: ignore[no-any-return]


def mlp(*widths: int) -> nn.Module:
    """Linear layers with ReLU in between."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convnet() -> nn.Module:
    """Three convolutions on 32×32 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: mlp(784, 400, 400, 10), lambda: torch.rand(200, 784)),
    "convnet": (convnet, lambda: torch.rand(128, 3, 32, 32)),
    "encoder": (Encoder, lambda: torch.randint(1000, (32, 128))),
}
LARGE = {"wide mlp": (lambda: mlp(4096, 16384, 4096, 1000), lambda: torch.rand(256, 4096))}


def by_optimizer(model: nn.Module, x: Tensor, y: Tensor, rank: int, draws: int) -> None:
    """Three steps in a loop of one's own."""
    opt = slangvi.SLANG(model, num_data=60_000, rank=rank, init_precision=100.0)
    for _ in range(3):
        for _ in range(draws):
            with opt.sampled_params(train=True):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
        opt.step()


def by_function(model: nn.Module, x: Tensor, y: Tensor, rank: int, draws: int) -> None:
    """Three updates of the functional interface."""
    log_likelihood = slangvi.Categorical().of(model)
    options = {"num_data": 60_000, "lr": 0.05, "init_precision": 100.0, "model": model}
    vi = slangvi.slang.build(log_likelihood, rank=rank, mc_samples=draws, **options)
    state = vi.init(dict(model.named_parameters()))
    for _ in range(3):
        state, _ = vi.update(state, (x, y))


STEPS = {"optimizer": by_optimizer, "functional": by_function}


def workspace() -> int:
    """Bytes that stay allocated after one matrix product: what cuBLAS took for itself."""
    before = torch.cuda.memory_allocated()
    torch.rand(256, 256, device="cuda") @ torch.rand(256, 256, device="cuda")
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def check(name: str, interface: str, rank: int, draws: int, extra: int) -> None:
    """One case: plan on the GPU's own model, then run it."""
    build, data = (CASES | LARGE)[name]
    torch.manual_seed(0)
    model, x = build().cuda(), data().cuda()
    y = torch.arange(len(x), device="cuda") % 10
    plan = slangvi.estimate_memory(model, (x, y), rank, draws, interface=interface).peak
    torch.cuda.reset_peak_memory_stats()
    STEPS[interface](model, x, y, rank, draws)
    truth = torch.cuda.max_memory_allocated()
    sys.stdout.write(
        f"{name:<9} {interface:<10} L={rank:<2} S={draws}  plan {plan / 2**20:9.1f} MiB  "
        f"truth {truth / 2**20:9.1f} MiB  ratio {plan / truth:5.2f}  without workspace {plan / (truth - extra):5.2f}\n"
    )
    sys.stdout.flush()


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    large = parser.parse_args().large
    if not torch.cuda.is_available():
        sys.exit("memory_check needs a CUDA device; on a CPU run pytest -m slow tests/memory.")
    extra = workspace()
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, workspace {extra / 2**20:.1f} MiB\n")
    cases = [(name, i, L, S) for name in CASES for i in STEPS for L in (0, 1, 8) for S in (1, 4)]
    cases += [(name, "optimizer", 8, 1) for name in LARGE] if large else []
    for case in cases:
        check(*case, extra)
        gc.collect()


if __name__ == "__main__":
    main()
