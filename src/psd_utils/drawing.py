"""What all pictures share: one style, one meaning for each colour and marker, and how a picture is saved.

Colours come from seaborn's colour-blind palette. Marker shapes and fills repeat what colours say, for print in grey.
"""

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

STYLE = {
    **sns.axes_style("ticks"),
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "psd_utils",
}
COLOURS = dict(zip(("derived", "base", "damaged", "excess"), sns.color_palette("colorblind", 4), strict=True))
MARKERS = {"derived": "o", "base": "D", "damaged": "s", "excess": "v"}
OPEN = frozenset({"damaged"})
"""Whose markers are drawn hollow."""

_LABELS = {
    "none": "uncorrected",
    "temperature": "temperature",
    "prior_ratio": "prior ratio (one step)",
    "bias": "bias",
    "bias_temperature": "bias and temperature",
    "bias_all": "bias on all tokens",
}
KINDS = tuple(_LABELS)
_RUNGS = {
    "offset": "offset of the state",
    "scale_bias_all": "scale and bias per entry",
    "map_full": "full affine map of the state",
    "head": "head fitted anew",
}


def rung_label(name: str) -> str:
    """Return a rung of the ladder in words."""
    if name.startswith("map_rank_"):
        return f"affine map of rank {name.removeprefix('map_rank_')}"
    return _RUNGS.get(name, correction_label(name))


def correction_label(kind: str) -> str:
    """Return a kind of correction in words."""
    return _LABELS.get(kind, kind)


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1, **axes: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many inches and its axes row by row; `axes` goes to `Figure.subplots`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, columns, squeeze=False, **axes)
    return figure, list(panels.ravel())


def draw_point(
    axes: Axes,
    x: float,
    y: float,
    low: float,
    high: float,
    colour: object,
    label: str,
    marker: str,
    *,
    hollow: bool = False,
    upright: bool = False,
) -> None:
    """Draw a value with its interval along x, or along y where `upright`.

    Nothing is drawn where the value is not finite, and no bar where the interval is not.
    """
    if not np.isfinite([x, y]).all():
        return
    error: dict[str, Any] = {}
    if np.isfinite([low, high]).all():
        value = y if upright else x
        error = {"yerr" if upright else "xerr": np.array([[max(0.0, value - low)], [max(0.0, high - value)]])}
    style: dict[str, Any] = {"color": colour, "markerfacecolor": "white" if hollow else colour, "markersize": 5}
    axes.errorbar(x, y, **error, fmt=marker, label=label, capsize=2.5, linewidth=1.2, **style)


def draw_member(
    axes: Axes, member: str, x: float, y: float, low: float, high: float, label: str, *, upright: bool = False
) -> None:
    """Draw a value of a kind of model (a key of `COLOURS`) with its interval."""
    style = {"colour": COLOURS[member], "marker": MARKERS[member], "hollow": member in OPEN}
    draw_point(axes, x, y, low, high, label=label, upright=upright, **style)


def legend_once(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """Put one legend below the panels, each label once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns)


def words(figure: Figure, axes: Axes, text: str, title: str = "") -> Figure:
    """Return the figure with words in the place of a picture."""
    with matplotlib.rc_context(STYLE):
        axes.text(0.0, 0.5, text, ha="left", va="center", wrap=True, transform=axes.transAxes)
        axes.set_axis_off()
        axes.set_title(title)
    return figure


def floats(row: pd.Series) -> Mapping[str, float]:
    """Return the numeric entries of a table's row, NaN where they are null."""
    return {str(name): float(value) for name, value in pd.to_numeric(row, errors="coerce").items()}


def save_figure(figure: Figure, table: pd.DataFrame, path: Path) -> list[Path]:
    """Write a figure as SVG and PNG and the table behind it as CSV, all named after `path`; return the files."""
    named = [name for name in table.index.names if name is not None]
    table = table.reset_index() if named else table
    with matplotlib.rc_context(STYLE):
        files = [path.with_name(f"{path.name}{suffix}") for suffix in (".svg", ".png", ".csv")]
        write_atomically(files[0], lambda p: figure.savefig(p, format="svg", metadata={"Date": None}))
        write_atomically(files[1], lambda p: figure.savefig(p, format="png", dpi=200))
        write_atomically(files[2], lambda p: table.to_csv(p, index=False))
    return files
