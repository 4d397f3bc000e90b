"""Figures of the runs: three acts, ingredients, two processes, equations, hidden geometry.

In: results and tidy tables. Out: matplotlib Figures, drawn without pyplot, so that any thread may draw them.

Colours are seaborn's colour-blind palette; every population also has its own line style. Steps are shown on a
square-root axis, since all that matters early happens within 400 of 5,000 steps.
"""

import io
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from psd_utils.spurious.arms import ARMS, ArmResult
from psd_utils.spurious.equations import ReducedRun
from psd_utils.spurious.trajectory import Trajectory

PALETTE = sns.color_palette("colorblind")
POPULATIONS = {"A": (PALETTE[0], "-"), "B": (PALETTE[1], "--"), "new": (PALETTE[2], ":")}
ACTS = {"collapse": "#f6d5d0", "recovery": "#d5e8d4", "erosion": "#eeeeee"}
TICKS = (0, 20, 80, 200, 500, 1000, 2000, 5000, 10_000, 30_000)


def picture(figure: Figure, dpi: int = 100) -> Image:
    """The figure as an image to display; its first title is the alternative text."""
    titles = [axes.get_title(loc=side) for axes in figure.axes for side in ("left", "center")]
    return Image(data=png(figure, dpi), alt="; ".join(t for t in titles if t), format="png")


def png(figure: Figure, dpi: int = 100) -> bytes:
    """The figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def panels(columns: int, rows: int = 1, width: float = 5.6, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure with plain, lightly ruled axes; nothing global is touched."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, list(grid.flat)


def step_axis(axes: Axes, last: int) -> None:
    """A square-root axis of fine-tuning steps from 0 to the last."""
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last)
    ticks = [t for t in TICKS if t <= last]
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axes.set_xlabel("fine-tuning step (square-root axis)")


def band(axes: Axes, run: Trajectory, name: str, color: object, style: str = "-", label: str = "") -> None:
    """Mean over seeds, with one standard deviation to either side."""
    values = run[name].numpy()
    mean, sd = values.mean(1), values.std(1, ddof=1) if values.shape[1] > 1 else 0.0
    axes.plot(run.steps, mean, color=color, linestyle=style, label=label, linewidth=1.8)
    axes.fill_between(run.steps, mean - sd, mean + sd, color=color, alpha=0.15, linewidth=0)


def acts(run: Trajectory) -> dict[str, tuple[float, float]]:
    """Where the acts of the mean curve of A lie, as (first step, last step): collapse, recovery, erosion.

    Recovery and erosion are left out if A does not rise by 0.05 after its trough.
    """
    curve, steps = run["accuracy_A"].mean(1).numpy(), np.array(run.steps)
    low = int(curve[steps <= 400].argmin())
    top = low + int(curve[low:].argmax())
    if curve[top] - curve[low] < 0.05:
        return {}
    back = low + int((curve[low:] >= curve[low] + 0.9 * (curve[top] - curve[low])).argmax())
    return {
        "collapse": (0, float(steps[low])),
        "recovery": (float(steps[low]), float(steps[back])),
        "erosion": (float(steps[back]), float(steps[-1])),
    }


def draw_acts(axes: Axes, run: Trajectory, title: str) -> None:
    """Accuracy of A, B and the new facts along a run, the acts shaded."""
    found = acts(run)
    for name, (first, last) in found.items():
        axes.axvspan(first, last, color=ACTS[name], zorder=0, linewidth=0)
    labels = {"A": "A, old facts in X", "B": "B, old facts in Y", "new": "new facts"}
    for name, (color, style) in POPULATIONS.items():
        band(axes, run, f"accuracy_{name}", color, style, labels[name])
    axes.set_ylim(-0.02, 1.05)
    axes.set_ylabel("accuracy (share correct)")
    axes.set_title(title, loc="left")
    step_axis(axes, run.steps[-1])
    handles, names = axes.get_legend_handles_labels()
    handles += [Patch(color=ACTS[name]) for name in found]
    axes.legend(handles, [*names, *found], fontsize=8, loc="lower right", framealpha=0.9)


def three_acts(model: ArmResult, control: ArmResult) -> Figure:
    """Accuracy against step for new answers in Y only (B′) and in both regions (C)."""
    figure, (left, right) = panels(2)
    draw_acts(left, model.trajectory, "B′: new answers in Y. Accuracy, mean ± sd")
    draw_acts(right, control.trajectory, "C: new answers in X and Y. Accuracy, mean ± sd")
    return figure


def ingredients(results: dict[str, ArmResult]) -> Figure:
    """Accuracy on A, and the shift's content, of every arm."""
    figure, (left, right) = panels(2, width=5.6, height=4.2)
    styles = ("-", (0, (1, 1)), "--", "-.", (0, (5, 1, 1, 1, 1, 1)), ":", (0, (6, 2)))
    for (name, result), color, style in zip(results.items(), PALETTE, styles, strict=False):
        run = result.trajectory
        for axes, quantity in ((left, "accuracy_A"), (right, "shift_content")):
            label = ARMS[name].label if name in ARMS else name
            width = 2.6 if name == "model" else 1.6
            values = run[quantity].mean(1)
            axes.plot(run.steps, values, color=color, linestyle=style, label=label, linewidth=width)
    last = max(r.trajectory.steps[-1] for r in results.values())
    left.set_title("Accuracy on A, mean over seeds", loc="left")
    left.set_ylabel("accuracy (share correct)")
    left.set_ylim(-0.02, 1.05)
    right.set_title("Shift from X to Y, ⟨s,w⟩, mean over seeds", loc="left")
    right.set_ylabel("⟨s,w⟩ (units of the hidden state)")
    for axes in (left, right):
        step_axis(axes, last)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def two_processes(model: ArmResult) -> Figure:
    """Accuracy on A with only the common or only the individual change, and the size of both."""
    figure, (left, right) = panels(2)
    run = model.trajectory
    for name, label, color, style in (
        ("common_only_A", "common part only", PALETTE[3], "--"),
        ("individual_only_A", "individual part only", PALETTE[4], "-."),
        ("accuracy_A", "as trained", PALETTE[0], "-"),
    ):
        band(left, run, name, color, style, label)
    left.set_title("Accuracy on A with one part of the logit change only", loc="left")
    left.set_ylabel("accuracy (share correct)")
    left.set_ylim(-0.02, 1.05)
    band(right, run, "common_h", PALETTE[3], "--", "common shift ‖δ‖")
    band(right, run, "individual_h", PALETTE[4], "-.", "individual displacement ‖ε_a‖")
    right.set_title("Size of both parts on A's raw states, mean ± sd", loc="left")
    right.set_ylabel("length (units of the hidden state)")
    right.set_ylim(0)
    for axes in (left, right):
        step_axis(axes, run.steps[-1])
        axes.legend(fontsize=8, loc="best")
    return figure


