"""The pictures of 03_controls, from its tidy tables; as in `figures`, each returns a new Figure."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .drawing import (
    COLOURS,
    STYLE,
    correction_label,
    draw_member,
    draw_point,
    floats,
    legend_once,
    new_figure,
    rung_label,
    words,
)
from .worlds import WORLDS

_KINDS = ("temperature", "bias", "bias_temperature")
_KIND_COLOURS = dict(zip(_KINDS, (sns.color_palette("colorblind")[i] for i in (9, 5, 4)), strict=True))
_KIND_MARKERS = dict(zip(_KINDS, ("s", "o", "D"), strict=True))
_KIND_HATCHES = dict(zip(_KINDS, ("..", "//", "xx"), strict=True))
_CONTROLS = {
    "head_noise": "noise on the head",
    "hidden_noise": "noise on the final states",
    "permuted_difference": "own head change, permuted",
}
_CONTROL_COLOURS = dict(zip(_CONTROLS, sns.color_palette("colorblind", 10)[2:8:2], strict=True))
_CONTROL_MARKERS = dict(zip(_CONTROLS, ("s", "^", "P"), strict=True))


def control_label(control: str) -> str:
    """Return a kind of damage in words."""
    return _CONTROLS.get(control, control)


def worlds_figure(found: pd.DataFrame, judged: pd.DataFrame) -> Figure:
    """Draw, for each known-answer world, found shares and temperatures (mean ± sd over seeds) beside expected ones.

    `found` is the result of `run_worlds`, `judged` that of `judge`.
    """
    names = [name for name in WORLDS if name in set(found["world"])]
    figure, axes = new_figure(8.6, 1.2 + 0.52 * len(names), columns=2)
    with matplotlib.rc_context(STYLE):
        for y, name in enumerate(reversed(names)):
            own = found[found["world"] == name]
            claims = judged[judged["world"] == name]
            for offset, kind in zip((0.25, 0.0, -0.25), _KINDS, strict=True):
                rows = own[own["correction"] == kind]
                for ax, quantity in ((axes[0], "symmetric_share"), (axes[1], "temperature_derived")):
                    if quantity == "temperature_derived" and kind == "bias":
                        continue
                    values = rows[quantity].astype(float)
                    mean, sd = values.mean(), values.std(ddof=1) if len(values) > 1 else np.nan
                    colour, label = _KIND_COLOURS[kind], correction_label(kind)
                    draw_point(ax, mean, y + offset, mean - sd, mean + sd, colour, label, _KIND_MARKERS[kind])
                    for _, claim in claims[claims["quantity"] == f"{quantity}.{kind}"].iterrows():
                        _mark_claim(ax, claim, y + offset)
            if own["symmetric_share"].isna().all():
                axes[0].text(0.02, y, "no gap: the share is undefined", va="center", fontsize=7)
        axes[0].axvline(0.0, color="0.4", linewidth=0.8)
        axes[1].axvline(1.0, color="0.4", linewidth=0.8)
        axes[0].set_xlabel("symmetric share (bars: ± sd over seeds)")
        axes[1].set_xlabel("fitted temperature T")
        axes[0].set_title("Share given back")
        axes[1].set_title("T: noise alone gives 1.4")
        axes[0].set_yticks(range(len(names)), [WORLDS[name][0] for name in reversed(names)], fontsize=7.5)
        axes[1].set_yticks(range(len(names)), [])
        for ax in axes:
            ax.set_ylim(-0.6, len(names) - 0.4)
        legend_once(figure, axes)
    return figure


def _mark_claim(axes: Axes, claim: pd.Series, y: float) -> None:
    expected = pd.to_numeric(claim["expected"], errors="coerce")
    if np.isfinite(expected):
        axes.plot([expected], [y], marker="|", markersize=11, color="0.2", linestyle="none", label="expected")
    published = pd.to_numeric(claim["published"], errors="coerce")
    if np.isfinite(published):
        axes.plot([published], [y], marker="x", markersize=6, color="0.2", linestyle="none", label="published")


def damage_figure(table: pd.DataFrame) -> Figure:
    """Draw the pair's own share beside what each kind of matched damage gives back; `table` is controls.parquet."""
    rows = table[(table["analysis"] == "damage") & ~table["correction"].isin(["none", "bias_all"])]
    kinds = list(rows["correction"].unique())
    figure, (axes,) = new_figure(6.8, 1.3 + 0.6 * len(kinds))
    with matplotlib.rc_context(STYLE):
        if rows["symmetric_share"].isna().all():
            return words(figure, axes, str(rows["reason"].iloc[0]))
        offsets = dict(zip(_CONTROLS, (0.08, -0.1, -0.28), strict=True))
        for y, kind in enumerate(reversed(kinds)):
            own = rows[rows["correction"] == kind]
            first = floats(own.iloc[0])
            low, high = first["symmetric_low"], first["symmetric_high"]
            draw_member(axes, "derived", first["symmetric_share"], y + 0.26, low, high, "pair's own share")
            for _, row in own.iterrows():
                values, control = floats(row), str(row["control"])
                share, sd = values["damage_share"], values["damage_sd"]
                label = f"damage: {control_label(control)}"
                colour, marker = _CONTROL_COLOURS[control], _CONTROL_MARKERS[control]
                low, high = share - sd, share + sd
                draw_point(axes, share, y + offsets[control], low, high, colour, label, marker, hollow=True)
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(kinds)), [correction_label(k) for k in reversed(kinds)])
        axes.set_ylim(-0.6, len(kinds) - 0.4)
        axes.set_xlabel("symmetric share of the gap (own: 95 % interval; damage: ± sd over seeds)")
        axes.set_title(f"{table['pair'].iloc[0]}: what matched damage of other kinds gives back")
        legend_once(figure, [axes], columns=2)
    return figure


