"""Pictures of where the loss sits and what the biases look like, from `loss_profile`, `token_table` and corrections."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .correction import Correction
from .drawing import COLOURS, STYLE, correction_label, legend_once, new_figure, words
from .loss_profile import AXES, COUNT_EDGES
from .token_table import CLASSES

_AXIS_LABELS = {
    "position": "tokens of the document before it",
    "frequency": "how often the token occurs in the fitted text",
    "class": "",
}


def profile_table(profile: pd.DataFrame, correction: str = "bias_temperature") -> pd.DataFrame:
    """Return losses by bin, a row per axis and bin: `axis, bin, label, tokens` and, in nats per token of the bin,
    `base, derived, base_corrected, derived_corrected, damaged` (mean of seeds; NaN without damage).

    `gap_before`, `gap_after` and `gap_damaged` are what the bin adds to the gap of the whole text, in nats per token of
    the text: over one axis they sum to the gap, to the gap between the corrected models, and to the damaged model's.
    """
    seeds = profile["damage_seed"].nunique()
    keys = ["axis", "bin", "label"]

    def sums(member: str, kind: str) -> pd.Series:
        rows = profile[(profile["member"] == member) & (profile["correction"] == kind)]
        return rows.groupby(keys)["loss_sum"].sum()

    own = profile[(profile["member"] == "base") & (profile["correction"] == "none")]
    table = own.set_index(keys)[["tokens"]].copy()
    parts = {"base": sums("base", "none"), "derived": sums("derived", "none")}
    parts |= {f"{member}_corrected": sums(member, correction) for member in ("base", "derived")}
    parts["damaged"] = sums("damaged", "none") / seeds if seeds else pd.Series(np.nan, index=table.index)
    total = table["tokens"].groupby(level="axis").sum().iloc[0]
    for name, values in parts.items():
        table[name] = values / table["tokens"]
    table["gap_before"] = (parts["derived"] - parts["base"]) / total
    table["gap_after"] = (parts["derived_corrected"] - parts["base_corrected"]) / total
    table["gap_damaged"] = (parts["damaged"] - parts["base"]) / total
    table = table.reset_index().astype({"label": str, "axis": str})
    return table.sort_values(["axis", "bin"], key=_in_order).reset_index(drop=True)


def _in_order(column: pd.Series) -> pd.Series:
    return column.map(AXES.index) if column.name == "axis" else column


def profile_figure(profile: pd.DataFrame, pair: str, correction: str = "bias_temperature") -> Figure:
    """Draw where one pair's gap sits, before and after correction: by position, frequency and class of the target.

    Above: mean losses of the tokens in each bin. Below: what each bin adds to the gap of the text; the bars of one
    colour sum to the gap. `profile` is the pair's loss_profile.parquet.
    """
    table = profile_table(profile, correction)
    widths = [int((table["axis"] == axis).sum()) for axis in AXES]
    ratios = {"width_ratios": widths, "height_ratios": [1.0, 1.2]}
    figure, axes = new_figure(11.0, 5.6, columns=3, rows=2, sharey="row", gridspec_kw=ratios)
    with matplotlib.rc_context(STYLE):
        for column, axis in enumerate(AXES):
            rows = table[table["axis"] == axis]
            above, below = axes[column], axes[3 + column]
            _levels(above, rows, correction)
            _contributions(below, rows)
            x = range(len(rows))
            above.set_xticks(x, [])
            below.set_xticks(x, list(rows["label"]), rotation=45, ha="right", fontsize=7.5)
            below.set_xlabel(_AXIS_LABELS[axis])
            above.set_title(f"by {'class of token' if axis == 'class' else axis}")
        axes[0].set_ylabel("loss in the bin\n(nats per token of the bin)")
        axes[3].set_ylabel("what the bin adds to the gap\n(nats per token of the text)")
        gap = table.loc[table["axis"] == "position", "gap_before"].sum()
        figure.suptitle(f"{pair}: where the gap of {gap:+.3f} nats/token sits", x=0.01, ha="left", fontsize=11)
        legend_once(figure, [axes[0], axes[3]], columns=4)
    return figure


def _levels(axes: Axes, rows: pd.DataFrame, correction: str) -> None:
    corrected = f"derived, corrected ({correction_label(correction)})"
    for name, label, style, colour in (
        ("base", "base", "D--", COLOURS["base"]),
        ("derived", "derived", "o-", COLOURS["derived"]),
        ("derived_corrected", corrected, "v:", "0.25"),
    ):
        axes.plot(range(len(rows)), rows[name], style, color=colour, markersize=4, linewidth=1, label=label)


def _contributions(axes: Axes, rows: pd.DataFrame) -> None:
    x = np.arange(len(rows))
    axes.bar(x - 0.2, rows["gap_before"], 0.4, color=COLOURS["derived"], label="gap before correction")
    label = "gap left after correcting both models"
    axes.bar(x + 0.2, rows["gap_after"], 0.4, facecolor="white", edgecolor="0.25", hatch="////", label=label)
    if rows["gap_damaged"].notna().any():
        colour, label = COLOURS["damaged"], "gap of matched random damage"
        axes.plot(x, rows["gap_damaged"], "s", color=colour, markerfacecolor="white", markersize=4.5, label=label)
    axes.axhline(0.0, color="0.4", linewidth=0.8)


def bias_table(tokens: pd.DataFrame, corrections: Mapping[str, Correction]) -> pd.DataFrame:
    """Return the biases of some models' corrections beside what is known of each token: a row per model and id.

    Columns: `model, id, token, token_class, count, bias` (nats). `corrections` is by model name, `tokens` a study's
    tokens.parquet. Ids that never occur in `fit` have a count of 0, and a class only where they are special.
    """
    frames = [
        pd.DataFrame({"model": name, "id": c.ids.numpy(), "bias": c.bias.double().numpy()})
        for name, c in corrections.items()
    ]
    table = pd.concat(frames, ignore_index=True).merge(tokens, on="id", how="left")
    table["count"] = table["count"].fillna(0).astype(int)
    table["token_class"] = table["token_class"].fillna("never seen")
    return table[["model", "id", "token", "token_class", "count", "bias"]]


def bias_spectrum_figure(biases: pd.DataFrame, pair: str, correction: str = "bias_temperature") -> Figure:
    """Draw fitted biases by frequency of the token and by its class; `biases` is the result of `bias_table`.

    On the left a point per token, with the median and the middle half in each bin of frequency; on the right the middle
    half (thick), the middle nine tenths (thin) and the median of each class.
    """
    figure, axes = new_figure(9.6, 3.9, columns=2, gridspec_kw={"width_ratios": [1.25, 1]})
    title = f"{pair}: fitted biases ({correction_label(correction)}), nats added to a token's logit"
    models = [m for m in biases["model"].unique() if (biases.loc[biases["model"] == m, "bias"] != 0).any()]
    if not models:
        axes[1].set_axis_off()
        return words(figure, axes[0], "no bias was fitted: every correction is the identity", title)
    with matplotlib.rc_context(STYLE):
        classes = [c for c in (*CLASSES, "never seen") if c in set(biases["token_class"])]
        for model, shift in zip(models, (0.15, -0.15), strict=False):
            own = biases[biases["model"] == model]
            _by_frequency(axes[0], own, model)
            _by_class(axes[1], own, classes, model, shift)
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_formatter("{x:,.0f}")
        axes[0].set_xlabel("how often the token occurs in the fitted text")
        axes[0].set_ylabel("bias (nats); above 0: expected too little")
        axes[0].axhline(0.0, color="0.4", linewidth=0.8)
        axes[1].axvline(0.0, color="0.4", linewidth=0.8)
        sizes = biases[biases["model"] == models[0]]["token_class"].value_counts()
        axes[1].set_yticks(range(len(classes)), [f"{c} ({sizes[c]})" for c in reversed(classes)])
        axes[1].set_xlabel("bias (nats); in brackets: tokens in the set")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        legend_once(figure, axes)
    return figure


def _by_frequency(axes: Axes, own: pd.DataFrame, model: str) -> None:
    seen = own[own["count"] > 0]
    axes.plot(seen["count"], seen["bias"], ".", color=COLOURS[model], markersize=2.5, alpha=0.35, rasterized=True)
    groups = seen.groupby(np.digitize(seen["count"], COUNT_EDGES))
    middle = groups["count"].median()
    low, mid, high = (groups["bias"].quantile(q) for q in (0.25, 0.5, 0.75))
    style: dict[str, Any] = {"color": COLOURS[model], "capsize": 2.5, "markersize": 5}
    axes.errorbar(middle, mid, yerr=np.array([mid - low, high - mid]), fmt=_marker(model), label=model, **style)


def _by_class(axes: Axes, own: pd.DataFrame, classes: list[str], model: str, shift: float) -> None:
    for y, name in enumerate(reversed(classes)):
        values = own.loc[own["token_class"] == name, "bias"]
        if values.empty:
            continue
        ends = [float(values.quantile(q)) for q in (0.05, 0.25, 0.5, 0.75, 0.95)]
        axes.plot([ends[0], ends[4]], [y + shift] * 2, color=COLOURS[model], linewidth=0.9)
        axes.plot([ends[1], ends[3]], [y + shift] * 2, color=COLOURS[model], linewidth=3.5, alpha=0.6)
        axes.plot([ends[2]], [y + shift], _marker(model), color=COLOURS[model], markersize=5, label=model)


def _marker(model: str) -> str:
    return "D" if model == "base" else "o"
