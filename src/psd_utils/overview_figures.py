"""Pictures of many pairs beside each other, from their recovery tables; each returns a new Figure.

Every picture of shares has one axis that contains 0. Pairs are ordered by their gap, the largest first.
"""

from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .drawing import (
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

FOREST_KINDS = ("temperature", "bias", "bias_temperature", "bias_all")
_TITLES = {
    "temperature": "temperature",
    "bias": "bias",
    "bias_temperature": "both",
    "bias_all": "bias on all tokens",
}


def by_gap(recovery: pd.DataFrame) -> list[str]:
    """Return the pairs of a recovery table, the largest gap first."""
    gaps = recovery.drop_duplicates("pair").set_index("pair")["gap"].astype(float)
    return [str(pair) for pair in gaps.sort_values(ascending=False, kind="stable").index]


def _by_pair(recovery: pd.DataFrame, kind: str) -> dict[str, Mapping[str, float]]:
    """Return the numbers of one kind of correction, by pair."""
    return {str(row["pair"]): floats(row) for _, row in recovery[recovery["correction"] == kind].iterrows()}


def forest_figure(recovery: pd.DataFrame) -> Figure:
    """Draw symmetric shares with their intervals beside matched damage, a row per pair and a panel per correction.

    The last panel is the excess share of bias and temperature. All panels share one axis, a fraction of the gap.
    """
    pairs = by_gap(recovery)
    panels = [*FOREST_KINDS, "excess"]
    figure, axes = new_figure(11.2, 1.5 + 0.34 * len(pairs), columns=len(panels), sharex=True, sharey=True)
    gaps = recovery.drop_duplicates("pair").set_index("pair")["gap"].astype(float)
    with matplotlib.rc_context(STYLE):
        for ax, panel in zip(axes, panels, strict=True):
            kind = "bias_temperature" if panel == "excess" else panel
            values = _by_pair(recovery, kind)
            for y, pair in enumerate(reversed(pairs)):
                _forest_row(ax, panel, values[pair], y)
            ax.axvline(0.0, color="0.4", linewidth=0.8)
            ax.set_title("both: share − damage" if panel == "excess" else _TITLES[kind])
        axes[0].set_yticks(range(len(pairs)), [f"{p} ({gaps[p]:+.3f})" for p in reversed(pairs)])
        axes[0].set_ylim(-0.6, len(pairs) - 0.4)
        figure.suptitle("Share of the gap given back, by pair (gap in nats per token)", x=0.01, ha="left", fontsize=11)
        axes[2].set_xlabel("fraction of the gap (bars: 95 % interval; damage: ± sd over seeds)")
        legend_once(figure, axes)
    return figure


def _forest_row(axes: Axes, panel: str, values: Mapping[str, float], y: float) -> None:
    share = values["symmetric_share"]
    if not np.isfinite(share):
        axes.text(0.0, y, "no gap", ha="center", va="center", fontsize=7, backgroundcolor="white")
    elif panel == "excess":
        low, high = values["excess_low"], values["excess_high"]
        draw_member(axes, "excess", values["excess_share"], y, low, high, "excess over damage")
    else:
        low, high = values["symmetric_low"], values["symmetric_high"]
        draw_member(axes, "derived", share, y + 0.13, low, high, "pair's own share")
        damage, sd = values["damage_share"], values["damage_sd"]
        draw_member(axes, "damaged", damage, y - 0.13, damage - sd, damage + sd, "matched random damage")


def gap_share_table(recovery: pd.DataFrame, kind: str = "bias_temperature") -> pd.DataFrame:
    """Return gap and shares of one kind of correction, a row per pair with a share, the largest gap first."""
    rows = recovery[(recovery["correction"] == kind) & recovery["symmetric_share"].notna()]
    columns = ["pair", "correction", "gap", "gap_low", "gap_high", "symmetric_share", "symmetric_low", "symmetric_high"]
    columns += ["damage_share", "damage_sd"]
    return rows[columns].sort_values("gap", ascending=False, kind="stable").reset_index(drop=True)


def gap_share_figure(recovery: pd.DataFrame, published: pd.DataFrame | None = None) -> Figure:
    """Draw the share of bias and temperature against the gap, a point per pair, with its matched damage.

    `published` (columns of data/published/pairs.csv) adds the published pairs whose gap and share are both known. The
    title says the rank correlation of gap and share over the pairs run here, where there are three or more.
    """
    table = gap_share_table(recovery)
    figure, (axes,) = new_figure(6.6, 4.2)
    if table.empty:
        return words(figure, axes, "no pair has a gap, so none has a share", "Share against gap")
    names: list[tuple[str, float, float]] = []
    with matplotlib.rc_context(STYLE):
        for _, row in table.iterrows():
            values, x = floats(row), float(row["gap"])
            axes.plot([x, x], [values["symmetric_share"], values["damage_share"]], color="0.8", linewidth=1, zorder=0)
            low, high = values["symmetric_low"], values["symmetric_high"]
            draw_member(axes, "derived", x, values["symmetric_share"], low, high, "pair's own share", upright=True)
            damage, sd = values["damage_share"], values["damage_sd"]
            low, high = damage - sd, damage + sd
            draw_member(axes, "damaged", x, damage, low, high, "matched random damage", upright=True)
            names.append((str(row["pair"]), x, values["symmetric_share"]))
        if published is not None:
            known = published[published["gap_nats"].notna() & published["both_symmetric"].notna()]
            for _, row in known.iterrows():
                at = (float(row["gap_nats"]), float(row["both_symmetric"]))
                draw_point(axes, *at, np.nan, np.nan, "0.35", "published", "x")
                names.append((str(row["pair"]), *at))
        axes.axhline(0.0, color="0.4", linewidth=0.8)
        axes.set_xlim(0.0, axes.get_xlim()[1] * 1.12)
        _write_names(axes, names)
        axes.set_xlabel("loss gap, derived − base (nats per token)")
        axes.set_ylabel("symmetric share of the gap (fraction)")
        title = "Bias and temperature: share against gap"
        if len(table) > 2:
            ranks = table["gap"].rank().corr(table["symmetric_share"].rank())
            title += f" (rank correlation {ranks:+.2f}, {len(table)} pairs here)"
        axes.set_title(title)
        legend_once(figure, [axes])
    return figure


def _write_names(axes: Axes, names: list[tuple[str, float, float]]) -> None:
    """Write each name to the right of its point, moved up where it would lie on another name."""
    placed: list[tuple[float, float]] = []
    for text, x, y in sorted(names, key=lambda name: (name[2], name[1])):
        at_x, at_y = axes.transData.transform((x, y))
        up = 0.0
        while any(abs(at_x - px) < 80 and abs(at_y + up - py) < 13 for px, py in placed):
            up += 2.0
        placed.append((at_x, at_y + up))
        offset = (6, up * 72 / axes.figure.dpi)
        axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=7.5, va="center", color="0.25")