def ladder_figure(table: pd.DataFrame) -> Figure:
    """Draw the share that each rung of the ladder gives back; `table` is controls.parquet."""
    rows = table[(table["analysis"] == "ladder") & (table["correction"] != "none")].reset_index(drop=True)
    figure, (axes,) = new_figure(7.2, 1.2 + 0.42 * len(rows))
    with matplotlib.rc_context(STYLE):
        if rows["symmetric_share"].isna().all():
            return words(figure, axes, str(rows["reason"].iloc[0]))
        labels = []
        for i, row in rows.iterrows():
            y, values = len(rows) - 1 - int(str(i)), floats(row)
            low, high = values["symmetric_low"], values["symmetric_high"]
            draw_member(axes, "derived", values["symmetric_share"], y + 0.12, low, high, "pair's own share")
            share = values["damage_share"]
            draw_member(axes, "damaged", share, y - 0.12, np.nan, np.nan, "matched noise on the head")
            labels.append(f"{rung_label(str(row['correction']))} ({values['parameters']:,.0f})")
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.axvline(1.0, color="0.4", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), labels[::-1])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("symmetric share (bars: 95 % interval); in brackets: free parameters")
        axes.set_title(f"{table['pair'].iloc[0]}: share given back, rung by rung")
        legend_once(figure, [axes])
    return figure


def left_out_figure(left_out: pd.DataFrame) -> Figure:
    """Draw the probability mass by group of tokens before and after correction; `left_out` is left_out.parquet."""
    outside = left_out[left_out["group"] != "set"]
    figure, axes = new_figure(7.4, 2.9, columns=2)
    positive = outside.loc[outside["mass"] > 0, "mass"]
    floor = 10 ** np.floor(np.log10(positive.min())) if len(positive) else 1e-6
    with matplotlib.rc_context(STYLE):
        for ax, member in zip(axes, ("base", "derived"), strict=True):
            own = outside[outside["member"] == member]
            groups, kinds = list(own["group"].unique()), list(own["correction"].unique())
            for k, kind in enumerate(kinds):
                heights = own[own["correction"] == kind].set_index("group").loc[groups]
                x = np.arange(len(groups)) + (k - (len(kinds) - 1) / 2) * 0.25
                style = {
                    "color": _KIND_COLOURS.get(kind, "0.6"),
                    "hatch": _KIND_HATCHES.get(kind),
                    "edgecolor": "white",
                }
                ax.bar(x, heights["mass"].clip(lower=floor), 0.24, label=correction_label(kind), **style)
            counts = own[own["correction"] == kinds[0]].set_index("group")["tokens"]
            share = left_out[(left_out["member"] == member) & (left_out["correction"] == kinds[0])]["tokens"].sum()
            for place, group in enumerate(groups):
                ax.plot([place - 0.4, place + 0.4], [max(counts[group] / share, floor)] * 2, color="0.2", linewidth=1)
            ax.plot([], [], color="0.2", linewidth=1, label="share of the targets")
            ax.set_yscale("log")
            ax.set_ylim(bottom=floor)
            ax.set_xticks(range(len(groups)), groups)
            ax.set_title(member)
        axes[0].set_ylabel("mean probability (at the floor: less)")
        legend_once(figure, axes)
    return figure


