"""Figures of a study of checkpoints: recall, the two parts of the change, surgery at equal new-fact recall, relations.

In: tidy tables of a CheckpointReport. Out: matplotlib Figures, drawn without pyplot.
"""

import itertools
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psd_utils.spurious.checkpoint_report import curves_of
from psd_utils.spurious.decomposition import ALL
from psd_utils.spurious.plots import PALETTE, panels
from psd_utils.spurious.verdict import EROSION, HIDDEN, Verdict

SETS = {"old": (PALETTE[0], "o", "-"), "new": (PALETTE[2], "s", ":")}
SHADES = {HIDDEN: "#f6d5d0", EROSION: "#e4e4e4"}


def recall_figure(recall: pd.DataFrame, verdicts: Mapping[str, Verdict]) -> Figure:
    """Recall of old and new facts over fine-tuning, exact and among candidates, and log-probability of the answers.

    Checkpoints are shaded by their verdict.
    """
    figure, (left, right) = panels(2)
    trained = recall[(recall["edit"] == "trained") & (recall["relation"] == ALL)]
    steps = trained.drop_duplicates("checkpoint").set_index("checkpoint")["step"].sort_values()
    _shade(left, steps, verdicts)
    for name, (color, marker, style) in SETS.items():
        part = trained[trained["set"] == name].sort_values("step")
        left.plot(part["step"], part["exact"], color=color, marker=marker, linestyle=style, label=f"{name} facts")
        right.plot(part["step"], part["log_prob_per_token"], color=color, marker=marker, linestyle=style, label=name)
    old = trained[(trained["set"] == "old") & trained["choice"].notna()].sort_values("step")
    left.plot(
        old["step"], old["choice"], color=SETS["old"][0], alpha=0.5, linestyle="--", label="old, among candidates"
    )
    _steps(left, "recall (share of facts)", "Recall; shaded: the verdict")
    left.set_ylim(-0.02, 1.02)
    _steps(right, "log-probability (nats per token)", "Answers, teacher-forced")
    left.legend(fontsize=8, frameon=False)
    return figure


def parts_figure(shift: pd.DataFrame) -> Figure:
    """Sizes of the common and the individual part of the old facts' change, and recall with one of them taken away."""
    figure, (left, right) = panels(2)
    old = shift[(shift["set"] == "old") & (shift["relation"] == ALL)].sort_values("step")
    by_relation, one = old[old["means"] == "relation"], old[old["means"] == "one"]
    left.plot(by_relation["step"], by_relation["common"], color=PALETTE[3], marker="o", label="common (per relation)")
    left.plot(one["step"], one["common"], color=PALETTE[3], linestyle=":", label="common (one mean)")
    left.plot(by_relation["step"], by_relation["individual"], color=PALETTE[7], marker="s", label="individual")
    _steps(left, "root mean square over facts", "Change of the old facts' final states")
    right.plot(old["step"], old["trained"], color=PALETTE[0], marker="o", label="as trained")
    for means, style in (("relation", "-"), ("one", ":")):
        part = old[old["means"] == means]
        label = "common removed, " + ("per relation" if means == "relation" else "one mean")
        right.plot(part["step"], part["common_removed"], color=PALETTE[3], linestyle=style, marker="^", label=label)
    right.plot(by_relation["step"], by_relation["common_only"], color=PALETTE[7], linestyle="--", label="common only")
    _steps(right, "first-token recall", "Old facts with one part alone")
    right.set_ylim(-0.02, 1.02)
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
    return figure


def surgery_figure(recall: pd.DataFrame) -> Figure:
    """Old-fact against new-fact recall along the run: as trained, edited, and with the random control.

    At the same place on the horizontal axis the new facts are known equally well; a mere rewind stays on the trained
    path.
    """
    figure, (axes,) = panels(1, width=6.4, height=4.4)
    curves = curves_of(recall).sort_values("step")
    for number, (name, part) in enumerate(curves.groupby("edit", sort=False)):
        kind, _, rank = str(name).partition("_")
        if kind == "trained":
            axes.plot(part["new"], part["old"], color="black", marker="o", label="as trained", zorder=3)
            for row in part.itertuples():
                axes.annotate(f"{row.step}", (row.new, row.old), fontsize=7, xytext=(3, -9), textcoords="offset points")
        else:
            color = PALETTE[(number + 1) // 2 % len(PALETTE)]
            style, marker = ("-", "^") if kind == "remove" else (":", "x")
            label = f"top {rank} removed" if kind == "remove" else f"random, rank {rank}, same norm"
            axes.plot(part["new"], part["old"], color=color, linestyle=style, marker=marker, label=label, alpha=0.9)
    axes.set(xlabel="new facts: first-token recall", ylabel="old facts: first-token recall")
    axes.set_title("Surgery compared at equal new-fact recall", loc="left", fontsize=10)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=8, frameon=False)
    return figure


def relation_figure(shift: pd.DataFrame, checkpoint: str) -> Figure:
    """For every relation of the old facts at one checkpoint: recall as trained, and with its common part removed."""
    part = shift[(shift["checkpoint"] == checkpoint) & (shift["set"] == "old") & (shift["means"] == "relation")]
    part = part.sort_values("trained")
    figure, (axes,) = panels(1, width=6.4, height=1.2 + 0.32 * len(part))
    places = range(len(part))
    axes.hlines(places, part["trained"], part["common_removed"], color="0.7")
    axes.plot(part["trained"], places, "o", color=PALETTE[0], label="as trained")
    axes.plot(part["common_removed"], places, "^", color=PALETTE[3], label="common part removed")
    axes.set_yticks(places, [f"{r} ({int(n)})" for r, n in zip(part["relation"], part["facts"], strict=True)])
    axes.set(xlabel="first-token recall of old facts", xlim=(-0.02, 1.02))
    axes.set_title(f"Relations at {checkpoint} (number of facts)", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return figure


def update_figure(updates: pd.DataFrame) -> Figure:
    """How much of each block matrix's update lies in its leading directions, over fine-tuning."""
    figure, (axes,) = panels(1)
    for name in [c for c in updates.columns if c.startswith("share_")]:
        by_step = updates.groupby("step")[name]
        axes.plot(by_step.mean().index, by_step.mean(), marker="o", label=f"top {name.removeprefix('share_')}")
        axes.fill_between(by_step.min().index, by_step.min(), by_step.max(), alpha=0.15, linewidth=0)
    _steps(axes, "share of the squared norm", "Updates: leading directions (band: all matrices)")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _shade(axes: Axes, steps: pd.Series, verdicts: Mapping[str, Verdict]) -> None:
    """Colour the stretch that ends at each checkpoint by its verdict."""
    at = list(steps.items())
    for (_, begin), (label, end) in itertools.pairwise(at):
        color = SHADES.get(verdicts[str(label)].name) if str(label) in verdicts else None
        if color:
            axes.axvspan(float(begin), float(end), color=color, linewidth=0, zorder=0)


def _steps(axes: Axes, what: str, title: str) -> None:
    axes.set(xlabel="fine-tuning step", ylabel=what)
    axes.set_title(title, loc="left", fontsize=10)