def reduced_equation(runs: dict[str, ReducedRun]) -> Figure:
    """Length of A's mean state, measured and predicted, one seed for each arm."""
    figure, grid = panels(len(runs))
    names = {"rms": "with the normaliser", "linear": "without"}
    for axes, (arm, run) in zip(grid, runs.items(), strict=True):
        for which, label, color, style in (
            ("measured", "measured", "black", "-"),
            ("predicted", "reduced equation", PALETTE[1], "--"),
            ("corrected", "… with the finite-step term", PALETTE[2], ":"),
        ):
            values = getattr(run, which)[:, 0]
            axes.plot(run.steps, values, color=color, linestyle=style, label=label, linewidth=2)
        step_axis(axes, int(run.steps[-1]))
        axes.set_ylim(0)
        axes.set_ylabel("‖mean state of A‖ (units of h)")
        axes.set_title(f"Length of A's mean state, {names.get(arm, arm)} (first seed)", loc="left")
        axes.legend(fontsize=8)
    return figure


def force_terms(table: pd.DataFrame) -> Figure:
    """The two terms of the force on the shared row and the new facts' mean margin, first seed of
    force_history.
    """
    figure, (left, right) = panels(2)
    part = table[table["seed"] == table["seed"].iloc[0]]
    total = part["plain_s"] + part["normaliser_s"]
    for values, label, color, style in (
        (part["plain_s"], "plain term", PALETTE[1], "--"),
        (part["normaliser_s"], "normaliser's term", PALETTE[2], "-."),
        (total, "total", "black", "-"),
    ):
        left.plot(part["step"], values, color=color, linestyle=style, label=label, linewidth=1.6)
    span = total[part["step"] >= 20].abs().max()
    left.set_ylim(-1.2 * span, 1.6 * span)
    left.set_ylabel("force along the shared row (1/units of h)")
    left.set_title("Force on the shared row: > 0 writes, < 0 withdraws", loc="left")
    left.legend(fontsize=8)
    right.plot(part["step"], part["margin"], color=PALETTE[0], linewidth=1.8)
    right.set_ylim(-3, None)
    right.set_ylabel("mean margin of the new facts (logits)")
    right.set_title("Mean margin of the new facts: below 0 mostly wrong", loc="left")
    for axes in (left, right):
        axes.axhline(0, color="0.5", linewidth=0.8)
        step_axis(axes, int(part["step"].max()))
    return figure


def geometry(table: pd.DataFrame, moments: Sequence[str]) -> Figure:
    """Share of the states along the written shared direction, and their tilt towards Y, for each
    population.
    """
    figure, grid = panels(2, width=4.6, height=3.2)
    steps = list(dict.fromkeys(table["step"]))
    columns = (
        ("shared_share", "share of ‖h‖² along μᵀW", "Share of the states along the shared direction"),
        ("tilt", "⟨mean h, w⟩ (units of h)", "Tilt of the mean state from X to Y"),
    )
    for axes, (column, label, title) in zip(grid, columns, strict=True):
        for i, (name, (color, _)) in enumerate(POPULATIONS.items()):
            part = table[table["population"] == name].set_index("step").loc[steps]
            x = np.arange(len(steps)) + (i - 1) * 0.26
            axes.bar(x, part[column], width=0.24, color=color, label=name, hatch=("", "//", "..")[i], alpha=0.9)
        axes.set_xticks(range(len(steps)), [f"{m}\nstep {s:,}" for m, s in zip(moments, steps, strict=True)])
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_ylabel(label)
        axes.set_title(title, loc="left")
        axes.legend(fontsize=8)
    return figure