def temperature_figure(recovery: pd.DataFrame) -> Figure:
    """Draw the fitted temperatures of base, derived and damaged models, a row per pair and a panel per correction."""
    pairs = by_gap(recovery)
    kinds = ("temperature", "bias_temperature")
    figure, axes = new_figure(7.6, 1.35 + 0.3 * max(1, len(pairs)), columns=2, sharex=True, sharey=True)
    with matplotlib.rc_context(STYLE):
        for ax, kind in zip(axes, kinds, strict=True):
            found = _by_pair(recovery, kind)
            for y, pair in enumerate(reversed(pairs)):
                values = found[pair]
                for member, shift in (("base", 0.2), ("derived", 0.0), ("damaged", -0.2)):
                    name = "damage" if member == "damaged" else member
                    label = "matched random damage (mean of seeds)" if member == "damaged" else member
                    draw_member(ax, member, values[f"temperature_{name}"], y + shift, np.nan, np.nan, label)
            ax.axvline(1.0, color="0.4", linewidth=0.8)
            ax.set_title(f"fitted with {'no bias' if kind == 'temperature' else 'a bias'}")
            ax.set_xlabel("T (1 = unchanged)")
        axes[0].set_yticks(range(len(pairs)), list(reversed(pairs)))
        axes[0].set_ylim(-0.6, len(pairs) - 0.4)
        figure.suptitle("Fitted temperature T; above 1 the logits are too far apart", x=0.01, ha="left", fontsize=10)
        legend_once(figure, axes)
    return figure