def sensitivity_figure(table: pd.DataFrame) -> Figure:
    """Draw the share against the size of the set, λ, the amount of `fit` text, and by text (controls.parquet)."""
    rows = table[table["analysis"] == "sensitivity"]
    panels: Sequence[tuple[str, str]] = (
        ("top_k=", "tokens in the set"),
        ("penalty=", "penalty λ, not selected"),
        ("fit_tokens=", "tokens of fit text"),
        ("", "other choices"),
    )
    prefixes = tuple(prefix for prefix, _ in panels if prefix)
    figure, axes = new_figure(11.0, 3.6, columns=4, sharey=True)
    with matplotlib.rc_context(STYLE):
        for ax, (prefix, title) in zip(axes, panels, strict=True):
            chosen = rows["setting"].str.startswith(prefix) if prefix else ~rows["setting"].str.startswith(prefixes)
            own = rows[chosen]
            settings = list(own["setting"].unique())
            for offset, kind in ((-0.12, "bias"), (0.12, "bias_temperature")):
                for x, setting in enumerate(settings):
                    found = own[(own["setting"] == setting) & (own["correction"] == kind)]
                    if not found.empty:
                        _upright(ax, x + offset, floats(found.iloc[0]), kind)
            ax.axhline(0.0, color="0.4", linewidth=0.8)
            labels = [s.removeprefix(prefix).replace(", fitted on", ",\nfitted on") for s in settings]
            ax.set_xticks(range(len(settings)), labels, rotation=30, ha="right", fontsize=7)
            ax.set_xlim(-0.5, max(len(settings), 1) - 0.5)
            ax.set_title(title)
        axes[0].set_ylabel("symmetric share of the gap")
        axes[0].plot([], [], "s", color="0.4", markerfacecolor="white", markersize=4, label="matched damage, hollow")
        legend_once(figure, axes)
    return figure


def _upright(axes: Axes, x: float, values: Mapping[str, float], kind: str) -> None:
    low, high = values["symmetric_low"], values["symmetric_high"]
    colour, marker, label = _KIND_COLOURS[kind], _KIND_MARKERS[kind], correction_label(kind)
    draw_point(axes, x, values["symmetric_share"], low, high, colour, label, marker, upright=True)
    if np.isfinite(values["damage_share"]):
        axes.plot(x, values["damage_share"], marker, color=colour, markerfacecolor="white", markersize=4)


def in_sample_figure(table: pd.DataFrame) -> Figure:
    """Draw each correction's share on the text it was fitted on beside that on `eval` (controls.parquet)."""
    rows = table[(table["analysis"] == "in-sample") & (table["correction"] != "none")]
    kinds = list(rows["correction"].unique())
    figure, (axes,) = new_figure(6.4, 1.2 + 0.45 * len(kinds))
    with matplotlib.rc_context(STYLE):
        if rows["symmetric_share"].isna().all():
            return words(figure, axes, str(rows["reason"].iloc[0]))
        for y, kind in enumerate(reversed(kinds)):
            for offset, split, marker in ((0.15, "fit", "s"), (-0.15, "eval", "o")):
                values = floats(rows[(rows["correction"] == kind) & (rows["split"] == split)].iloc[0])
                low, high = values["symmetric_low"], values["symmetric_high"]
                colour = COLOURS["derived"] if split == "eval" else "0.5"
                label = "on eval (reported)" if split == "eval" else "on fit (in sample)"
                share, hollow = values["symmetric_share"], split == "fit"
                draw_point(axes, share, y + offset, low, high, colour, label, marker, hollow=hollow)
        axes.axvline(0.0, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(kinds)), [correction_label(k) for k in reversed(kinds)])
        axes.set_ylim(-0.6, len(kinds) - 0.4)
        axes.set_xlabel("symmetric share of the gap (bars: 95 % interval)")
        axes.set_title(f"{table['pair'].iloc[0]}: in sample and out of sample")
        legend_once(figure, [axes])
    return figure


def coverage_figure(coverage: pd.DataFrame) -> Figure:
    """Draw how often the nominal 95 % interval covers the true share; `coverage` is data/controls/coverage.csv."""
    shares = list(coverage["share"].unique())
    figure, axes = new_figure(8.0, 2.9, columns=len(shares))
    with matplotlib.rc_context(STYLE):
        for ax, share in zip(axes, shares, strict=True):
            for method, colour in (("percentile", COLOURS["derived"]), ("expanded", COLOURS["excess"])):
                own = coverage[(coverage["share"] == share) & (coverage["method"] == method)]
                ax.plot(own["documents"], own["symmetric_coverage"], marker="o", color=colour, label=method)
            ax.axhspan(0.92, 0.98, color="0.9", zorder=0)
            ax.axhline(0.95, color="0.4", linewidth=0.8)
            ax.set_xscale("log")
            ticks = list(own["documents"])
            ax.set_xticks(ticks, [str(n) for n in ticks], fontsize=7)
            ax.minorticks_off()
            ax.set_xlabel("documents")
            ax.set_title(f"true share {own['true_share'].iloc[0]:.2f}")
        axes[0].set_ylabel("intervals that cover it")
        legend_once(figure, axes)
    return figure
