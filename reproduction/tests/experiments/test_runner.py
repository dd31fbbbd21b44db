"""The runner: order, what is kept, what fails, and Ctrl-C; in this process and in others."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from helpers import fake_experiments
from helpers.fake_experiments import cell
from slangvi_reproduction.experiments import runner
from slangvi_reproduction.experiments._cells import read, read_cell
from slangvi_reproduction.experiments.runner import CellsFailed, Interrupted, run_cells


@pytest.fixture
def seen():
    return []


def events(seen, *kinds):
    return [status.label.split()[1] for status in seen if status.event in kinds]


def test_needs_come_first_and_then_the_longest(tmp_path, seen):
    base = cell("base", cost=0.1)
    run_cells([cell("short", cost=1.0), cell("long", cost=9.0, needs=(base,))], tmp_path, progress=seen.append)
    assert events(seen, "started") == ["short", "base", "long"]
    assert int(read_cell(cell("long", needs=(base,)), tmp_path).arrays["total"]) == 42


def test_finished_cells_are_not_computed_again_unless_forced_or_changed(tmp_path, seen):
    log = tmp_path / "log"
    run_cells([cell("a", log=str(log))], tmp_path)
    run_cells([cell("a", log=str(log))], tmp_path, progress=seen.append)
    assert [(s.event, s.finished, s.cells, s.share) for s in seen] == [("kept", 1, 1, 1.0)]
    assert len(log.read_text().splitlines()) == 6
    run_cells([cell("a", log=str(log), epochs=2)], tmp_path)
    assert len(log.read_text().splitlines()) == 12
    run_cells([cell("a", log=str(log))], tmp_path, force=True)
    assert len(log.read_text().splitlines()) == 18


def test_a_cell_that_two_need_is_computed_once(tmp_path, seen):
    first, second = (cell(name, needs=(cell("base"),)) for name in "ab")
    run_cells([first, second], tmp_path, progress=seen.append)
    assert sorted(events(seen, "finished")) == ["a", "b", "base"]


def test_failures_are_told_after_the_others_are_done_and_dependents_are_left_out(tmp_path, seen):
    broken = cell("broken", "fail")
    cells = [broken, cell("needy", needs=(broken,)), cell("fine")]
    with pytest.raises(CellsFailed, match="data broken: ArithmeticError: numbers ran out\n1 of 3 cells are finished"):
        run_cells(cells, tmp_path, progress=seen.append)
    assert events(seen, "finished") == ["fine"]
    assert read_cell(cells[1], tmp_path) is None


def test_progress_reaches_one_and_time_left_zero(tmp_path, seen):
    run_cells([cell("a", cost=3.0), cell("b")], tmp_path, progress=seen.append)
    shares = [status.share for status in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert seen[-1].seconds_left == pytest.approx(0.0)
    assert [(s.done, s.steps) for s in seen if s.event == "advanced"][-1] == (6, 6)


def test_ctrl_c_keeps_what_there_is_and_the_same_call_goes_on(tmp_path, seen):
    before = signal.getsignal(signal.SIGINT)
    log = tmp_path / "log"
    cells = [cell("a", cost=2.0, log=str(log), interrupt=3), cell("b", log=str(log))]
    with pytest.raises(Interrupted, match="0 of 2 cells are finished and kept"):
        run_cells(cells, tmp_path, progress=seen.append)
    assert signal.getsignal(signal.SIGINT) is before
    assert read(cells[0].partial_path(tmp_path)).about["done"] == 3
    assert events(seen, "started") == ["a"]
    run_cells(cells, tmp_path)
    assert log.read_text().count("a 3") == 1
    assert int(read_cell(cells[0], tmp_path).arrays["total"]) == 21


def test_after_ctrl_c_a_forced_run_goes_on_without_force(tmp_path):
    cells = [cell("broken", "fail", cost=9.0), cell("a", interrupt=3)]
    with pytest.raises(Interrupted) as raised:
        run_cells(cells, tmp_path, force=True)
    assert "The same command without --force goes on from there." in str(raised.value)
    assert "data broken: ArithmeticError: numbers ran out" in str(raised.value)


def test_threads_are_set_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_cells([cell("a")], tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_another_thread_may_run_cells(tmp_path):
    thread = threading.Thread(target=run_cells, args=([cell("a")], tmp_path))
    thread.start()
    thread.join()
    assert read_cell(cell("a"), tmp_path) is not None


def test_processes_do_the_same_and_survive_one_that_dies(tmp_path, seen):
    base = cell("base", cost=0.1)
    cells = [cell("a", needs=(base,)), cell("broken", "fail"), cell("dead", "die", cost=0.01)]
    with pytest.raises(CellsFailed) as raised:
        run_cells(cells, tmp_path, jobs=2, progress=seen.append)
    assert "data broken: ArithmeticError: numbers ran out" in str(raised.value)
    assert "data dead: its process died with exit code 3" in str(raised.value)
    assert sorted(events(seen, "finished")) == ["a", "base"]
    assert int(read_cell(cells[0], tmp_path).arrays["total"]) == 42


def test_ctrl_c_stops_processes_at_a_checkpoint(tmp_path):
    cells = [cell("a", "wait"), cell("b", "wait")]
    pressed = []

    def press(status):
        if status.event == "advanced" and status.label not in pressed:
            pressed.append(status.label)
            if len(pressed) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    start = time.perf_counter()
    with pytest.raises(Interrupted, match="0 of 2 cells"):
        run_cells(cells, tmp_path, jobs=2, progress=press)
    assert time.perf_counter() - start < 50
    assert all(each.partial_path(tmp_path).is_file() for each in cells)
    run_cells(cells, tmp_path)
    assert all(read_cell(each, tmp_path) is not None for each in cells)


def test_work_is_found_by_name():
    assert cell("a").work == f"{fake_experiments.__name__}:count"


def test_a_second_ctrl_c_insists_unless_it_comes_with_the_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(runner.time, "perf_counter", lambda: now[0])
    with runner._interrupts() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        now[0] = 2.0
        with pytest.raises(KeyboardInterrupt, match="Stopped at once"):
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_the_last_moment_changes_nothing(tmp_path):
    def press(status):
        if status.event == "finished":
            os.kill(os.getpid(), signal.SIGINT)

    run_cells([cell("a")], tmp_path, progress=press)
    assert read_cell(cell("a"), tmp_path) is not None
