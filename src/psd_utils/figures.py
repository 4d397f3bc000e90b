"""Every picture, from tidy tables: each function returns a new matplotlib Figure and touches no global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .files import write_atomically

_STYLE = {
    **sns.axes_style("ticks"),
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "psd_utils",
}
_COLOURS = dict(zip(("derived", "base", "damaged", "excess"), sns.color_palette("colorblind", 4), strict=True))
_LABELS = {
    "none": "uncorrected",
    "temperature": "temperature",
    "prior_ratio": "prior ratio (one step)",
    "bias": "bias",
    "bias_temperature": "bias and temperature",
    "bias_all": "bias on all tokens",
}


def correction_label(kind: str) -> str:
    """Return a kind of correction in words."""
    return _LABELS.get(kind, kind)


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _point(axes: Axes, x: float, y: float, low: float, high: float, colour: object, label: str, marker: str) -> None:
    if not np.isfinite(x):
        return
    error = None
    if np.isfinite(low) and np.isfinite(high):
        error = np.array([[max(0.0, x - low)], [max(0.0, high - x)]])
    axes.errorbar(x, y, xerr=error, fmt=marker, color=colour, label=label, capsize=2.5, markersize=5, linewidth=1.2)


def document_loss_figure(losses: pd.DataFrame) -> Figure:
    """Draw the distribution of mean document losses by member; `losses` has `member, tokens, loss_sum`."""
    means = losses.assign(loss=losses["loss_sum"] / losses["tokens"])
    figure, (axes,) = _figure(6.4, 2.8)
    with matplotlib.rc_context(_STYLE):
        edges = np.histogram_bin_edges(means["loss"], bins=40).tolist()
        for member in means["member"].unique():
            own = means.loc[means["member"] == member, "loss"]
            axes.hist(own, bins=edges, histtype="step", linewidth=1.4, color=_COLOURS[member], label=str(member))
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
    figure, (axes,) = _figure(6.6, 0.9 if no_share else 1.1 + 0.55 * len(rows))
    with matplotlib.rc_context(_STYLE):
        if no_share:
            reason = str(recovery["reason"].iloc[0] or "no share is defined")
            axes.text(0.5, 0.5, reason, ha="center", va="center", wrap=True, transform=axes.transAxes)
            axes.set_axis_off()
            axes.set_title(f"{pair}: no recovered share")
            return figure
        for i, row in rows.iterrows():
            y = len(rows) - 1 - int(str(i))
            shares = _floats(row)
            sd = shares["damage_sd"] if np.isfinite(shares["damage_sd"]) else 0.0
            share, damage, excess = (shares[f"{n}_share"] for n in ("symmetric", "damage", "excess"))
            low, high = shares["symmetric_low"], shares["symmetric_high"]
            _point(axes, share, y + 0.2, low, high, _COLOURS["derived"], "pair's own share", "o")
            _point(axes, damage, y, damage - sd, damage + sd, _COLOURS["damaged"], "matched random damage", "s")
            low, high = shares["excess_low"], shares["excess_high"]
            _point(axes, excess, y - 0.2, low, high, _COLOURS["excess"], "excess over damage", "D")
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [correction_label(c) for c in rows["correction"][::-1]])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("symmetric share of the gap (bars: 95 % interval; damage: ± sd over seeds)")
        gap = float(rows["gap"].iloc[0])
        axes.set_title(f"{pair}: share of the gap ({gap:.3f} nats/token) given back")
        _legend_once(figure, [axes])
    return figure


def gap_figure(losses: pd.DataFrame) -> Figure:
    """Draw mean `eval` losses of base, derived and damaged models, uncorrected and under each correction."""
    rows = losses[(losses["split"] == "eval") & losses["setting"].isna()]
    sums = rows.groupby(["member", "correction"], sort=False)[["loss_sum", "tokens"]].sum()
    means = (sums["loss_sum"] / sums["tokens"]).rename("loss").reset_index()
    kinds = [k for k in _LABELS if k in set(means["correction"])]
    figure, (axes,) = _figure(6.6, 3.2)
    with matplotlib.rc_context(_STYLE):
        for member, marker in (("base", "o"), ("derived", "D"), ("damaged", "s")):
            own = means[means["member"] == member].set_index("correction")["loss"].reindex(kinds)
            if own.notna().any():
                label = "matched damage (mean of seeds)" if member == "damaged" else member
                axes.plot(range(len(kinds)), own, marker=marker, color=_COLOURS[member], label=label, linewidth=1)
        axes.set_xticks(range(len(kinds)), [correction_label(k) for k in kinds], rotation=20, ha="right")
        axes.set_ylabel("loss on eval (nats per token)")
        axes.set_title(f"{rows['pair'].iloc[0]}: loss before and after each correction")
        axes.legend()
    return figure


def temperature_figure(recovery: pd.DataFrame) -> Figure:
    """Draw the fitted temperatures of base, derived and damaged models for the kinds that have one."""
    rows = recovery[recovery["correction"].isin(["temperature", "bias_temperature"])].reset_index(drop=True)
    figure, (axes,) = _figure(6.0, 0.9 + 0.5 * max(1, len(rows)))
    with matplotlib.rc_context(_STYLE):
        for i, row in rows.iterrows():
            y = len(rows) - 1 - int(str(i))
            values = _floats(row)
            for member, marker, column in (
                ("base", "o", "temperature_base"),
                ("derived", "D", "temperature_derived"),
                ("damaged", "s", "temperature_damage"),
            ):
                label = "matched random damage" if member == "damaged" else member
                _point(axes, values[column], y, np.nan, np.nan, _COLOURS[member], label, marker)
        axes.axvline(1.0, color="0.4", linewidth=0.8)
        names = [f"{r.pair}: {correction_label(str(r.correction))}" for r in rows.itertuples()]
        axes.set_yticks(range(len(rows)), names[::-1])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("fitted temperature T (1 = unchanged)")
        axes.set_title("Fitted temperatures")
        _legend_once(figure, [axes])
    return figure


def bias_figure(biases: pd.DataFrame, title: str) -> Figure:
    """Draw the largest biases. `biases` has `token` (decoded text), `bias` (nats) and `count` (targets in fit)."""
    figure, (axes,) = _figure(6.0, 0.9 + 0.19 * len(biases))
    with matplotlib.rc_context(_STYLE):
        colours = [_COLOURS["derived"] if b > 0 else _COLOURS["damaged"] for b in biases["bias"]]
        axes.barh(range(len(biases)), biases["bias"], color=colours)
        # a dollar sign would start a formula
        labels = [t.replace("$", r"\$") for t in biases["token"]]
        axes.set_yticks(range(len(biases)), labels, fontsize=7, family="monospace")
        axes.invert_yaxis()
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_xlabel("fitted bias (nats added to the token's logit)")
        axes.set_title(title)
    return figure


def published_figure(published: pd.DataFrame, recovery: pd.DataFrame) -> Figure:
    """Draw the published symmetric shares beside the pairs that have results here; the others say "not run here".

    `published` has the columns of data/published/pairs.csv. A published bound ("below 0.07") is drawn as an arrow.
    """
    pairs = [*published["pair"], *(p for p in recovery["pair"].unique() if p not in set(published["pair"]))]
    figure, axes = _figure(8.4, 1.2 + 0.27 * len(pairs), columns=2)
    published = published.set_index("pair")
    with matplotlib.rc_context(_STYLE):
        for ax, kind, prefix in ((axes[0], "bias", "bias"), (axes[1], "bias_temperature", "both")):
            own = recovery[recovery["correction"] == kind].set_index("pair")
            for y, pair in enumerate(reversed(pairs)):
                if pair in published.index:
                    _published_point(ax, published.loc[pair], prefix, y)
                if pair in own.index and np.isfinite(_floats(own.loc[pair])["symmetric_share"]):
                    values = _floats(own.loc[pair])
                    low, high = values["symmetric_low"], values["symmetric_high"]
                    _point(ax, values["symmetric_share"], y, low, high, _COLOURS["derived"], "here", "o")
                    _point(ax, values["damage_share"], y, np.nan, np.nan, _COLOURS["damaged"], "damage, here", "s")
                elif pair not in own.index:
                    ax.text(
                        1.0,
                        y,
                        "not run here",
                        transform=ax.get_yaxis_transform(),
                        ha="right",
                        va="center",
                        fontsize=6.5,
                    )
                else:
                    ax.text(1.0, y, "no gap", transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=6.5)
            ax.axvline(0.0, color="0.4", linewidth=0.8)
            ax.set_ylim(-0.6, len(pairs) - 0.4)
            ax.set_title(correction_label(kind))
            ax.set_xlabel("symmetric share of the gap (fraction)")
        axes[1].sharex(axes[0])
        axes[0].set_xlim(min(-0.1, axes[0].get_xlim()[0]), 0.5)
        axes[0].set_yticks(range(len(pairs)), list(reversed(pairs)))
        axes[1].set_yticks(range(len(pairs)), [])
        _legend_once(figure, axes)
    return figure


def _published_point(axes: Axes, row: pd.Series, prefix: str, y: float) -> None:
    value, below = row.get(f"{prefix}_symmetric"), row.get(f"{prefix}_below")
    grey = "0.35"
    if value is not None and np.isfinite(value):
        low, high = (row.get(f"{prefix}_{end}", np.nan) for end in ("low", "high"))
        _point(axes, float(value), y, float(low), float(high), grey, "published", "x")
    elif below is not None and np.isfinite(below):
        axes.plot([float(below)], [y], marker="<", linestyle="none", color=grey, label="published: below", markersize=4)


def _legend_once(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """Put one legend below the panels, each label once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def _floats(row: pd.Series) -> Mapping[str, float]:
    """Return the numeric entries of a table's row, NaN where they are null."""
    return {str(name): float(value) for name, value in pd.to_numeric(row, errors="coerce").items()}


def largest_biases(bias: Sequence[float], tokens: Sequence[str], counts: Sequence[int], n: int = 30) -> pd.DataFrame:
    """Return the `n` entries of largest |bias|, sorted from the largest to the smallest bias."""
    table = pd.DataFrame({"token": tokens, "bias": bias, "count": counts})
    order = table["bias"].abs().sort_values(ascending=False, kind="stable").index[:n]
    return table.loc[order].sort_values("bias", ascending=False, kind="stable").reset_index(drop=True)


def save_figure(figure: Figure, table: pd.DataFrame, path: Path) -> list[Path]:
    """Write a figure as SVG and PNG and the table behind it as CSV, all named after `path`; return the files."""
    named = [name for name in table.index.names if name is not None]
    table = table.reset_index() if named else table
    with matplotlib.rc_context(_STYLE):
        files = [path.with_suffix(suffix) for suffix in (".svg", ".png", ".csv")]
        write_atomically(files[0], lambda p: figure.savefig(p, format="svg", metadata={"Date": None}))
        write_atomically(files[1], lambda p: figure.savefig(p, format="png", dpi=200))
        write_atomically(files[2], lambda p: table.to_csv(p, index=False))
    return files
