"""Pictures: that they show the numbers of the metrics, on the axes they are given."""

from __future__ import annotations

import builtins
import math

import pytest
import torch

from slangvi import metrics, plots


@pytest.fixture(autouse=True)
def _closed():
    import matplotlib as mpl

    mpl.use("agg")
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.fixture
def predictions(generator):
    probs = torch.randn(60, 4, generator=generator).mul(2).softmax(-1)
    return probs, torch.randint(4, (60,), generator=generator)


IMAGES = torch.arange(60.0)[:, None, None].expand(60, 2, 3)
DRAWN = {
    "reliability_diagram": plots.reliability_diagram,
    "confidence_histogram": plots.confidence_histogram,
    "risk_coverage_curve": plots.risk_coverage_curve,
    "entropy_histograms": lambda probs, labels, **ax: plots.entropy_histograms({"a": probs, "b": probs[:9]}, **ax),
    "most_uncertain": lambda probs, labels, **ax: plots.most_uncertain(IMAGES, probs, labels, **ax),
}


def test_every_picture_is_tested():
    assert set(DRAWN) == set(plots.__all__)


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_draws_on_given_axes_or_on_new_ones_and_returns_them(draw, predictions, tmp_path):
    import matplotlib.pyplot as plt

    given = plt.subplots()[1]
    assert draw(*predictions, ax=given) is given
    new = draw(*predictions)
    assert new is not given
    new.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_without_matplotlib_the_extra_is_named(draw, predictions, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pictures need matplotlib: pip install 'slangvi\[plot\]'"):
        draw(*predictions)


def test_reliability_diagram_shows_the_bins_somebody_is_in(predictions):
    line = plots.reliability_diagram(*predictions, bins=10, label="net").lines[-1]
    found = metrics.reliability(*predictions, bins=10)
    there = found.size > 0
    assert line.get_xdata() == pytest.approx(found.confidence[there].tolist())
    assert line.get_ydata() == pytest.approx(found.accuracy[there].tolist())
    assert line.axes.get_legend().get_texts()[0].get_text() == "net"


def test_confidence_histogram_shows_shares_and_marks_confidence_and_accuracy(predictions):
    probs, labels = predictions
    axes = plots.confidence_histogram(probs, labels, bins=5)
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1.0)
    marks = [line.get_xdata()[0] for line in axes.lines]
    assert marks == pytest.approx([float(probs.max(-1).values.mean()), metrics.accuracy(probs, labels)])


def test_risk_coverage_curve_shows_the_curve(predictions):
    doubt = metrics.predictive_entropy(predictions[0])
    line = plots.risk_coverage_curve(*predictions, doubt).lines[0]
    assert line.get_ydata() == pytest.approx(metrics.risk_coverage(*predictions, doubt).risk.tolist())


def test_entropy_histograms_reach_from_certain_to_undecided(predictions):
    axes = plots.entropy_histograms({"known": predictions[0], "strange": torch.full((5, 4), 0.25)}, bins=10)
    assert axes.get_xlim() == pytest.approx((0.0, math.log(4)))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["known", "strange"]
    heights = [bar.get_height() for bar in axes.patches[10:]]
    assert heights == pytest.approx([0.0] * 9 + [10 / math.log(4)])


@pytest.mark.parametrize("classes", [1, 7, 47])
def test_entropy_histograms_hold_predictions_that_rounding_puts_beyond_the_last_bin(classes):
    axes = plots.entropy_histograms({"even": torch.full((5, classes), 1 / classes)})
    assert sum(bar.get_height() * bar.get_width() for bar in axes.patches) == pytest.approx(1.0)


def test_confidence_histogram_holds_probabilities_that_rounding_puts_above_one():
    axes = plots.confidence_histogram(torch.tensor([[1.00001, 0.0], [0.5, 0.5]]), torch.tensor([0, 1]))
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1.0)


@pytest.mark.parametrize("probs", [{}, {"a": torch.ones(2, 3) / 3, "b": torch.ones(2, 4) / 4}])
def test_entropy_histograms_refuse_sets_that_cannot_be_compared(probs):
    with pytest.raises(ValueError, match=r"probs must be one or more of \(n, C\) with the same C, got"):
        plots.entropy_histograms(probs)


def test_most_uncertain_are_in_order_with_predictions_and_truth():
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7], [1.0, 0.0]])
    images = torch.arange(4.0)[:, None, None].expand(4, 2, 2)
    axes = plots.most_uncertain(images, probs, torch.tensor([0, 0, 0, 1]), count=3)
    shown = axes.images[0].get_array()
    assert shown.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert [text.get_text() for text in axes.texts] == ["0 (0)", "1 (0)", "0 (0)"]
    assert [text.get_color() for text in axes.texts] == ["lightgreen", "tomato", "lightgreen"]
    assert [text.get_text() for text in plots.most_uncertain(images, probs, count=1).texts] == ["0"]


def test_most_uncertain_refuses_images_that_are_not_of_the_predictions():
    with pytest.raises(ValueError, match=r"images must be \(n, height, width\) and probs \(n, C\) with the same n"):
        plots.most_uncertain(torch.zeros(3, 2, 2), torch.ones(4, 2) / 2)
