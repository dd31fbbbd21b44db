"""The report: one HTML page without scripts or other files, in which all that comes from the data is escaped."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import torch

from slangvi import plots
from slangvi.errors import DataError
from slangvi.tabular.cells import digits, number_of, readable
from slangvi.tabular.model import LEVELS, Classes, Model, Numbers

__all__ = ["page"]

_WORDS = {"nll": "NLL (nats)", "rmse": "RMSE", "accuracy": "Accuracy", "ece": "Calibration error"}
_MOST_CLASSES = 20
_COLUMNS = 6
_BLUE, _GREY, _RED = "#2563a8", "0.6", "#c0392b"
_STYLE = """
:root{color-scheme:light}*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:#1c2430;background:#f5f6f8;margin:0}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.7rem;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:40px 0 8px}
h3{font-size:1rem;margin:0 0 4px}p{margin:4px 0 12px;max-width:75ch}.sub,.card p{color:#5a6472}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin:20px 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px}
.card{background:#fff;border:1px solid #e1e5ea;border-radius:8px;padding:14px 18px}
.card b{display:block;font-size:1.6rem;font-weight:600}.card p{font-size:.88rem;margin:0}
.plots p{margin-bottom:8px}img{width:100%;max-width:520px;height:auto;display:block;margin:0 auto}
.wide{overflow-x:auto;background:#fff;border:1px solid #e1e5ea;border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{padding:6px 12px;text-align:left;border-bottom:1px solid #eceff3;max-width:22em;overflow-wrap:anywhere}
th{background:#f0f3f6;font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:not(.n),th:not(.n){min-width:9.5em}
tr:last-child td{border-bottom:0}td.hit{background:#dcebf9;font-weight:600}td.miss{background:#fbe9e7}
@media print{body{background:#fff}.card,.wide{break-inside:avoid}}
"""


class _Html(str):
    """Text that is HTML already; all other text is escaped when it is put into a page."""


def page(model: Model) -> str:
    """Return the report of a model, or raise a `DataError` if the record in its folder cannot be understood."""
    try:
        kept = {name: np.asarray(values) for name, values in model.record["held_out"].items()}
        y = kept.pop("target")
        held = Numbers(**kept) if model.target.task == "regression" else Classes(**kept)
        body = [_head(model), _cards(model), _plots(model, held, y), _detail(model, held, y), _uncertain(model)]
        body += [_diagnosis(model), _inputs(model), _settings(model)]
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise DataError(f"the record of the model cannot be understood ({error}). Run slangvi fit again.") from error
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(model.target.name)}: report</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(model: Model) -> str:
    record, target = model.record, model.target
    told = f"Classification, {target.outputs} classes," if target.classes else "Regression"
    return (
        f"<h1>{escape(target.name)}</h1>"
        f'<p class="sub">{told} from {escape(str(record["data"]))}: '
        f"{int(record['rows']):,} rows, {len(model.schema.columns)} columns. Scores and pictures are of "
        f"{int(record['held_out_rows']):,} rows that were held out.</p>"
    )


def _cards(model: Model) -> str:
    ours, plain = model.record["scores"]["model"], model.record["scores"]["baseline"]
    kind = "mean alone" if model.target.task == "regression" else "class frequencies"
    cards = [
        f'<div class="card"><p>{_WORDS[name]}</p><b>{readable(value)}</b><p>{kind}: {readable(plain[name])}</p></div>'
        for name, value in ours.items()
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _detail(model: Model, held: Numbers | Classes, y: Any) -> str:
    """Return a table of the intervals of a regression, or of the confusions of classes."""
    if isinstance(held, Numbers):
        header = ["level", *(f"{level:.0%}" for level in LEVELS)]
        row = ["held-out targets inside", *(f"{share:.0%}" for share in held.coverages(y))]
        return f"<h2>Intervals</h2>{_table(header, [row], numeric=range(1, len(row)))}"
    classes = model.target.classes
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (y, held.probs.argmax(1)), 1)
    if len(classes) > _MOST_CLASSES:
        pairs = sorted((-counts[a, b], a, b) for a in range(len(classes)) for b in range(len(classes)) if a != b)[:20]
        rows = [[classes[a], classes[b], str(-count)] for count, a, b in pairs if count]
        return f"<h2>Commonest confusions</h2>{_table(['observed', 'predicted', 'rows'], rows, numeric=(2,))}"
    lines = []
    for a, label in enumerate(classes):
        kinds = ["hit" if a == b else "miss" if count else "" for b, count in enumerate(counts[a])]
        cells = [_Html(f'<td class="n {kind}">{count}</td>') for kind, count in zip(kinds, counts[a], strict=True)]
        lines.append([label, *cells])
    header = ["observed ↓ predicted →", *classes]
    return f"<h2>Confusion</h2>{_table(header, lines, numeric=range(1, len(header)))}"


def _uncertain(model: Model) -> str:
    shown = model.record["most_uncertain"]
    columns = [column for column in model.schema.columns if shown and column.name in shown[0]["cells"]][:_COLUMNS]
    names = [column.name for column in columns]
    regression = model.target.task == "regression"
    rows = []
    for row in shown:
        if regression:
            mean, std = row["mean"], row["std"]
            # Four digits, unless they would hide what a small standard deviation tells: 2024.3712 ± 0.2.
            enough = std >= 1e-3 * abs(mean)
            said = [readable(mean) if enough else f"{mean:.{digits(mean, std)}g}", readable(std)]
        else:
            said = [row["class"], f"{row['probability']:.2f}"]
        cells = [_shortened(row["cells"].get(name, "")) for name in names]
        rows.append([str(row["line"]), row["target"], *said, f"{row['epistemic_share']:.0%}", *cells])
    header = ["line", "observed", "predicted", "± std" if regression else "probability", "epistemic share", *names]
    about = (
        "Held-out rows with the widest predictions. A high epistemic share says that more rows like these would help."
    )
    numeric = [*(range(5) if regression else (0, 3, 4))]
    numeric += [k for k, column in enumerate(columns, 5) if column.kind == "numeric"]
    return f"<h2>Most uncertain rows</h2><p>{about}</p>{_table(header, rows, numeric)}"


def _diagnosis(model: Model) -> str:
    """Return what was found about the posterior, warnings first; nothing for folders of versions that did not look."""
    told = model.record.get("diagnosis")
    if told is None:
        return ""
    findings = sorted(told["findings"], key=lambda each: ("warning", "note", "ok").index(each["level"]))
    rows = [[each["level"], each["name"], each["sentence"], each["remedy"]] for each in findings]
    table = _table(["", "looked at", "found", "what to do"], rows)
    header, *layers = told["table"]
    by_layer = _table(header, layers, numeric=range(1, len(header)))
    return f"<h2>Diagnosis</h2><p>{escape(' '.join(told['summary']))}</p>{table}<h2>Posterior by layer</h2>{by_layer}"


def _inputs(model: Model) -> str:
    rows = [
        [column.name, column.kind, str(column.features), model.schema.notes.get(column.name, "")]
        for column in model.schema.columns
    ]
    rows += [[name, "not used", "0", why] for name, why in model.schema.dropped.items()]
    return f"<h2>Columns</h2>{_table(['column', 'kind', 'numbers', 'note'], rows, numeric=(2,))}"


def _settings(model: Model) -> str:
    record = model.record
    fitted = "all rows" if record["settings"]["refit"] else "four fifths of the rows"
    rows = [["task", f"{model.target.task}: {model.target.why}"], ["fitted on", fitted]]
    rows.append(["weights", f"{len(model.posterior.loc):,}"])
    if model.target.task == "regression":
        rows.append(["noise (standard deviation)", readable(model.noise)])
    for key, value in {**record["settings"], **record["environment"]}.items():
        text = ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
        rows.append([key, "found" if value is None else text])
    return f"<h2>Settings and versions</h2>{_table(['setting', 'value'], rows)}"


def _shortened(cell: str) -> str:
    """Return a cell with four digits of its number; whole numbers such as years keep theirs."""
    value = number_of(cell)
    return cell if value is None or value == round(value) else readable(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    right = set(numeric)

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="n"' if k in right else "" for k in range(len(row))]
        texts = zip(kinds, row, strict=True)
        return "".join(x if isinstance(x, _Html) else f"<{tag}{kind}>{escape(x)}</{tag}>" for kind, x in texts)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", header)}</tr>{body}</table></div>'


def _plots(model: Model, held: Numbers | Classes, y: Any) -> str:
    """Return pictures with titles and meanings; no text of the data is drawn, so that none can spoil them."""
    drawn: list[tuple[str, str, Callable[[Any], object]]]
    if isinstance(held, Classes):
        probs, labels = torch.from_numpy(held.probs), torch.from_numpy(y)
        drawn = [
            (
                "Calibration",
                "Share of right predictions among those with the same confidence. On the diagonal a prediction is as "
                "good as it says; below it, the model is too sure.",
                lambda ax: plots.reliability_diagram(probs, labels, bins=10, ax=ax),
            ),
            (
                "Error if unsure rows are set aside",
                "Rows are answered from the surest on. A curve that rises to the right says that confidence tells good "
                "predictions from bad ones.",
                lambda ax: plots.risk_coverage_curve(probs, labels, ax=ax),
            ),
        ]
    else:
        drawn = [
            (
                "Calibration",
                "Share of held-out targets inside intervals of each level. Below the diagonal they are too narrow, "
                "above it too wide.",
                lambda ax: _calibration(ax, held, y),
            ),
            (
                "Predicted and observed",
                "Each point is a held-out row; on the line the prediction is right. Bars are one standard deviation.",
                lambda ax: _scatter(ax, held, y),
            ),
            (
                "Residuals",
                "(Observed − predicted) / predicted standard deviation. They should look like the standard normal "
                "curve; what lies far outside was a surprise.",
                lambda ax: _residuals(ax, held, y),
            ),
        ]
    drawn += [
        (
            "Posterior spectrum",
            "Directions of the weights that the data determine best: eigenvalues of the low-rank part of the posterior "
            "precision, beside the precision of the prior.",
            lambda ax: _spectrum(ax, model),
        ),
        (
            "Uncertainty of the weights",
            "Posterior standard deviation of every weight. Weights at the prior's value were not touched by the data.",
            lambda ax: _weights(ax, model),
        ),
    ]
    cards = [
        f'<div class="card"><h3>{title}</h3><p>{escape(about)}</p><img alt="{title}" src="data:image/png;base64,'
        f'{base64.b64encode(_png(draw)).decode()}"></div>'
        for title, about, draw in drawn
    ]
    is_part = len(y) < model.record["held_out_rows"]
    note = f"<p>The pictures show {len(y):,} of the held-out rows.</p>" if is_part else ""
    return f'<h2>Pictures</h2>{note}<div class="plots">{"".join(cards)}</div>'


def _png(draw: Callable[[Any], object]) -> bytes:
    """Draw a picture without pyplot, which keeps figures and may open windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    draw(ax)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=170)
    return file.getvalue()


def _calibration(ax: Any, held: Numbers, y: Any) -> None:
    ax.plot([0, 1], [0, 1], color=_GREY, lw=1, ls="--", zorder=0)
    ax.plot(LEVELS, held.coverages(y), marker="o", ms=4, lw=1.3, color=_BLUE)
    ax.set(xlabel="level of the interval", ylabel="share inside", xlim=(0, 1), ylim=(0, 1), aspect="equal")


def _scatter(ax: Any, held: Numbers, y: Any) -> None:
    ends = [float(min(y.min(), held.mean.min())), float(max(y.max(), held.mean.max()))]
    ax.plot(ends, ends, color=_GREY, lw=1, ls="--", zorder=0)
    alpha = float(np.clip(60 / len(y), 0.05, 0.7))
    ax.errorbar(held.mean, y, xerr=held.std, fmt="o", ms=3, lw=0.6, color=_BLUE, alpha=alpha)
    ax.set(xlabel="predicted", ylabel="observed")
    ax.locator_params(axis="x", nbins=4)  # labels of prices are wide


def _residuals(ax: Any, held: Numbers, y: Any) -> None:
    z = (y - held.mean) / held.std
    ends = max(4.0, float(np.abs(z).max()))
    ax.hist(z, bins=max(20, min(60, len(z) // 8)), range=(-ends, ends), density=True, color=_BLUE, alpha=0.6)
    grid = np.linspace(-ends, ends, 300)
    ax.plot(grid, np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi), color=_RED, lw=1.3, label="standard normal")
    ax.set(xlabel="residual in standard deviations", ylabel="density")
    ax.legend(fontsize=8, frameon=False)


def _spectrum(ax: Any, model: Model) -> None:
    values = torch.linalg.svdvals(model.posterior.prec_factor).square().numpy()
    values = values[values > 0]
    ax.bar(range(1, len(values) + 1), values, color=_BLUE, width=0.6)
    ax.axhline(_prior(model), color=_RED, lw=1.3, label="prior precision")
    ax.set(xlabel="direction", ylabel="precision", yscale="log")
    ax.set_xticks(range(1, len(values) + 1) if len(values) <= 20 else [1, len(values)])
    ax.legend(fontsize=8, frameon=False)


def _weights(ax: Any, model: Model) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    std = model.posterior.variance.sqrt().numpy()
    prior = _prior(model) ** -0.5
    low, high = min(float(std.min()), prior), max(float(std.max()), prior)
    bins = np.geomspace(low * 0.9, high * 1.1, 40)
    ax.hist(std, bins=bins, color=_BLUE, alpha=0.6)
    ax.axvline(prior, color=_RED, lw=1.3, label="prior")
    ax.set(xlabel="standard deviation", ylabel="weights", xscale="log", yscale="log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.legend(fontsize=8, frameon=False)


def _prior(model: Model) -> float:
    return float(model.record["settings"]["prior_precision"])
