"""One training step of the paper's 784-400-400-10 network: SLANG against Adam and IVON, same process, medians.

    python benchmarks/step.py [--device cuda] [--out benchmarks/results/step-cpu.json]

On a CPU only the ratios mean anything; on a GPU the times do too. IVON is measured when `ivon-opt` is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import slangvi

M, S, N = 200, 4, 60_000
RANKS = (1, 8, 32)


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)]
    return nn.Sequential(*layers).to(device)


def adam(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Adam on a batch of M·S: as many examples through the network as one SLANG step."""
    model = network(x.device.type)
    opt = torch.optim.Adam(model.parameters())
    inputs, labels = x.repeat(S, 1), y.repeat(S)

    def step() -> None:
        opt.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        opt.step()

    return step


def sampled_loop(opt: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """The loop that IVON and SLANG share."""

    def step() -> None:
        for _ in range(S):
            with opt.sampled_params(train=True):  # type: ignore[attr-defined]
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
        opt.step()

    return step


def ivon(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    from ivon import IVON

    model = network(x.device.type)
    return sampled_loop(IVON(model.parameters(), lr=0.1, ess=N), model, x, y)


def slang_optimizer(x: torch.Tensor, y: torch.Tensor, rank: int) -> Callable[[], None]:
    model = network(x.device.type)
    opt = slangvi.SLANG(model, num_data=N, rank=rank, lr=0.05, init_precision=100.0)
    return sampled_loop(opt, model, x, y)


def slang_functional(x: torch.Tensor, y: torch.Tensor, rank: int) -> Callable[[], None]:
    model = network(x.device.type)
    vi = slangvi.slang.build(
        slangvi.Categorical().of(model), num_data=N, rank=rank, lr=0.05, mc_samples=S, init_precision=100.0, model=model
    )
    state = [vi.init(dict(model.named_parameters()))]
    generator = torch.Generator(x.device).manual_seed(0)

    def step() -> None:
        state[0], _ = vi.update(state[0], (x, y), generator=generator)

    return step


def measure(step: Callable[[], None], device: str, repeats: int) -> tuple[float, float | None]:
    """Median seconds of a step after warm-up, and peak megabytes allocated on a GPU (None on a CPU)."""
    for _ in range(3):
        step()
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated() if cuda else 0
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - start_bytes) / 2**20 if cuda else None
    return statistics.median(times), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.rand(M, 784, device=args.device)
    y = torch.randint(10, (M,), device=args.device)
    rows: dict[str, Callable[[], None]] = {"adam": adam(x, y)}
    try:
        rows["ivon"] = ivon(x, y)
    except ImportError:
        print("ivon-opt is not installed: IVON left out", file=sys.stderr)
    for rank in RANKS:
        rows[f"slang optimizer L={rank}"] = slang_optimizer(x, y, rank)
        rows[f"slang functional L={rank}"] = slang_functional(x, y, rank)
    results, base = {}, None
    for name, step in rows.items():
        seconds, peak = measure(step, args.device, args.repeats)
        base = base or seconds
        results[name] = {"milliseconds": 1e3 * seconds, "ratio_to_adam": seconds / base, "extra_megabytes": peak}
        print(
            f"{name:<24}{1e3 * seconds:9.2f} ms{seconds / base:8.2f} x Adam{'' if peak is None else f'{peak:9.0f} MB'}",
            flush=True,
        )
    if args.out:
        environment = {
            "command": " ".join(sys.argv),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
            "threads": torch.get_num_threads(),
            "slangvi": slangvi.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
