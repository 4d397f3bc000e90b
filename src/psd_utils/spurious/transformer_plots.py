"""Figures of the transformer's runs.

In: tidy tables of transformer_runs. Out: matplotlib Figures, drawn without pyplot. Thick lines are means over seeds,
thin ones the seeds.
"""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psd_utils.spurious.plots import PALETTE, POPULATIONS, panels
from psd_utils.spurious.transformer_findings import mean_run, summary
from psd_utils.spurious.transformer_runs import CONDITIONS

STEP = "injection step"
STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (6, 2)), (0, (1, 1)))
EDIT_LABELS = {
    "trained": "as trained",
    "without_top_1": "without the top direction",
    "without_top_4": "without the top 4",
    "without_random_1": "without a random direction",
    "only_top_4": "the top 4 alone",
}


def acts(runs: pd.DataFrame, conditions: Sequence[str]) -> Figure:
    """Recall of A, B and the new people along the injection, a panel for each condition."""
    figure, grid = panels(len(conditions), width=4.6)
    labels = {"A": "A, old people in X", "B": "B, old people in Y", "new": "new people"}
    for axes, name in zip(grid, conditions, strict=True):
        for population, (color, style) in POPULATIONS.items():
            _seeds(axes, runs, name, f"recall_{population}", color, style, labels[population])
        _recall_axis(axes)
        axes.set_title(_label(name), loc="left")
        axes.set_xlabel(STEP)
    grid[0].legend(fontsize=8, loc="center right")
    return figure


def shifts(runs: pd.DataFrame, conditions: Sequence[str]) -> Figure:
    """Size of the common shift, its content from X to Y, and the individual drift, of some conditions."""
    figure, grid = panels(3, width=4.6)
    columns = (
        ("shift", "Common shift ‖δ‖ of the states"),
        ("content", "Its content from X to Y, ⟨δ, w⟩"),
        ("drift", "Individual drift, rms ‖ε_a‖"),
    )
    for axes, (column, title) in zip(grid, columns, strict=True):
        for i, name in enumerate(conditions):
            _seeds(axes, runs, name, column, PALETTE[i], STYLES[i], _label(name))
        axes.set_title(title, loc="left")
        axes.set_ylabel("length (units of the state)")
        axes.set_xlabel(STEP)
        axes.axhline(0, color="0.5", linewidth=0.8)
    grid[0].legend(fontsize=8)
    return figure


def readouts(runs: pd.DataFrame, condition: str = "B_prime") -> Figure:
    """A under the four readouts: recall, and rank of the answer within its own region."""
    figure, (left, right) = panels(2)
    names = {
        "common_removed": "common part removed",
        "common_only": "common part only",
        "bias_reset": "bias of the head reset",
        "A": "as trained",
    }
    for i, (name, label) in enumerate(names.items()):
        color = PALETTE[(4, 3, 7, 0)[i]]
        _seeds(left, runs, condition, f"recall_{name}", color, STYLES[3 - i], label)
        _seeds(right, runs, condition, f"rank_{name}", color, STYLES[3 - i], label)
    _recall_axis(left)
    left.set_title(f"Recall of A, {_label(condition)}", loc="left")
    right.set_title("Rank of the answer within its own region (1 is best)", loc="left")
    right.set_ylabel("mean rank")
    for axes in (left, right):
        axes.set_xlabel(STEP)
    left.legend(fontsize=8)
    return figure


def splices(runs: pd.DataFrame, condition: str = "B_prime") -> Figure:
    """What the representation and what the head contribute: common shift of the logits, and recall of A."""
    figure, (left, right) = panels(2)
    names = {"": "as trained", "representation": "states of now, head of before", "readout": "the other way round"}
    for i, (name, label) in enumerate(names.items()):
        shift = f"logit_shift_{name}" if name else "logit_shift"
        recall = f"recall_{name}" if name else "recall_A"
        _seeds(left, runs, condition, shift, PALETTE[i], STYLES[i], label)
        _seeds(right, runs, condition, recall, PALETTE[i], STYLES[i], label)
    left.set_title("Common shift of the logits ‖c‖", loc="left")
    left.set_ylabel("length (nats)")
    right.set_title(f"Recall of A, {_label(condition)}", loc="left")
    _recall_axis(right)
    for axes in (left, right):
        axes.set_xlabel(STEP)
    left.legend(fontsize=8)
    return figure


