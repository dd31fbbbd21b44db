"""A process that is killed at any moment of saving leaves a checkpoint that loads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import slangvi
from slangvi.checkpoint import previous_path

KILLS = 100
# Each child is forked by a process that has saved before: a hundred imports of torch would take minutes.
SERVER = """
import os, sys
from dataclasses import replace
import torch, slangvi

torch.set_num_threads(1)
path = sys.argv[1]
zero = slangvi.slang.init({"w": torch.zeros(50_000)}, rank=3)


def save(path, step):
    state = replace(zero, loc=torch.full((50_000,), float(step)), step=step)
    slangvi.save(path, state, generator=torch.Generator().manual_seed(step))


save(path + ".warm", 0)
save(path, 0)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        step = int(line)
        while True:
            step += 1
            save(path, step)
            if step == int(line) + 1:
                print(os.getpid(), flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def check(path, step):
    """The checkpoint is whole, and no older than one that was seen; returns its step."""
    source = torch.Generator()
    state = slangvi.load(path, generator=source)
    assert state.step >= step
    assert bool((state.loc == state.step).all())
    assert torch.equal(source.get_state(), torch.Generator().manual_seed(state.step).get_state())
    if state.step:
        assert slangvi.load(previous_path(path), generator=None).step in (state.step - 1, state.step)
    return state.step


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_kill_at_any_moment_of_back_to_back_saves(path):
    chance, step, drafts = random.Random(0), 0, 0
    command = [sys.executable, "-c", SERVER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        for _ in range(KILLS):
            server.stdin.write(f"{step}\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline() == "gone\n"
            step = check(path, step)
            left = [entry for entry in path.parent.iterdir() if entry.name.endswith(".tmp")]
            drafts += bool(left)
            for entry in left:
                entry.unlink()
        server.stdin.close()
    assert step >= KILLS
    assert drafts > KILLS // 10  # it was often killed while it saved
