"""Figures of interventions, laws and the acceptance table.

In: tidy tables. Out: matplotlib Figures, drawn without pyplot.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psd_utils.spurious.acceptance import FAILS, HOLDS, NOT_RUN, Findings, Row
from psd_utils.spurious.laws import cell_means, erosion_in_time, withdrawal
from psd_utils.spurious.plots import PALETTE, panels, step_axis
from psd_utils.spurious.trajectory import Trajectory

REMOVED = {
    "trained": "nothing",
    "row": "shared\nrow",
    "top_1": "top 1\ndirection",
    "top_4": "top 4\ndirections",
    "random_1": "random\nrank 1",
    "random_4": "random\nrank 4",
}


def repairs(offsets: dict[str, pd.DataFrame], replays: dict[str, pd.DataFrame]) -> Figure:
    """Accuracy on A after offset subtraction and after brief replay, at the trough and at the end."""
    figure, (left, right) = panels(2, height=3.4)
    for i, (moment, table) in enumerate(offsets.items()):
        names = list(dict.fromkeys(table["estimated_from"]))
        names = ["none", *[n for n in names if n not in ("none", "all")], "all"]
        part = table.groupby("estimated_from")["accuracy"]
        x = np.arange(len(names)) + (i - 0.5) * 0.38
        _bars(left, x, part.mean()[names], part.std()[names], i, moment)
        left.set_xticks(range(len(names)), ["as trained", *[_facts(n) for n in names[1:-1]], "all facts"])
    left.set_title("Accuracy on A after subtracting the mean shift of …", loc="left")
    for i, (moment, table) in enumerate(replays.items()):
        longest = table[table["n_steps"] == table["n_steps"].max()]
        part = longest.groupby("n_facts")["accuracy"]
        x = np.arange(len(part.mean())) + (i - 0.5) * 0.38
        _bars(right, x, part.mean(), part.std(), i, moment)
        right.set_xticks(range(len(part.mean())), [_facts(k) for k in part.mean().index])
        right.set_title(
            f"Accuracy on the rest of A after {longest['n_steps'].iloc[0]} steps of replay on …", loc="left"
        )
    for axes in (left, right):
        axes.set_ylim(0, 1.18)
        axes.set_ylabel("accuracy (share correct)")
        axes.legend(fontsize=8, loc="upper left", ncols=2)
    left.tick_params(axis="x", labelsize=8)
    return figure


def surgeries(table: pd.DataFrame) -> Figure:
    """Accuracy on A and on the new facts after removing part of the weight update, for each moment."""
    moments = list(dict.fromkeys(table["moment"]))
    figure, grid = panels(len(moments), height=3.6)
    names = list(dict.fromkeys(table["removed"]))
    for axes, moment in zip(grid, moments, strict=True):
        part = table[table["moment"] == moment].groupby("removed")
        for i, (column, label) in enumerate((("accuracy_A", "A"), ("accuracy_new", "new facts"))):
            x = np.arange(len(names)) + (i - 0.5) * 0.38
            color = 0 if i == 0 else 2
            _bars(axes, x, part[column].mean()[names], part[column].std()[names], color, label)
        axes.set_xticks(range(len(names)), [REMOVED[n] for n in names], fontsize=8)
        axes.set_ylim(0, 1.18)
        axes.set_ylabel("accuracy (share correct)")
        axes.set_title(f"Accuracy with part of the update removed, at the {moment}", loc="left")
        axes.legend(fontsize=8, loc="upper left", ncols=2)
    return figure


def no_rewind(curves: pd.DataFrame, leading: pd.DataFrame) -> Figure:
    """Old against new accuracy along training, as trained and edited; and what the top direction is."""
    figure, (left, right) = panels(2, height=3.8)
    means = curves.groupby(["removed", "step"])[["accuracy_A", "accuracy_new"]].mean().reset_index()
    styles = {"trained": (PALETTE[7], "-"), "row": (PALETTE[0], "--"), "top_1": (PALETTE[1], ":")}
    for removed, (color, style) in styles.items():
        part = means[means["removed"] == removed].sort_values("step")
        if len(part):
            label = REMOVED[removed].replace("\n", " ") + " removed"
            left.plot(part["accuracy_new"], part["accuracy_A"], color=color, linestyle=style, label=label, lw=2)
    left.axvline(0.9, color="0.6", linewidth=0.8)
    left.set(xlim=(0, 1.02), ylim=(0, 1.05))
    left.set_xlabel("accuracy on the new facts (share correct)")
    left.set_ylabel("accuracy on A (share correct)")
    left.set_title("Old against new facts along training: higher is no rewind", loc="left")
    left.legend(fontsize=8, loc="lower left")
    mean = leading.groupby("step")[["cosine", "share_1", "share_4"]].mean()
    for column, label, color, style in (
        ("cosine", "|cos(u₁, μ)|", PALETTE[0], "-"),
        ("share_1", "share of ‖ΔW‖² in the top 1", PALETTE[1], "--"),
        ("share_4", "… in the top 4", PALETTE[2], ":"),
    ):
        right.plot(mean.index, mean[column], color=color, linestyle=style, label=label, linewidth=1.8)
    right.set_ylim(0, 1.05)
    right.set_ylabel("cosine or share (0–1)")
    right.set_title("Top singular direction of the update against the shared key", loc="left")
    step_axis(right, int(mean.index.max()))
    right.legend(fontsize=8, loc="upper right")
    return figure


def training_replay(table: pd.DataFrame) -> Figure:
    """Never-replayed facts of A: trough and end against the number of facts replayed during training."""
    figure, grid = panels(2, width=4.6, height=3.2)
    for axes, column in zip(grid, ("trough", "end"), strict=True):
        none = table.loc[table["n_facts"] == 0, column].mean()
        for i, extra in enumerate(sorted(set(table["per_step"]) - {0})):
            part = table[table["per_step"] == extra].groupby("n_facts")[column].mean()
            label = f"{extra} samples a step"
            axes.plot(part.index, part, marker="os"[i % 2], color=PALETTE[i], linestyle="-:"[i % 2], label=label)
        axes.axhline(none, color="0.5", linestyle="--", linewidth=1, label="no replay")
        axes.set_xscale("log", base=2)
        ticks = sorted(set(table["n_facts"]) - {0})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_ylim(0, 1)
        axes.set_xlabel("facts of A that may be replayed")
        axes.set_ylabel("accuracy (share correct)")
        axes.set_title(f"Never-replayed facts of A: {column}", loc="left")
        axes.legend(fontsize=8, loc="upper left")
    return figure


def sweeps(table: pd.DataFrame) -> Figure:
    """Trough, later maximum and end of A against each axis of the sweep, mean over seeds and every seed."""
    labels = {
        "alpha": "α (cosine of two keys)",
        "n_new": "number of new facts",
        "dimension": "dimension d",
        "n_old": "facts in A, and in B",
        "n_values": "number of answers",
        "dose": "rate / matched rate",
    }
    axes_found = list(dict.fromkeys(table["setting"]))
    columns = min(3, len(axes_found))
    figure, grid = panels(columns, -(-len(axes_found) // columns), width=4.2, height=3.1)
    for axes in grid[len(axes_found) :]:
        axes.set_visible(False)
    for axes, name in zip(grid, axes_found, strict=False):
        part = table[table["setting"] == name]
        for column, label, color, marker in (
            ("trough", "trough", PALETTE[3], "v"),
            ("max_after", "maximum after", PALETTE[2], "^"),
            ("end", "end", PALETTE[0], "o"),
        ):
            mean = part.groupby("value")[column].mean()
            axes.plot(part["value"], part[column], ".", color=color, alpha=0.3, markersize=4)
            axes.plot(mean.index, mean, color=color, marker=marker, label=label, linewidth=1.5)
        if name != "alpha":
            axes.set_xscale("log", base=2)
            ticks = sorted(set(part["value"]))
            axes.set_xticks(ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks])
            axes.minorticks_off()
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel(labels[name])
        axes.set_ylabel("accuracy on A")
        axes.set_title(f"Accuracy on A against {labels[name].split(' (')[0]}", loc="left")
    grid[0].legend(fontsize=8)
    return figure


def laws(table: pd.DataFrame, long: Trajectory | None) -> Figure:
    """Timing against rate, the recovery-level law, and erosion against log time."""
    figure, (left, middle, right) = panels(3, width=4.3, height=3.4)
    dose = cell_means(table[table["setting"] == "dose"])
    for column, label, color, marker in (
        ("trough_step", "trough", PALETTE[3], "v"),
        ("recovery_step", "90 % of the recovery", PALETTE[2], "^"),
    ):
        part = dose if column == "trough_step" else dose[dose["recovery"] >= 0.25]
        left.plot(part["value"], part[column], color=color, marker=marker, label=label)
    if len(dose):
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        left.set_xticks(dose["value"], [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in dose["value"]])
        left.legend(fontsize=8)
    left.set_xlabel("rate / matched rate")
    left.set_ylabel("step")
    left.set_title("Step of trough and recovery", loc="left")

    runs = table[table["setting"].isin(["alpha", "n_new", "dose"]) & (table["peak_content"] >= 0.3)]
    if len(runs) > 1:
        law = withdrawal(runs)
        withdrawn = 1 - runs["end_content"] / runs["peak_content"]
        middle.scatter(runs["peak_content"], withdrawn, s=14, color=PALETTE[0], label="runs")
        peak = np.linspace(runs["peak_content"].min(), runs["peak_content"].max(), 100)
        middle.plot(peak, 1 - law.K / peak, color="black", label=f"1 − {law.K:.2f}/peak, R² {law.r2:.2f}")
        middle.set_ylim(max(-1.0, float(withdrawn.min()) - 0.1), 1.05)
        middle.legend(fontsize=8, loc="lower right")
    middle.set_xlabel("peak of ⟨s,w⟩ (units of h)")
    middle.set_ylabel("withdrawn share of the peak")
    middle.set_title("How much of the shift is withdrawn", loc="left")

    if long is not None:
        since = 1000 if long.steps[-1] >= 5000 else max(1, long.steps[-1] // 10)
        fits = erosion_in_time(long, since)
        steps = np.array(long.steps)
        for i, fit in enumerate(fits.itertuples()):
            label = "measured, each seed" if i == 0 else ""
            right.plot(steps[1:], long["individual"][1:, i], color=PALETTE[4], lw=1.2, label=label)
            late = steps[steps >= since]
            line = fit.c * np.log(late) + fit.k
            right.plot(late, line, "k--", lw=1, label=f"c ln t + k from step {since:,}" if i == 0 else "")
        right.set_xscale("log")
        right.legend(fontsize=8, loc="lower right")
    right.set_xlabel("fine-tuning step (log axis)")
    right.set_ylabel("mean ‖ε_a‖ (readout states)")
    right.set_title("Erosion against time", loc="left")
    return figure


def acceptance(table: pd.DataFrame, rows: Sequence[Row], findings: Findings) -> Figure:
    """Verdict of every row, and found against expected where both are shares or accuracies."""
    figure, (left, right) = panels(2, height=4.4)
    colors = {HOLDS: PALETTE[2], FAILS: PALETTE[3], NOT_RUN: "0.85"}
    marks = {HOLDS: "✓", FAILS: "✗", NOT_RUN: "–"}
    for i, (number, verdict) in enumerate(zip(table["row"], table["verdict"], strict=True)):
        x, y = i % 6, -(i // 6)
        left.scatter(x, y, s=900, marker="s", color=[colors[verdict]])
        left.text(x, y, f"{number} {marks[verdict]}", ha="center", va="center", fontsize=10)
    counts = table["verdict"].value_counts()
    left.set(xlim=(-0.6, 5.6), ylim=(-(len(table) - 1) // 6 - 0.6, 0.6))
    left.axis("off")
    words = ", ".join(f"{counts.get(v, 0)} {v}" for v in (HOLDS, FAILS, NOT_RUN))
    left.set_title(f"Verdict by row: {words}", loc="left")
    for row in rows:
        for check in row.checks:
            value = np.mean(findings[check.quantity]) if check.quantity in findings else np.nan
            if check.expected is None or not (0 <= check.expected <= 1) or not np.isfinite(value):
                continue
            if check.low is not None or check.high is not None:
                bounds = (max(check.low or 0.0, 0), min(1.0 if check.high is None else check.high, 1))
                right.plot([check.expected] * 2, bounds, color="0.8", linewidth=3, zorder=1)
            inside = check.accepts(float(value))
            right.scatter(check.expected, value, s=18, color=[PALETTE[0] if inside else PALETTE[3]], zorder=2)
            if not inside:
                right.annotate(f"row {row.id}", (check.expected, value), (4, 3), textcoords="offset points", fontsize=7)
    right.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, linestyle="--", zorder=0)
    right.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    right.set_xlabel("expected")
    right.set_ylabel("found (mean); grey: accepted range")
    right.set_title("Numbers between 0 and 1: found against expected", loc="left")
    return figure


def _facts(n: object) -> str:
    return f"{n} fact" if str(n) == "1" else f"{n} facts"


def _bars(axes: Axes, x: np.ndarray, mean: pd.Series, sd: pd.Series, color: int, label: str) -> None:
    hatch = "" if color == 0 else "//"
    axes.bar(x, mean, width=0.36, color=PALETTE[color], label=label, hatch=hatch, alpha=0.9)
    axes.errorbar(x, mean, yerr=np.nan_to_num(sd), fmt="none", color="black", linewidth=1, capsize=2)
