"""The optimizer's step and draws replayed from graphs, around a forward and backward that are the user's own."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slangvi
from helpers import captured_steps
from helpers.captured_steps import N, Net, assert_agree, draw_and_step, optimizer, pair, problem, relative, words
from helpers.optimizer_runs import flat
from slangvi.grads import RowGroup
from slangvi.grads.blocks import Formed, Outer, Rows
from slangvi.methods import _graph_loop, _graph_pieces, _row_leaves, graph_capture
from slangvi.methods._graph_loop import LoopStep
from slangvi.methods._launched import Launched
from slangvi.methods._row_leaves import leaves_of, rebuilt
from slangvi.methods.graph_runner import MOST_GRAPHS
from slangvi.priors import Prior


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global"])
def test_replayed_steps_and_draws_equal_eager_ones(cuda, rank, dtype, own):
    eager, replayed, batch = pair(own, lambda: problem(dtype), rank=rank)
    random, tolerance = [], 1e-6 if dtype is torch.float32 else 1e-12
    for opt in (eager, replayed):
        torch.manual_seed(5)
        random.append([draw_and_step(opt, batch) for _ in range(12)])
        random.append(torch.get_rng_state() if opt.generator is None else opt.generator.get_state())
    assert_agree(eager, replayed, tolerance)
    for mine, other in zip(random[0], random[2], strict=True):
        assert all(relative(a, b) <= tolerance for a, b in zip(mine, other, strict=True))
    assert torch.equal(random[1], random[3])
    a, b = eager.info, replayed.info
    assert (b.num_rows, b.rank_used, math.isnan(b.loss)) == (a.num_rows, a.rank_used, True)
    assert (b.kl, b.captured, float(b.total)) == pytest.approx((a.kl, a.captured, float(a.total)), rel=1e-5)
    # Passes 1, 2, 4, 8 and 16 are checked and the third is captured, so steps 3, 5, 6, 7, 9, 10, 11 and 12 are of
    # replayed passes alone: the first of them shows the shapes, the second is captured, and draws follow on seven.
    assert [cuda.captured.count(piece) for piece in ("go_forward", "go_back", "watch")] == [1, 1, 1]
    # The graph is compared with the model at checks 4, 8 and 16.
    assert [cuda.replayed.count(way) for way in ("go_forward", "go_back")] == [24 - 5 + 3, 24 - 5]
    assert cuda.replayed.count("write_draw") == 12
    assert cuda.replayed.count("write_mean") == 7 + 12


def test_every_kind_of_block_is_replayed(cuda):
    eager, replayed, batch = pair(make=words)
    for opt in (eager, replayed):
        for k in range(8):
            draw_and_step(opt, (batch[0].roll(k, 0), batch[1]), draws=1)
    assert_agree(eager, replayed)
    # Rows of passes 1, 2, 4 and 8 come from hooks, those of 3, 5, 6 and 7 from a graph: either is captured when it
    # comes again.
    assert cuda.captured.count("watch") == 2
    assert "whole" in cuda.replayed
    assert cuda.replayed.count("write_mean") == 6 + 5


def test_steps_of_an_embedding_are_captured_without_waiting(taped):
    eager, replayed, batch = pair(make=words)
    for opt in (eager, replayed):
        for _ in range(3):
            draw_and_step(opt, batch, draws=1)
    assert_agree(eager, replayed)
    assert "watch" in taped.captured


def test_dropout_and_closures_go_on_as_before(cuda):
    eager, replayed, (x, y) = pair(own=True, make=lambda: problem(dropout=0.4), mc_samples=3)
    for opt in (eager, replayed):
        torch.manual_seed(5)

        def closure(opt=opt):
            opt.zero_grad()
            loss = F.cross_entropy(opt.model(x), y)
            loss.backward()
            return loss

        losses = [float(opt.step(closure)) for _ in range(7)]
        assert opt.info.loss == pytest.approx(N * losses[-1], rel=1e-5)
    assert_agree(eager, replayed)
    assert cuda.replayed.count("go_back") == 21 - 5
    assert "write_draw" in cuda.replayed


@pytest.mark.choreography
def test_rates_may_change_and_shapes_alternate(cuda):
    eager, replayed, (x, y) = pair()
    for opt in (eager, replayed):
        sched = slangvi.inverse_time(opt, decay=0.6)
        for size in (40, 40, 33, 40, 33, 40, 17, 40, 33, 40, 33, 40):
            draw_and_step(opt, (x[:size], y[:size]))
            sched.step()
    assert_agree(eager, replayed)
    # A last batch seen once is not worth a graph, neither of its passes nor of its step.
    assert cuda.captured.count("go_forward") == cuda.captured.count("watch") == 2
    assert [graph.rows[0].num_rows for graph in replayed._graphs.graphs.values()] == [33, 40]


@pytest.mark.choreography
def test_the_latest_few_graphs_are_kept(cuda):
    eager, replayed, (x, y) = pair()
    sizes = (40, 39, 38, 37, 36, 35)
    for opt in (eager, replayed):
        for size in sizes * 2 + sizes[:1]:
            draw_and_step(opt, (x[:size], y[:size]), draws=1, call=lambda model, x: model(x=x))
    assert_agree(eager, replayed)
    assert [graph.rows[0].num_rows for graph in replayed._graphs.graphs.values()] == [37, 36, 35, 40]
    assert len(replayed._graphs.graphs) == MOST_GRAPHS
    assert cuda.captured.count("watch") == 7
    assert "go_forward" not in cuda.captured  # only calls with one argument and no keywords are


@pytest.mark.choreography
def test_passes_of_shapes_that_take_turns_do_not_push_each_other_out(cuda):
    eager, replayed, (x, y) = pair()
    sizes = (40, 39, 38, 37, 36, 35)
    for opt in (eager, replayed):
        for size in sizes * 5:
            draw_and_step(opt, (x[:size], y[:size]), draws=1)
    assert_agree(eager, replayed)
    assert [len(known.x) for known in replayed._passes.passes.values()] == list(sizes[:MOST_GRAPHS])
    assert cuda.captured.count("go_forward") == cuda.captured.count("go_back") == MOST_GRAPHS


@pytest.mark.choreography
def test_shapes_seen_long_ago_are_forgotten(cuda, monkeypatch):
    monkeypatch.setattr(_graph_loop, "_MOST_SEEN", 1)
    eager, replayed, (x, y) = pair()
    for opt in (eager, replayed):
        for size in (40, 39, 38, 37, 40):
            draw_and_step(opt, (x[:size], y[:size]), draws=1)
    assert "watch" not in cuda.captured
    for opt in (eager, replayed):
        for _ in range(5):
            draw_and_step(opt, (x, y), draws=1)
    assert_agree(eager, replayed)
    assert cuda.captured.count("watch") == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_refused_and_leave_everything(cuda, bad):
    eager, replayed, (x, y) = pair()
    broken = x.clone()
    broken[3, 1] = bad
    for opt in (eager, replayed):
        for _ in range(6):
            draw_and_step(opt, (x, y), draws=1)
        before, done = flat(opt.model), len(cuda.replayed)
        with pytest.raises(slangvi.NumericalError, match=r"step 7: the gradient of parameter 'first.weight'"):
            draw_and_step(opt, (broken, y), draws=1)
        assert torch.equal(flat(opt.model), before)
        assert opt._state.step == 6
        assert ("watch" in cuda.replayed[done:]) == (opt is replayed)
        for _ in range(3):
            draw_and_step(opt, (x, y), draws=1)
    assert_agree(eager, replayed)


def write_data(opt):
    opt.model.first.weight.data.mul_(0.5)


def load_state(opt):
    saved = copy.deepcopy(opt.state_dict())
    saved["slangvi"]["tensors"]["prec_diag"].mul_(2.0)
    opt.load_state_dict(saved)


def replace_data(opt):
    opt.model.first.weight.data = opt.model.first.weight.data.clone()


def other_prior(opt):
    opt.param_groups[0]["prior_precision"] = 3.0


def groups_differ(opt):
    opt.add_param_group({"params": [opt.model.extra], "lr": 0.01})


def without_generator(opt):
    opt.generator = None
    torch.manual_seed(11)


CHANGES = {f.__name__: f for f in (write_data, load_state, replace_data, other_prior, groups_differ, without_generator)}


class Scaled(Net):
    """With a parameter that is not inferred from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.extra


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_are_taken_over(cuda, change):
    first, batch = Scaled(), problem()[1]
    second = copy.deepcopy(first)
    chosen = [{"params": [p for name, p in model.named_parameters() if name != "extra"]} for model in (first, second)]
    eager, replayed = (
        optimizer(model, compiled, params=[group])
        for model, compiled, group in zip((first, second), (False, True), chosen, strict=True)
    )
    for opt in (eager, replayed):
        for _ in range(6):
            draw_and_step(opt, batch)
        CHANGES[change](opt)
        for _ in range(5):
            draw_and_step(opt, batch)
    assert_agree(eager, replayed)
    assert "write_draw" in cuda.replayed