def ladders_figure(controls: pd.DataFrame) -> Figure:
    """Draw the share that each rung of the ladder gives back, a panel per pair, all on one axis, a fraction of the gap.

    `controls` holds the controls.parquet of one or more pairs; pairs whose ladder has no share are left out.
    """
    rows = controls[(controls["analysis"] == "ladder") & (controls["correction"] != "none")]
    rows = rows[rows["symmetric_share"].notna()]
    pairs = by_gap(rows) if len(rows) else []
    if not pairs:
        figure, (axes,) = new_figure(6.0, 0.9)
        return words(figure, axes, "no pair has a ladder with shares: run 03_controls", "The ladder")
    rungs = list(rows.drop_duplicates("correction")["correction"])
    sizes = rows.drop_duplicates("correction").set_index("correction")["parameters"].astype(float)
    width = max(6.6, 2.9 + 1.75 * len(pairs))
    figure, panels = new_figure(width, 1.5 + 0.24 * len(rungs), columns=len(pairs), sharex=True, sharey=True)
    with matplotlib.rc_context(STYLE):
        for ax, pair in zip(panels, pairs, strict=True):
            own = rows[rows["pair"] == pair]
            for _, row in own.iterrows():
                y, values = len(rungs) - 1 - rungs.index(row["correction"]), floats(row)
                low, high = values["symmetric_low"], values["symmetric_high"]
                draw_member(ax, "derived", values["symmetric_share"], y + 0.12, low, high, "pair's own share")
                damage = values["damage_share"]
                draw_member(ax, "damaged", damage, y - 0.12, np.nan, np.nan, "matched noise on the head")
            ax.axvline(0.0, color="0.4", linewidth=0.8)
            ax.set_title(f"{pair}\n({float(own['gap'].iloc[0]):.3f} nats/token)", fontsize=8.5)
        labels = [f"{rung_label(str(name))} ({sizes[name]:,.0f})" for name in reversed(rungs)]
        panels[0].set_yticks(range(len(rungs)), labels)
        panels[0].set_ylim(-0.6, len(rungs) - 0.4)
        panels[0].set_xlim(left=min(-0.05, panels[0].get_xlim()[0]))
        panels[len(pairs) // 2].set_xlabel("symmetric share of the gap (fraction; bars: 95 % interval)")
        title = "Share of the gap that ever richer output-layer corrections give back (in brackets: parameters)"
        figure.suptitle(title if len(pairs) > 2 else "Share given back, rung by rung", x=0.01, ha="left", fontsize=10)
        legend_once(figure, panels)
    return figure


def published_figure(published: pd.DataFrame, recovery: pd.DataFrame) -> Figure:
    """Draw the published symmetric shares beside the pairs that have results here; the others say "not run here".

    `published` has the columns of data/published/pairs.csv. A published bound ("below 0.07") is drawn as an arrow.
    """
    pairs = [*published["pair"], *(p for p in recovery["pair"].unique() if p not in set(published["pair"]))]
    figure, axes = new_figure(8.4, 1.4 + 0.24 * len(pairs), columns=2, sharex=True, sharey=True)
    published = published.set_index("pair")
    with matplotlib.rc_context(STYLE):
        for ax, kind, prefix in ((axes[0], "bias", "bias"), (axes[1], "bias_temperature", "both")):
            own = _by_pair(recovery, kind)
            for y, pair in enumerate(reversed(pairs)):
                if pair in published.index:
                    _published_point(ax, published.loc[pair], prefix, y)
                values = own.get(pair)
                if values is not None and np.isfinite(values["symmetric_share"]):
                    low, high = values["symmetric_low"], values["symmetric_high"]
                    draw_member(ax, "derived", values["symmetric_share"], y, low, high, "here")
                    draw_member(ax, "damaged", values["damage_share"], y, np.nan, np.nan, "matched damage, here")
                else:
                    note = "not run here" if values is None else "no gap"
                    ax.text(1.0, y, note, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=6.5)
            ax.axvline(0.0, color="0.4", linewidth=0.8)
            ax.set_title(f"corrected by {correction_label(kind)}")
            ax.set_xlabel("symmetric share of the gap (fraction)")
        left, right = axes[0].get_xlim()
        axes[0].set_xlim(min(-0.05, left), max(0.45, right) + 0.1)
        figure.suptitle("Published shares of the gap, and those found here", x=0.01, ha="left", fontsize=11)
        axes[0].set_yticks(range(len(pairs)), list(reversed(pairs)))
        axes[0].set_ylim(-0.6, len(pairs) - 0.4)
        legend_once(figure, axes)
    return figure


def _published_point(axes: Axes, row: pd.Series, prefix: str, y: float) -> None:
    value, below = row.get(f"{prefix}_symmetric"), row.get(f"{prefix}_below")
    grey = "0.35"
    if value is not None and np.isfinite(value):
        low, high = (row.get(f"{prefix}_{end}", np.nan) for end in ("low", "high"))
        draw_point(axes, float(value), y, float(low), float(high), grey, "published", "x")
    elif below is not None and np.isfinite(below):
        label = "published: below this"
        axes.plot([float(below)], [y], marker="<", linestyle="none", color=grey, label=label, markersize=4)
