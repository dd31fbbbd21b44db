"""Public networks: every contender trains in the user's loop, a failure is recorded, and targets are judged."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import slangvi
from slangvi_reproduction.bench import public_models, public_networks
from slangvi_reproduction.bench._measure import BASELINE
from slangvi_reproduction.bench.limits import Rates
from slangvi_reproduction.bench.public_networks import COMPILED, SLANG, contenders, with_goals
from slangvi_reproduction.bench.record import Row, Settings

LIBRARIES = {
    public_models.MLP: "torch",
    public_models.RESNET: "torchvision",
    public_models.VIT: "torchvision",
    public_models.BERT: "transformers",
    public_models.GPT2: "transformers",
    public_models.GPT2_LORA: "transformers",
}
OURS = [(SLANG, 1, "all"), (SLANG, 8, "all"), (SLANG, 8, 2)]


def by_network(rows):
    return {name: [row for row in rows if row.settings["network"] == name] for name in LIBRARIES}


def mlp_only(monkeypatch):
    """Leave the smallest network alone in the table, and return it."""
    problem = public_models.problems(True, "cpu")[public_models.MLP]
    monkeypatch.setattr(public_models, "problems", lambda quick, device: {public_models.MLP: problem})
    return problem


def measure(monkeypatch):
    mlp_only(monkeypatch)
    return public_networks.rows(Settings(quick=True, repeats=1), Rates(1.0, 1.0))


def test_every_network_has_all_contenders_or_says_which_library_is_missing(quick_run):
    for name, rows in by_network(quick_run("networks").rows).items():
        if find_spec(LIBRARIES[name]) is None:
            assert [(row.name, row.skipped.split(" (")[0]) for row in rows] == [
                (name, f"{LIBRARIES[name]} is not installed")
            ]
        else:
            assert [row.name for row in rows] == [BASELINE, "ivon", "evon", SLANG, SLANG, SLANG]
            assert [(row.name, row.settings["L"], row.settings["K"]) for row in rows[3:]] == OURS


def test_measured_rows_have_finite_losses_and_ratios_to_adam(quick_run):
    measured = [row for row in quick_run("networks").rows if not row.skipped]
    assert {row.name for row in measured} >= {BASELINE, SLANG}
    for row in measured:
        assert math.isfinite(row.loss)
        assert row.ratio > 0
        assert row.ratio == 1 or row.name != BASELINE


def test_memory_grows_with_the_rank_and_p_counts_trainable_parameters(quick_run):
    for name, rows in by_network(quick_run("networks").rows).items():
        if rows[0].name == BASELINE:
            rank_1, rank_8 = (row for row in rows if row.settings.get("K") == "all")
            assert rows[0].peak_mb < rank_1.peak_mb < rank_8.peak_mb
            model = public_models.problems(True, "cpu")[name].model()
            assert {row.settings["P"] for row in rows} == {
                sum(p.numel() for p in model.parameters() if p.requires_grad)
            }


def test_only_adapters_are_trained_and_they_start_at_zero():
    pytest.importorskip("transformers")
    problem = public_models.problems(True, "cpu")[public_models.GPT2_LORA]
    model = problem.model()
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(trained) == 2 * 2 * 2  # layers, projections, matrices
    assert all(".attn." in name and (".down." in name or ".up." in name) for name in trained)
    adapter = model.transformer.h[0].attn.c_attn
    x = torch.randn(3, 16)
    assert torch.equal(adapter(x), adapter.layer(x))
    torch.nn.init.ones_(adapter.up.weight)
    assert not torch.equal(adapter(x), adapter.layer(x))


def test_full_networks_are_those_of_the_text():
    shapes = {name: tuple(problem.x.shape) for name, problem in public_models.problems(False, "cpu").items()}
    assert shapes == {
        public_models.MLP: (200, 784),
        public_models.RESNET: (128, 3, 64, 64),
        public_models.VIT: (64, 3, 64, 64),
        public_models.BERT: (16, 128),
        public_models.GPT2: (8, 256),
        public_models.GPT2_LORA: (8, 256),
    }


@pytest.mark.parametrize("quick", [True, False])
def test_slang_gets_the_options_of_its_row(quick, monkeypatch):
    seen = []

    def spy(model, **options):
        seen.append(options)
        return torch.optim.SGD(model.parameters())

    problem = mlp_only(monkeypatch)
    monkeypatch.setattr(slangvi, "SLANG", spy)
    entries = contenders(problem, {"network": public_models.MLP}, Settings("cuda", quick), {})
    some = [{"curvature_rows": 2}] if quick else []  # 16 are more than the batch has
    assert [entry.name for entry in entries[3:]] == [SLANG, SLANG, *(SLANG for _ in some), COMPILED]
    others = contenders(problem, {"network": public_models.BERT}, Settings("cuda", quick), {})
    assert COMPILED not in [entry.name for entry in others]
    for entry in entries[3:]:
        entry.make()
    shared = {"num_data": 60_000, "lr": 1e-3, "init_precision": 1e4, "on_divergence": "ignore"}
    assert seen == [
        {**shared, "rank": 1},
        {**shared, "rank": 8},
        *({**shared, "rank": 8, **options} for options in some),
        {**shared, "rank": 8, "compile": True},
    ]


def test_a_contender_that_fails_is_recorded_with_its_message(monkeypatch):
    def refuse(model, **options):
        raise TypeError("unexpected keyword curvature_rows")

    monkeypatch.setattr(slangvi, "SLANG", refuse)
    rows = measure(monkeypatch)
    assert [row.skipped for row in rows if row.name == SLANG] == ["TypeError: unexpected keyword curvature_rows"] * 3
    assert rows[0].ratio == 1


def test_a_contender_whose_loss_is_not_finite_has_failed(monkeypatch):
    def exploding(model, num_data, **options):
        return torch.optim.SGD(model.parameters(), lr=math.inf)

    monkeypatch.setattr(public_networks, "_slang", exploding)
    rows = measure(monkeypatch)
    for row in rows[3:]:
        assert (row.skipped, row.milliseconds, row.loss) == ("the loss became nan", None, None)


def test_a_network_that_fails_leaves_the_others(monkeypatch):
    problem = mlp_only(monkeypatch)

    def broken():
        raise RuntimeError("operator torchvision::nms\n does not exist")

    both = {public_models.RESNET: replace(problem, build=broken), public_models.MLP: problem}
    monkeypatch.setattr(public_models, "problems", lambda quick, device: both)
    rows = public_networks.rows(Settings(quick=True, repeats=1), Rates(1.0, 1.0))
    assert (rows[0].name, rows[0].skipped) == ("ResNet-18", "RuntimeError: operator torchvision::nms does not exist")
    assert rows[1].ratio == 1


def test_convolutions_run_without_tf32_and_the_flag_is_put_back(monkeypatch):
    seen = []
    before = torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(public_models, "problems", lambda *args: seen.append(torch.backends.cudnn.allow_tf32) or {})
    assert public_networks.rows(Settings(quick=True), Rates(1.0, 1.0)) == []
    assert seen == [False]
    assert torch.backends.cudnn.allow_tf32 == before


# ---- targets ----


def slang_row(K: int | str, ratio: float, peak_mb: float, name: str = SLANG, L: int = 8) -> Row:
    labels: dict[str, int | str] = {"network": public_models.MLP, "P": 1_000_000, "L": L, "K": K}
    return Row(name, labels, milliseconds=1.0, ratio=ratio, peak_mb=peak_mb)


ADAM = Row(BASELINE, {"network": public_models.MLP, "P": 1_000_000}, milliseconds=1.0, ratio=1.0, peak_mb=60.0)


@pytest.mark.parametrize(
    ("row", "target", "met", "bound"),
    [
        (slang_row(16, 3.5, 114.9), "✓ ≤ 3.5 × Adam, ✓ peak ≤ bound", True, 115.0),
        (slang_row(16, 3.6, 115.1), "✗ ≤ 3.5 × Adam, ✗ peak ≤ bound", False, 115.0),
        (slang_row("all", 4.9, 99.0), "✓ ≤ 5 × Adam, ✓ peak ≤ bound", True, 115.0),
        (slang_row("all", 9.0, 82.0, L=1), "✓ peak ≤ bound", True, 82.8),
        (slang_row("all", 9.0, 116.0, COMPILED), "✗ peak ≤ bound", False, 115.0),
    ],
)
def test_time_is_judged_at_rank_eight_and_memory_in_every_row(row, target, met, bound):
    adam, judged = with_goals([ADAM, row])
    assert adam == ADAM
    assert (judged.target, judged.met) == (target, met)
    assert judged.bound_mb == pytest.approx(bound)


def test_without_adam_no_time_is_met_and_there_is_no_bound():
    (row,) = with_goals([replace(slang_row(16, 1.0, 1.0), ratio=None)])
    assert (row.target, row.met, row.bound_mb) == ("✗ ≤ 3.5 × Adam", False, None)


def test_every_network_has_targets_and_skipped_rows_are_not_judged():
    assert public_networks.RATIOS.keys() == public_models.problems(True, "cpu").keys()
    skipped = Row(SLANG, {"network": public_models.MLP, "P": 1, "L": 8, "K": 16}, skipped="out of memory")
    assert with_goals([ADAM, skipped]) == [ADAM, skipped]
