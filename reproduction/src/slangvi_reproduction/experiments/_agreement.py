"""Whether our numbers agree with the paper's, and whether the orders it reports hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from slangvi_reproduction.experiments._names import DATASETS, METRICS
from slangvi_reproduction.experiments.paper import Printed
from slangvi_reproduction.experiments.results import Row

__all__ = ["Verdict", "judge", "orders", "summary"]

# Another copy of the data: only distances to the exact answer can be compared.
RESAMPLED = "usps_3vs5"
REFERENCE = "full_exact"
SELF = "zero by definition"
# The paper's own runs had not come to rest on these: (dataset, method).
UNCONVERGED = {(dataset, method) for dataset in ("australian", "a1a") for method in ("mf_ef", "mf_hess")}
MEAN_FIELD = ("mf_ef", "mf_hess", "mf_exact")


class Verdict(NamedTuple):
    """Our number beside the paper's.

    Args:
        row: ours.
        paper: theirs.
        ours: what is compared: the mean, or its distance to the exact answer.
        theirs: the same of the paper.
        agrees: None where the paper's number is not one to agree with.
        why: it is not, then.
    """

    row: Row
    paper: Printed
    ours: float
    theirs: float
    agrees: bool | None
    why: str = ""

    @property
    def is_distance(self) -> bool:
        """Whether distances are compared and not the values themselves."""
        return self.ours != self.row.mean or self.theirs != self.paper.mean


def judge(rows: Sequence[Row], paper: Mapping[tuple[str, str, str], Printed]) -> list[Verdict]:
    """Compare all rows that the paper has.

    Args:
        rows: ours; for distances the row of the exact answer must be among them.
        paper: what is printed.
    """
    ours = {row[:3]: row for row in rows}
    return [_verdict(row, ours, paper) for key, row in ours.items() if key in paper]


def _verdict(
    row: Row, rows: Mapping[tuple[str, str, str], Row], paper: Mapping[tuple[str, str, str], Printed]
) -> Verdict:
    there = paper[row[:3]]
    origin = (row.dataset, row.metric, REFERENCE)
    if row.dataset == RESAMPLED and row.metric != "symmetric_kl" and origin in rows and origin in paper:
        ours, theirs = row.mean - rows[origin].mean, there.mean - paper[origin].mean
        if row.method == REFERENCE:
            return Verdict(row, there, ours, theirs, None, SELF)
        return Verdict(row, there, ours, theirs, abs(ours - theirs) <= max(0.15 * abs(theirs), there.unit))
    if row.dataset == RESAMPLED and row.metric != "symmetric_kl":
        return Verdict(row, there, row.mean, there.mean, None, "other data")
    if (row.metric, row.method) == ("symmetric_kl", REFERENCE):
        return Verdict(row, there, row.mean, there.mean, None, SELF)
    share = 0.15 if row.dataset == RESAMPLED else 0.02
    allowed = max(share * abs(there.mean), there.unit / 2)
    if row.dataset != RESAMPLED:
        allowed = max(allowed, there.standard_error or 0.0)
    if (row.dataset, row.method) in UNCONVERGED:
        return Verdict(row, there, row.mean, there.mean, None, "not converged in the paper")
    return Verdict(row, there, row.mean, there.mean, abs(row.mean - there.mean) <= allowed)


def summary(verdicts: Sequence[Verdict]) -> list[str]:
    """A sentence for each data set: how many numbers agree, and which do not."""
    found = []
    for dataset in dict.fromkeys(verdict.row.dataset for verdict in verdicts):
        judged = [v for v in verdicts if v.row.dataset == dataset and v.agrees is not None]
        apart = [v.row for v in judged if not v.agrees]
        methods = {
            metric: [row.method for row in apart if row.metric == metric] for metric in (r.metric for r in apart)
        }
        rest = "; ".join(f"{METRICS[metric]} of {', '.join(names)}" for metric, names in methods.items())
        counts = f"{DATASETS[dataset]}: {len(judged) - len(apart)} of {len(judged)} numbers agree."
        found.append(f"{counts} Not: {rest}." if apart else counts)
    return found


def orders(rows: Sequence[Row]) -> list[str]:
    """Sentences on the orders that the paper reports for the divergence: one for each data set and claim."""
    found = []
    for dataset in dict.fromkeys(row.dataset for row in rows):
        kl = {row.method: row.mean for row in rows if (row.dataset, row.metric) == (dataset, "symmetric_kl")}
        ranks = [(int(method.removeprefix("slang_")), value) for method, value in kl.items() if method[:6] == "slang_"]
        if len(ranks) > 1:
            ranks.sort()
            falls = all(before[1] > after[1] for before, after in pairwise(ranks))
            values = ", ".join(f"{value:.4g} (L = {rank})" for rank, value in ranks)
            said = "falls with every step of L" if falls else "does not fall with every step of L"
            found.append(f"{DATASETS[dataset]}: SLANG's KL {said}: {values}.")
        others = {method: kl[method] for method in MEAN_FIELD if method in kl}
        if others and "slang_1" in kl:
            best = min(others, key=lambda method: others[method])
            wins = "below" if kl["slang_1"] < others[best] else "not below"
            found.append(
                f"{DATASETS[dataset]}: the KL of slang_1, {kl['slang_1']:.4g}, is {wins} that of the best mean-field "
                f"method, {others[best]:.4g} ({best})."
            )
    return found
