"""Pictures of one study, from its tidy tables; each returns a new Figure and touches no global state."""

from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .drawing import (
    COLOURS,
    KINDS,
    MARKERS,
    OPEN,
    STYLE,
    correction_label,
    draw_member,
    floats,
    legend_once,
    new_figure,
    words,
)


def document_loss_figure(losses: pd.DataFrame) -> Figure:
    """Draw the distribution of mean document losses by member; `losses` has `member, tokens, loss_sum`."""
    means = losses.assign(loss=losses["loss_sum"] / losses["tokens"])
    figure, (axes,) = new_figure(6.4, 2.8)
    with matplotlib.rc_context(STYLE):
        edges = np.histogram_bin_edges(means["loss"], bins=40).tolist()
        for member, style in zip(means["member"].unique(), ("-", "--", ":"), strict=False):
            own = means.loc[means["member"] == member, "loss"]
            colour = COLOURS[member]
            axes.hist(own, bins=edges, histtype="step", linewidth=1.4, linestyle=style, color=colour, label=str(member))
        axes.set_xlabel("mean loss of a document (nats per token)")
        axes.set_ylabel("documents")
        axes.set_title("Loss of the documents, before any correction")
        axes.legend()
    return figure


def share_figure(recovery: pd.DataFrame) -> Figure:
    """Draw, for one pair, the symmetric share, the matched-damage share and the excess share of each correction.

    Shares are fractions of the loss gap; bars are 95 % intervals (damage: ± one sd over seeds). A pair without a gap
    gets its reason in words instead.
    """
    rows = recovery[recovery["correction"] != "none"].reset_index(drop=True)
    pair = str(recovery["pair"].iloc[0])
    no_share = bool(rows["symmetric_share"].isna().all())
    figure, (axes,) = new_figure(6.6, 0.9 if no_share else 1.1 + 0.55 * len(rows))
    if no_share:
        reason = str(recovery["reason"].iloc[0] or "no share is defined")
        return words(figure, axes, reason, f"{pair}: no recovered share")
    with matplotlib.rc_context(STYLE):
        for i, row in rows.iterrows():
            y = len(rows) - 1 - int(str(i))
            shares = floats(row)
            sd = shares["damage_sd"] if np.isfinite(shares["damage_sd"]) else 0.0
            share, damage, excess = (shares[f"{n}_share"] for n in ("symmetric", "damage", "excess"))
            low, high = shares["symmetric_low"], shares["symmetric_high"]
            draw_member(axes, "derived", share, y + 0.2, low, high, "pair's own share")
            draw_member(axes, "damaged", damage, y, damage - sd, damage + sd, "matched random damage")
            low, high = shares["excess_low"], shares["excess_high"]
            draw_member(axes, "excess", excess, y - 0.2, low, high, "excess over damage")
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [correction_label(c) for c in rows["correction"][::-1]])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("symmetric share of the gap (bars: 95 % interval; damage: ± sd over seeds)")
        gap = float(rows["gap"].iloc[0])
        axes.set_title(f"{pair}: share of the gap ({gap:.3f} nats/token) given back")
        legend_once(figure, [axes])
    return figure


def gap_figure(losses: pd.DataFrame) -> Figure:
    """Draw mean `eval` losses of base, derived and damaged models, uncorrected and under each correction."""
    rows = losses[(losses["split"] == "eval") & losses["setting"].isna()]
    sums = rows.groupby(["member", "correction"], sort=False)[["loss_sum", "tokens"]].sum()
    means = (sums["loss_sum"] / sums["tokens"]).rename("loss").reset_index()
    kinds = [k for k in KINDS if k in set(means["correction"])]
    figure, (axes,) = new_figure(6.6, 3.2)
    with matplotlib.rc_context(STYLE):
        for member in ("base", "derived", "damaged"):
            own = means[means["member"] == member].set_index("correction")["loss"].reindex(kinds)
            if own.notna().any():
                label = "matched damage (mean of seeds)" if member == "damaged" else member
                face = "white" if member in OPEN else COLOURS[member]
                style = {"marker": MARKERS[member], "color": COLOURS[member], "markerfacecolor": face}
                axes.plot(range(len(kinds)), own, **style, label=label, linewidth=1)
        axes.set_xticks(range(len(kinds)), [correction_label(k) for k in kinds], rotation=20, ha="right")
        axes.set_ylabel("loss on eval (nats per token)")
        axes.set_title(f"{rows['pair'].iloc[0]}: loss before and after each correction")
        legend_once(figure, [axes])
    return figure


def bias_figure(biases: pd.DataFrame, title: str) -> Figure:
    """Draw the largest biases. `biases` has `token` (decoded text), `bias` (nats) and `count` (targets in fit)."""
    figure, (axes,) = new_figure(6.0, 0.9 + 0.19 * len(biases))
    if biases.empty:
        return words(figure, axes, "no bias: the correction is the identity", title)
    with matplotlib.rc_context(STYLE):
        colours = [COLOURS["derived"] if b > 0 else COLOURS["damaged"] for b in biases["bias"]]
        axes.barh(range(len(biases)), biases["bias"], color=colours)
        # a dollar sign would start a formula
        labels = [t.replace("$", r"\$") for t in biases["token"]]
        axes.set_yticks(range(len(biases)), labels, fontsize=7, family="monospace")
        axes.invert_yaxis()
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_xlabel("fitted bias (nats added to the token's logit)")
        axes.set_title(title)
    return figure


def largest_biases(bias: Sequence[float], tokens: Sequence[str], counts: Sequence[int], n: int = 30) -> pd.DataFrame:
    """Return the `n` entries of largest |bias|, sorted from the largest to the smallest bias."""
    table = pd.DataFrame({"token": tokens, "bias": bias, "count": counts})
    order = table["bias"].abs().sort_values(ascending=False, kind="stable").index[:n]
    return table.loc[order].sort_values("bias", ascending=False, kind="stable").reset_index(drop=True)