def clock(doses: pd.DataFrame) -> Figure:
    """Recall of A under five doses, against the step and against what of the new people is recalled."""
    figure, (left, right) = panels(2)
    for i, name in enumerate(doses["condition"].unique()):
        mean = mean_run(doses, name)
        low = summary(mean).iloc[0]
        for axes, x, at in ((left, "step", low["trough_step"]), (right, "recall_new", low["new_at_trough"])):
            axes.plot(mean[x], mean["recall_A"], color=PALETTE[i], linestyle=STYLES[i], label=_dose(name))
            axes.plot([at], [low["trough"]], "o", color=PALETTE[i], markersize=6)
    left.set_xscale("log")
    left.set_title("Recall of A against the step (dots: troughs)", loc="left")
    left.set_xlabel(f"{STEP} (logarithmic axis)")
    right.set_title("… against the recall of the new people", loc="left")
    right.set_xlabel("recall of the new people")
    for axes in (left, right):
        _recall_axis(axes)
    left.legend(fontsize=8)
    return figure


def freezing(runs: pd.DataFrame, conditions: Sequence[str]) -> Figure:
    """Recall of A, of the new people, and the common shift, with parts of the model frozen."""
    figure, grid = panels(3, width=4.6, height=4.2)
    columns = (("recall_A", "Recall of A"), ("recall_new", "Recall of the new people"), ("shift", "Common shift ‖δ‖"))
    for axes, (column, title) in zip(grid, columns, strict=True):
        for i, name in enumerate(conditions):
            mean = mean_run(runs, name)
            axes.plot(mean["step"], mean[column], color=PALETTE[i], linestyle=STYLES[i % 7], label=_label(name))
        axes.set_title(f"{title}, mean over seeds", loc="left")
        axes.set_xlabel(STEP)
    for axes in grid[:2]:
        _recall_axis(axes)
    grid[2].set_ylabel("length (units of the state)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def cues(table: pd.DataFrame) -> Figure:
    """Trough, recovery and common shift against how much the new names tell (transformer_findings.cue_summary)."""
    figure, grid = panels(4, width=3.9)
    columns = (
        ("trough", "Recall of A at its trough", "recall (share correct)"),
        ("recovery", "Rise of recall of A after it", "recall (share correct)"),
        ("content_peak", "Peak of the shift's content ⟨δ, w⟩", "length (units of the state)"),
        ("end", "Recall of A at the end", "recall (share correct)"),
    )
    for axes, (column, title, label) in zip(grid, columns, strict=True):
        for i, (kind, part) in enumerate(table.groupby("kind", sort=False)):
            means = part.groupby("cue")[column].mean()
            axes.plot(part["cue"] + 0.01 * (i - 0.5), part[column], ".", color=PALETTE[i], alpha=0.5)
            axes.plot(means.index, means, color=PALETTE[i], linestyle=STYLES[i], label=f"names tell the {kind}")
        axes.set_title(title, loc="left")
        axes.set_xlabel("share of new facts told by the name")
        axes.set_ylabel(label)
        axes.set_ylim(0)
    grid[0].legend(fontsize=8)
    return figure


def surgery(table: pd.DataFrame, equal: pd.DataFrame) -> Figure:
    """Recall of A after edits of the update: along the run, and at equal recall of the new people."""
    figure, (left, right) = panels(2, height=3.9)
    mean = mean_run(table, table["condition"].iloc[0])
    for i, (edit, label) in enumerate(EDIT_LABELS.items()):
        column = "recall_A" if edit == "trained" else f"{edit}_A"
        left.plot(mean["step"], mean[column], color=PALETTE[i], linestyle=STYLES[i], label=label)
        part = equal[equal["edit"] == edit]
        means = part.groupby("level")["recall_A"].mean()
        right.plot(part["level"], part["recall_A"], ".", color=PALETTE[i], alpha=0.5)
        right.plot(means.index, means, color=PALETTE[i], linestyle=STYLES[i])
    left.set_title("Recall of A along the run, mean over seeds", loc="left")
    left.set_xlabel(STEP)
    right.set_title("… at equal recall of the new people", loc="left")
    right.set_xlabel("recall of the new people (edited model)")
    for axes in (left, right):
        _recall_axis(axes)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _seeds(
    axes: Axes, runs: pd.DataFrame, condition: str, column: str, color: object, style: object, label: str
) -> None:
    part = runs[runs["condition"] == condition]
    for _, run in part.groupby("seed"):
        axes.plot(run["step"], run[column], color=color, linewidth=0.6, alpha=0.35)
    mean = mean_run(runs, condition)
    axes.plot(mean["step"], mean[column], color=color, linestyle=style, linewidth=2, label=label)


def _recall_axis(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.05)
    axes.set_ylabel("recall (share correct)")


def _label(name: str) -> str:
    return CONDITIONS[name].label if name in CONDITIONS else name


def _dose(name: str) -> str:
    return "base" if name == "B_prime" else _label(name)
