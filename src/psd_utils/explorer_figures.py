"""The explorer's pictures as one still figure, for readers without a running kernel."""

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .drawing import COLOURS, MARKERS, STYLE, draw_member, draw_point, new_figure
from .readings import Interval, Reading


def reading_figure(reading: Reading, in_words: str, study_share: Interval) -> Figure:
    """Draw a reading: loss over T, reliability, and the share beside those of random damage and of the study."""
    figure, (loss, bins, share) = new_figure(10.0, 3.3, columns=3)
    member = reading.choice.member.partition("-")[0]
    with matplotlib.rc_context(STYLE):
        figure.suptitle(f"{in_words}; T = {reading.temperature:.2f}, bias × {reading.strength:.2f}", fontsize=10)
        loss.plot(*reading.curve, color=COLOURS[member])
        loss.plot(reading.best_temperature, reading.best_loss, "*", color="0.2", markersize=10, label="lowest")
        loss.plot(reading.temperature, reading.loss, MARKERS[member], color=COLOURS[member], label="shown")
        loss.axhline(
            reading.base_uncorrected, color=COLOURS["base"], linestyle="--", linewidth=1, label="base, as it is"
        )
        loss.set_xscale("log", base=2)
        loss.set_xticks([0.5, 1, 2], ["0.5", "1", "2"])
        loss.set_xlabel("temperature T")
        loss.set_ylabel("loss (nats per token)")
        loss.set_title(f"Loss over T: {reading.loss:.4f} shown")
        loss.legend(fontsize=7)
        found = reading.reliability
        bins.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
        sizes = 8 + 120 * found.counts / found.counts.max()
        bins.scatter(found.confidence, found.accuracy, s=sizes, color=COLOURS[member], alpha=0.8)
        bins.set_xlabel("probability of the likeliest token")
        bins.set_ylabel("how often it is the next one")
        bins.set_title(f"Calibration: error {found.error:.4f}")
        draw_point(share, study_share.value, 0, study_share.low, study_share.high, "0.35", "study", "x")
        here, damage = reading.share, reading.damage_share
        draw_member(share, "damaged", damage.value, 1, damage.low, damage.high, "random damage")
        draw_member(share, member, here.value, 2, here.low, here.high, "here")
        share.set_yticks([0, 1, 2], ["study,\nall of eval", "random\ndamage", "shown\nhere"])
        share.set_ylim(-0.6, 2.6)
        share.axvline(0.0, color="0.4", linewidth=0.8)
        share.set_xlabel("symmetric share of the gap")
        share.set_title("Share given back: " + (f"{here.value:.3f}" if np.isfinite(here.value) else "undefined"))
    return figure
