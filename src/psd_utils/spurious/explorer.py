"""The live explorer: move a slider, and the associative memory is trained again and shows its acts.

In: four settings. Out: a run of 1,500 steps at the stored matched rate, its numbers and its figure; and a
widget around them. Nothing here uses pyplot, so the widget's callbacks may run on any thread.
"""

import html
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from psd_utils.spurious.memory import MemorySettings, make_world
from psd_utils.spurious.plots import PALETTE, band, draw_acts, panels, png, step_axis
from psd_utils.spurious.rates import GRID, SEEDS, load_rates, stored_rate
from psd_utils.spurious.training import Pretrained, fine_tune, pretrain
from psd_utils.spurious.trajectory import Trajectory, checkpoint_steps

N_STEPS = 1500


@dataclass(frozen=True)
class Exploration:
    """One run of the explorer: its settings and what was measured."""

    settings: MemorySettings
    trajectory: Trajectory

    def numbers(self) -> pd.DataFrame:
        """Mean over seeds of the columns of Trajectory.summary that tell the acts, one row."""
        columns = [
            "rate",
            "trough",
            "trough_step",
            "new_at_trough",
            "max_after",
            "end",
            "peak_content",
            "end_content",
        ]
        return self.trajectory.summary()[columns].mean().to_frame("mean over seeds").T

    def figure(self) -> Figure:
        """Accuracies with the acts shaded, and the sizes of the common and the individual part."""
        figure, (left, right) = panels(2, width=5.0, height=3.4)
        s, run = self.settings, self.trajectory
        region = "Y (B′)" if s.new_answers == "Y" else "X and Y (C)"
        norm = "normaliser on" if s.normalisation == "rms" else "normaliser off"
        what = f"α = {s.alpha:g}, {s.n_new} new facts in {region}, {norm}"
        draw_acts(left, run, f"Accuracy, mean ± sd over {len(run.seeds)} seeds\n{what}")
        # lengths of the readout states differ a hundredfold with and without the normaliser: show raw states
        band(right, run, "shift_content", PALETTE[3], "--", "shift from X to Y, ⟨s,w⟩")
        band(right, run, "individual_h", PALETTE[4], "-.", "individual displacement of A")
        right.set_title("Shared shift and individual displacement,\nmean ± sd", loc="left")
        right.set_ylabel("length (units of the hidden state)")
        right.axhline(0, color="0.5", linewidth=0.8)
        right.legend(fontsize=8)
        step_axis(right, run.steps[-1])
        return figure


def explore(settings: MemorySettings, rates: pd.DataFrame, n_steps: int = N_STEPS) -> Exploration:
    """Fine-tune at the stored matched rate; pretraining is remembered for settings that share it.

    Raises:
        KeyError: settings without a stored rate.
    """
    rate = stored_rate(rates, settings)
    start = _pretrained(settings.before_fine_tuning)
    steps = checkpoint_steps(n_steps, n_log=25)
    run = fine_tune(make_world(settings, SEEDS), start.weights, rate, n_steps, checkpoints=steps)
    return Exploration(settings, run)


@lru_cache(maxsize=32)
def _pretrained(settings: MemorySettings) -> Pretrained:
    return pretrain(make_world(settings, SEEDS))


class Explorer:
    """Sliders for α, the number of new facts, the normaliser and the region of the new answers.

    Show `view` in a notebook. After the last move within 0.25 s the run starts; a move during a run makes
    its result be thrown away. Errors are shown under the sliders.

    Args:
        rates: table of stored rates; None reads the repository's own.
        compute: what a move calls.
    """

    def __init__(
        self,
        rates: pd.DataFrame | None = None,
        compute: Callable[[MemorySettings, pd.DataFrame], Exploration] = explore,
        delay: float = 0.25,
    ) -> None:
        self._rates = load_rates() if rates is None else rates
        self._compute, self._delay = compute, delay
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._move, self._timer = 0, None  # type: int, threading.Timer | None
        self._idle = threading.Event()
        self._idle.set()
        self.result: Exploration | None = None
        style, layout = {"description_width": "150px"}, widgets.Layout(width="440px")
        common = {"style": style, "layout": layout, "continuous_update": False}
        self.alpha = widgets.SelectionSlider(
            options=GRID["alpha"], value=0.5, description="shared fraction α", **common
        )
        self.n_new = widgets.SelectionSlider(options=GRID["n_new"], value=128, description="new facts", **common)
        self.normalisation = widgets.ToggleButtons(
            options=[("on", "rms"), ("off", "none")], description="normaliser", style=style
        )
        self.new_answers = widgets.ToggleButtons(
            options=[("Y (B′)", "Y"), ("X and Y (C)", "all")], description="new answers in", style=style
        )
        self.status = widgets.HTML()
        self.image = widgets.Image(format="png")
        controls = (self.alpha, self.n_new, self.normalisation, self.new_answers)
        self.view = widgets.VBox([*controls, self.status, self.image])
        for control in controls:
            control.observe(self._moved, names="value")

    def settings(self) -> MemorySettings:
        """The settings that the sliders now say."""
        return MemorySettings(
            alpha=self.alpha.value,
            n_new=self.n_new.value,
            normalisation=self.normalisation.value,
            new_answers=self.new_answers.value,
        )

    def start(self) -> Exploration:
        """Compute the first picture now, in the calling thread, and return its numbers."""
        self._run(self._move)
        if self.result is None:
            raise RuntimeError("The explorer's first run failed: " + self.status.value)
        return self.result

    def wait(self, timeout: float = 30.0) -> bool:
        """Wait until no move is waiting or running; False if that takes longer than the timeout, in
        seconds.
        """
        return self._idle.wait(timeout)

    def _moved(self, change: object) -> None:
        with self._lock:
            self._move += 1
            self._idle.clear()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._delay, self._run, args=(self._move,))
            self._timer.daemon = True
            self._timer.start()

    def _run(self, move: int) -> None:
        with self._running:
            if move != self._move:
                return
            try:
                self.status.value = "training …"
                found = self._compute(self.settings(), self._rates)
                image = png(found.figure())
                with self._lock:
                    if move == self._move:
                        self.result, self.image.value = found, image
                        self.status.value = _words(found)
            except Exception as error:
                with self._lock:
                    if move == self._move:
                        self.status.value = f"<b>Not computed:</b> {html.escape(repr(error))}"
            finally:
                if move == self._move:
                    self._idle.set()


def _words(found: Exploration) -> str:
    n = found.numbers().iloc[0]
    return (
        f"A falls to {n.trough:.2f} at step {n.trough_step:.0f} (new facts there: {n.new_at_trough:.2f}), "
        f"rises to {n.max_after:.2f}, ends at {n.end:.2f}. "
        f"⟨s,w⟩ peaks at {n.peak_content:.2f}, ends at {n.end_content:.2f}."
    )
