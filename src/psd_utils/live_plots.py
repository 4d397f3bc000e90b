"""The explorer's live pictures: three small bqplot figures that follow a reading within a few milliseconds."""

import bqplot as bq
import ipywidgets as widgets
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.ticker import MaxNLocator

from .drawing import COLOURS
from .readings import Interval, Reading

_COLOURS = {member: to_hex(colour) for member, colour in COLOURS.items()}
_GREY = "#595959"
_FIFTHS = {"tick_values": [0, 0.2, 0.4, 0.6, 0.8, 1], "tick_format": ".1f"}


class LivePlots:
    """Loss over T, the reliability diagram, and the share; `view` shows them side by side."""

    def __init__(self) -> None:
        t, loss = bq.LogScale(min=0.5, max=2.0), bq.LinearScale()
        self._curve = bq.Lines(scales={"x": t, "y": loss}, stroke_width=2)
        self._base = bq.Lines(
            x=[0.5, 2.0], scales={"x": t, "y": loss}, colors=[_COLOURS["base"]], line_style="dashed", stroke_width=1
        )
        self._best = bq.Scatter(scales={"x": t, "y": loss}, colors=[_GREY], marker="cross", default_size=90)
        self._now = bq.Scatter(scales={"x": t, "y": loss}, default_size=110)
        self._losses = bq.Axis(
            scale=loss, orientation="vertical", label="nats per token", label_offset="45px", tick_format=".2f"
        )
        self.loss = self._figure(
            "Loss: ✚ lowest, ● shown, -- base",
            [self._base, self._curve, self._best, self._now],
            bq.Axis(scale=t, label="temperature T", tick_values=[0.5, 0.7, 1.0, 1.4, 2.0], tick_format=".1f"),
            self._losses,
            "psd-loss-plot",
        )
        x, y = bq.LinearScale(min=0, max=1), bq.LinearScale(min=0, max=1)
        diagonal = bq.Lines(x=[0, 1], y=[0, 1], scales={"x": x, "y": y}, colors=[_GREY], stroke_width=1)
        self._bins = bq.Scatter(scales={"x": x, "y": y, "size": bq.LinearScale(min=0)}, default_size=200)
        self.calibration = self._figure(
            "Calibration (size: tokens)",
            [diagonal, self._bins],
            bq.Axis(scale=x, label="probability of the likeliest token", **_FIFTHS),
            bq.Axis(scale=y, orientation="vertical", label="how often it is next", **_FIFTHS, label_offset="35px"),
            "psd-calibration-plot",
        )
        x, y = bq.LinearScale(), bq.LinearScale(min=-0.6, max=2.6)
        self._bars = bq.Lines(scales={"x": x, "y": y}, stroke_width=2, colors=[_GREY])
        self._values = bq.Scatter(scales={"x": x, "y": y}, default_size=90)
        zero = bq.Lines(x=[0, 0], y=[-0.6, 2.6], scales={"x": x, "y": y}, colors=[_GREY], stroke_width=1)
        self._shares = bq.Axis(scale=x, label="share of the gap", tick_format=".2f")
        self.share = self._figure(
            "Symmetric share, 95 % interval",
            [zero, self._bars, self._values],
            self._shares,
            bq.Axis(
                scale=y,
                orientation="vertical",
                tick_values=[0, 1, 2],
                tick_labels={"0": "study", "1": "damage", "2": "here"},
                grid_lines="none",
            ),
            "psd-share-plot",
        )
        self.view = widgets.HBox([self.loss, self.calibration, self.share], layout=widgets.Layout(flex_flow="row wrap"))

    def draw(self, reading: Reading, study_share: Interval) -> None:
        """Show a reading; beside its share, that of random damage and that of the whole study."""
        colour = _COLOURS[reading.choice.member.partition("-")[0]]
        with self._curve.hold_sync():
            self._curve.x, self._curve.y = reading.curve
            self._curve.colors = [colour]
        self._losses.tick_values = _ticks(reading.base_uncorrected, *reading.curve[1])
        self._base.y = np.full(2, reading.base_uncorrected)
        _place(self._best, [reading.best_temperature], [reading.best_loss], [_GREY])
        _place(self._now, [reading.temperature], [reading.loss], [colour])
        found = reading.reliability
        filled = found.counts > 0
        with self._bins.hold_sync():
            self._bins.x, self._bins.y = found.confidence[filled], found.accuracy[filled]
            self._bins.size, self._bins.colors = found.counts[filled], [colour]
        pairs = [(0, study_share, _GREY), (1, reading.damage_share, _COLOURS["damaged"]), (2, reading.share, colour)]
        shown = [(y, share, c) for y, share, c in pairs if np.isfinite(share.value)]
        _place(self._values, [share.value for _, share, _ in shown], [y for y, _, _ in shown], [c for *_, c in shown])
        self._shares.tick_values = _ticks(0.0, *(end for _, share, _ in shown for end in (share.low, share.high)))
        with self._bars.hold_sync():
            self._bars.x = np.array([[share.low, share.high] for _, share, _ in shown])
            self._bars.y = np.array([[y, y] for y, _, _ in shown], dtype=float)

    @staticmethod
    def _figure(title: str, marks: list, x: bq.Axis, y: bq.Axis, name: str) -> bq.Figure:
        figure = bq.Figure(
            title=title,
            marks=marks,
            axes=[x, y],
            animation_duration=0,
            fig_margin={"top": 48, "bottom": 45, "left": 60, "right": 15},
            layout=widgets.Layout(width="330px", height="270px"),
        )
        figure.add_class(name)
        return figure


def _ticks(*values: float) -> list[float]:
    """Return a few round numbers within the range of `values`."""
    low, high = min(values), max(values)
    return [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]


def _place(points: bq.Scatter, x: list[float], y: list[float], colours: list[str]) -> None:
    with points.hold_sync():
        points.x, points.y, points.colors = np.array(x, dtype=float), np.array(y, dtype=float), colours or [_GREY]