@pytest.mark.choreography
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_have_graphs_of_their_own(cuda, duplicate):
    eager, replayed, batch = pair()
    for opt in (eager, replayed):
        for _ in range(6):
            draw_and_step(opt, batch)
    twin = duplicate(replayed)
    assert "_graphs" not in twin.__dict__
    assert "_passes" not in twin.__dict__
    for opt in (eager, replayed, twin):
        for _ in range(6):
            draw_and_step(opt, batch)
    assert_agree(eager, twin)
    assert_agree(eager, replayed)
    assert cuda.captured.count("go_back") == cuda.captured.count("write_draw") == 2


def test_a_capture_that_fails_is_named_once_and_leaves_the_optimizer_working(cuda, monkeypatch):
    real = LoopStep.gradients

    def unwilling(self):
        if cuda.busy:
            raise ValueError("not while capturing")
        return real(self)

    monkeypatch.setattr(LoopStep, "gradients", unwilling)
    eager, replayed, batch = pair(own=False)
    random = []
    for opt in (eager, replayed):
        torch.manual_seed(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(7):
                draw_and_step(opt, batch)
        random.append(torch.get_rng_state())
    assert len(caught) == 1
    assert "could not be captured (ValueError: not while capturing)" in str(caught[0].message)
    assert caught[0].filename == captured_steps.__file__
    assert_agree(eager, replayed)
    assert torch.equal(*random)
    assert set(cuda.replayed) == {"go_forward", "go_back"}  # the passes, but no step


def test_without_a_gpu_compiling_warns_once_and_changes_nothing():
    eager, compiled, batch = pair()
    draw_and_step(eager, batch)
    with pytest.warns(UserWarning, match="compile=True has no effect: parameters are on cpu") as caught:
        draw_and_step(compiled, batch)
    assert caught[0].filename == captured_steps.__file__
    for opt in (eager, compiled):
        for _ in range(2):
            draw_and_step(opt, batch)  # warnings are errors
    assert_agree(eager, compiled, 0.0)


# ---- rows, taken apart and put together ----


def rows_of_all_kinds():
    left = torch.randn(4, 1, 1, 3)
    strided = torch.randn(3, 4, 2).transpose(0, 1)
    gaps = torch.randn(4, 8)[:, ::2]
    blocks = {
        "w": Outer(left, torch.randn(4, 1, 1, 2)),
        "b": Formed(left.view(4, 3)),  # the same numbers
        "table": Rows(torch.randint(5, (4, 3)), strided.transpose(1, 2).contiguous().view(4, 3, 2), 5),
        "far": Formed(gaps),
        "turned": Rows(torch.randint(5, (4, 3)), strided, 5),
    }
    return RowGroup(4, blocks, {"w": torch.randn(3, 2)}, 2.0)


def test_rows_are_rebuilt_over_copies_that_share_what_was_shared():
    group = rows_of_all_kinds()
    signature, found = leaves_of([group])
    copies = {key: leaf.clone() for key, leaf in found.items()}
    new = rebuilt(group, copies)
    assert (new.num_rows, new.scale) == (4, 2.0)
    for name, block in group.blocks.items():
        assert type(new.blocks[name]) is type(block)
        assert torch.equal(new.blocks[name].form(), block.form())
    assert torch.equal(new.totals["w"], group.totals["w"])
    assert new.blocks["w"].left.data_ptr() == new.blocks["b"].rows.data_ptr() != group.blocks["b"].rows.data_ptr()
    assert len(found) == 8
    for leaf in copies.values():
        leaf.zero_()
    assert not any(bool(block.form().any()) for block in new.blocks.values())
    assert signature == leaves_of([rows_of_all_kinds()])[0]


@pytest.mark.parametrize("change", ["scale", "rows", "dtype", "shared", "layout", "kind", "name", "totals"])
def test_rows_of_another_make_do_not_fit(change):
    def group(change=None):
        left, R = torch.zeros(4, 1, 1, 3), 4
        rows = left.view(4, 3)
        if change == "rows":
            left, R = torch.zeros(5, 1, 1, 3), 5
            rows = left.view(5, 3)
        if change == "dtype":
            left, rows = left.double(), rows.double()
        if change == "shared":
            rows = torch.zeros(4, 3)
        if change == "layout":
            rows = torch.zeros(3, 4).T
        weight = Formed(torch.zeros(R, 6)) if change == "kind" else Outer(left, torch.zeros(R, 1, 1, 2))
        blocks = {"w": weight, "c" if change == "name" else "b": Formed(rows)}
        totals = {"w": torch.zeros(3, 2)} if change == "totals" else {}
        return RowGroup(R, blocks, totals, 2.0 if change == "scale" else 1.0)

    assert leaves_of([group()])[0] == leaves_of([group()])[0]
    assert leaves_of([group()])[0] != leaves_of([group(change)])[0]
    assert leaves_of([group()])[0] != leaves_of([group(), group()])[0]


@pytest.mark.choreography
def test_priors_are_told_apart_while_their_graph_lives(cuda):
    """The key holds the prior's identity, and the graph the prior itself: a freed one cannot be mistaken."""
    eager, replayed, batch = pair()
    for precision in (1.0, 2.0, 4.0, 1.0):
        for opt in (eager, replayed):
            opt.param_groups[0]["prior_precision"] = precision
            for _ in range(3):
                draw_and_step(opt, batch, draws=1)
    assert_agree(eager, replayed)
    assert all(isinstance(graph.prior, Prior) for graph in replayed._graphs.graphs.values())


@pytest.mark.choreography
def test_rows_that_are_too_large_to_be_copied_are_left_where_they_are(cuda, monkeypatch):
    monkeypatch.setattr(_row_leaves, "MOST_BYTES", 100)
    eager, replayed, batch = pair()
    with pytest.warns(
        UserWarning, match="compile=True has no effect on a step like this one: its gradients take"
    ) as caught:
        draw_and_step(replayed, batch)
    assert len(caught) == 1
    for opt, steps in ((replayed, 5), (eager, 6)):
        for _ in range(steps):
            draw_and_step(opt, batch)
    assert_agree(eager, replayed)
    assert not cuda.captured


@pytest.mark.choreography
@pytest.mark.filterwarnings("ignore:compile=True has no effect on a step like this one")
def test_a_large_batch_now_and_then_does_not_stop_the_others_from_being_replayed(cuda, monkeypatch):
    eager, replayed, (x, y) = pair()
    with replayed.sampled_params(train=True):
        F.cross_entropy(replayed.model(x), y).backward()
    monkeypatch.setattr(_row_leaves, "MOST_BYTES", 2 * _row_leaves.bytes_of(leaves_of(replayed._rows)[1]))
    replayed.discard_gradients()
    for opt in (eager, replayed):
        opt.generator.manual_seed(1)
        for k in range(16):
            draw_and_step(opt, (x.repeat(2, 1), y.repeat(2)) if k % 4 == 0 else (x, y))
    assert_agree(eager, replayed)
    assert cuda.captured.count("watch") == 1
    assert cuda.replayed.count("whole") + cuda.replayed.count("watch") > 4


@pytest.mark.choreography
def test_a_state_is_copied_when_it_is_looked_at_and_not_before(cuda):
    opt, batch = optimizer(problem()[0], True, on_divergence="ignore"), problem()[1]
    for _ in range(12):
        draw_and_step(opt, batch)
    latest = opt._graphs._made[1]
    assert latest.tensors is None
    assert torch.equal(opt._state.loc, latest.graph.state[0])
    assert latest.tensors.data_ptr() == opt._state.loc.data_ptr() != latest.graph.state.data_ptr()


@pytest.mark.choreography
@pytest.mark.parametrize("overwrite", ["step", "load"])
def test_a_state_nobody_has_looked_at_is_copied_before_it_is_overwritten(cuda, overwrite):
    model, batch = problem()
    opt = optimizer(model, True, on_divergence="ignore")
    for _ in range(12):
        draw_and_step(opt, batch)
    (graph,), latest = opt._graphs.graphs.values(), opt._graphs._made[1]
    held = graph.state.clone()
    assert latest.tensors is None
    if overwrite == "load":
        graph.load(torch.zeros_like(held))
    else:
        opt._sync = lambda contents=True: None  # which looks at the mean, as does the next
        opt._checked_generator = lambda: opt.generator
        draw_and_step(opt, batch)
    assert not torch.equal(graph.state, held)
    assert torch.equal(latest.kept(), held)


def test_a_copy_that_finds_no_memory_is_tried_again(cuda, monkeypatch):
    model, batch = problem()
    opt = optimizer(model, True, on_divergence="ignore")
    for _ in range(12):
        draw_and_step(opt, batch)
    kept, step = Launched.kept, opt._state.step

    def fails(self):
        monkeypatch.setattr(Launched, "kept", kept)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Launched, "kept", fails)
    with pytest.raises(torch.OutOfMemoryError):
        _ = opt._state.loc
    assert torch.equal(opt._state.loc, flat(model))
    assert opt._state.step == step


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (3, 0, 1), (3, 4, 5)])
def test_rows_that_lie_in_each_others_places_are_not_mixed_up(order):
    memory = torch.arange(6.0)[:, None].repeat(1, 4)
    step = LoopStep.__new__(LoopStep)
    step.places = list(memory[:3])
    step.feed([memory[k] for k in order])
    assert [float(place[0]) for place in step.places] == list(order)


@pytest.mark.choreography
def test_graphs_of_a_loop_are_captured_in_memory_that_was_counted_with_nothing_held(cuda, monkeypatch):
    asked = []

    def reserved(size, pool, device):
        step = sys._getframe(1).f_locals["self"]
        asked.append((size, "observed" in step.__dict__))

    monkeypatch.setattr(graph_capture, "_SMALL", 100)
    monkeypatch.setattr(_graph_pieces, "reserved", reserved)
    opt, batch = optimizer(problem()[0], True, on_divergence="ignore"), problem()[1]
    for _ in range(6):
        draw_and_step(opt, batch)
    ((size, held),) = asked
    (graph,) = opt._graphs.graphs.values()
    assert not held
    assert size > graph.state.nbytes
    assert "observed" in graph.__dict__  # of the last piece that was captured, which the halves of a step share
