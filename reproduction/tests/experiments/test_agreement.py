"""Agreement with the paper, by the rules the page states."""

from __future__ import annotations

import pytest

from slangvi_reproduction.experiments._agreement import judge, orders, summary
from slangvi_reproduction.experiments.paper import Printed, learning_rates, printed
from slangvi_reproduction.experiments.results import Row


def row(dataset: str, metric: str, method: str, mean: float) -> Row:
    return Row(dataset, metric, method, mean, 0.0, mean, mean, 1)


def verdict(dataset: str, method: str, mean: float, paper: Printed, metric: str = "symmetric_kl"):
    return judge([row(dataset, metric, method, mean)], {(dataset, metric, method): paper})[0]


@pytest.mark.parametrize(
    ("mean", "paper", "agrees"),
    [
        (1.019, Printed(1.0, 0.0, 1e-4), True),  # 2 %
        (0.979, Printed(1.0, 0.0, 1e-4), False),
        (1.1, Printed(1.0, 0.11, 1e-4), True),  # a standard error
        (1.12, Printed(1.0, 0.11, 1e-4), False),
        (0.014, Printed(0.01, 0.0, 0.01), True),  # half a unit
        (0.016, Printed(0.01, None, 0.01), False),
        (0.4, Printed(0.0, 0.0, 1.0), True),
    ],
)
def test_two_percent_or_a_standard_error_or_half_a_unit(mean, paper, agrees):
    assert verdict("australian", "slang_1", mean, paper).agrees is agrees


def test_what_had_not_converged_is_not_judged():
    assert verdict("a1a", "mf_ef", 100.0, Printed(259.0, 0.0, 0.01)).agrees is None
    assert verdict("a1a", "mf_exact", 100.0, Printed(259.0, 0.0, 0.01)).agrees is False


@pytest.mark.parametrize(("ours", "agrees"), [(0.114, True), (0.116, False)])
def test_usps_is_compared_by_distance_to_the_exact_answer(ours, agrees):
    metric = "negative_elbo_per_example"
    rows = [row("usps_3vs5", metric, "full_exact", 0.0), row("usps_3vs5", metric, "slang_1", ours)]
    paper = {(*r[:2], r.method): Printed(mean, 0.5, 1e-4) for r, mean in zip(rows, (0.5, 0.6), strict=True)}
    exact, slang = judge(rows, paper)
    assert slang.is_distance
    assert (slang.ours, slang.theirs) == pytest.approx((ours, 0.1))
    assert slang.agrees is agrees
    assert (exact.is_distance, exact.agrees, exact.why) == (True, None, "zero by definition")


def test_what_is_zero_by_definition_does_not_count_as_agreement():
    assert verdict("a1a", "full_exact", 0.0, Printed(0.0, 0.0, 0.01)).agrees is None
    assert summary([verdict("a1a", "full_exact", 0.0, Printed(0.0, 0.0, 0.01))]) == ["a1a: 0 of 0 numbers agree."]
    assert verdict("a1a", "full_exact", 0.3, Printed(0.3, 0.0, 1e-4), "test_nll_nats").agrees is True


def test_divergences_on_usps_are_their_own_distance():
    assert verdict("usps_3vs5", "slang_1", 1.14, Printed(1.0, 0.0, 1e-3)).agrees is True
    assert verdict("usps_3vs5", "slang_1", 1.16, Printed(1.0, 5.0, 1e-3)).agrees is False


def test_rows_the_paper_does_not_have_are_left_out():
    assert judge([row("a1a", "symmetric_kl", "slang_3", 1.0)], printed("logreg")) == []


def test_orders_are_said_as_they_are():
    rows = [
        row("a1a", "symmetric_kl", method, kl)
        for method, kl in (("mf_ef", 9.0), ("mf_exact", 5.0), ("slang_1", 4.0), ("slang_10", 2.0), ("slang_2", 3.0))
    ]
    falls, beats = orders(rows)
    assert falls == "a1a: SLANG's KL falls with every step of L: 4 (L = 1), 3 (L = 2), 2 (L = 10)."
    assert beats == "a1a: the KL of slang_1, 4, is below that of the best mean-field method, 5 (mf_exact)."
    other = [
        row("a1a", "symmetric_kl", method, kl) for method, kl in (("mf_ef", 1.0), ("slang_1", 4.0), ("slang_2", 5.0))
    ]
    falls, beats = orders(other)
    assert "does not fall" in falls
    assert "is not below" in beats


def test_the_papers_tables_are_whole():
    table = printed("logreg")
    assert len(table) == 4 * 3 * 10
    assert table["breast_cancer", "symmetric_kl", "full_hess"] == Printed(0.0017, 0.0003, 1e-4)
    assert all(number.standard_error is not None for number in table.values())
    assert len(printed("logreg_online_eig")) == 4 * 3 * 3
    assert printed("logreg_online_eig")["a1a", "symmetric_kl", "online_eig_5"].standard_error is None
    assert printed("logreg_covariance")["australian", "bias_variance", "full_exact"].mean == 56.93
    assert len(learning_rates()) == 3 * 8


def test_other_data_without_the_exact_answer_are_not_judged():
    found = verdict("usps_3vs5", "slang_1", 0.2, Printed(0.3, None, 1e-3), metric="test_nll_nats")
    assert (found.agrees, found.why) == (None, "other data")


def test_the_summary_counts_and_names_what_is_apart():
    rows = [row("a1a", "symmetric_kl", method, mean) for method, mean in (("slang_1", 1.0), ("slang_2", 2.0))]
    paper = {r[:3]: Printed(1.0, 0.0, 1e-4) for r in rows} | {("a1a", "symmetric_kl", "mf_ef"): Printed(1.0, 0.0, 1e-4)}
    verdicts = judge([*rows, row("a1a", "symmetric_kl", "mf_ef", 5.0)], paper)
    assert summary(verdicts) == ["a1a: 1 of 2 numbers agree. Not: KL of slang_2."]
    others = [row("usps_3vs5", "symmetric_kl", f"slang_{rank}", 1.0) for rank in (1, 2)]
    (told,) = summary(judge(others, {r[:3]: Printed(9.0, 0.0, 1e-4) for r in others}))
    assert told == "USPS 3 vs 5: 0 of 2 numbers agree. Not: KL of slang_1, slang_2."
