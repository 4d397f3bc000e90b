"""The explorer of a pair: sliders and menus over stored statistics, with live pictures and no model."""

import base64
import html
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .document_view import COLOURINGS, SORTS, bias_html, document_html, ordered_biases
from .drawing import correction_label
from .exploration import OF_A_SET, TEMPERATURES, Exploration
from .explorer_figures import reading_figure
from .live_plots import LivePlots
from .readings import Choice, Reading
from .study import Study

_OWN_SET = 0  # a menu shows nothing for None
_MEMBERS = {"base": "base", "derived": "derived", "damaged-0": "randomly damaged base"}


def explore(study: Study) -> "Explorer":
    """Return the explorer of a finished study: as the last line of a notebook's cell it shows itself.

    Its statistics are stored beside the study's results; where they are missing they are made from the captures.

    Raises:
        PsdError: neither statistics nor captures are there, or a stored file is damaged.
    """
    return Explorer(Exploration(study))


class Explorer:
    """Controls, read-outs, pictures, a document and the biases of one study; `view` is the widget.

    Callbacks may come from any thread: they take turns, read all controls anew, and show what went wrong.
    """

    def __init__(self, exploration: Exploration) -> None:
        self.exploration = exploration
        self._turn = threading.RLock()
        self._setting: int | None = None
        self._make_controls()
        self.status, self.readouts = widgets.HTML(), widgets.HTML()
        self.plots = LivePlots()
        self.text = widgets.HTML(layout=widgets.Layout(max_height="320px", overflow="auto", width="98%"))
        self.biases = widgets.HTML(layout=widgets.Layout(max_height="320px", overflow="auto"))
        for name in ("status", "readouts", "text", "biases"):
            getattr(self, name).add_class(f"psd-{name}")
        self.view = self._layout()
        self._kinds_of_member()
        self._take_fitted()
        self.reading: Reading | Any = None
        self._draw()
        self._observe(self._take_menus, self.member, self.kind, self.top_k)
        self._observe(self._draw, self.temperature, self.strength)
        self._observe(self._draw_document, self.document, self.colouring)
        self._observe(self._find_biases, self.search, self.sort)
        self.reset.on_click(lambda _: self._safely(self._take_menus))

    def _make_controls(self) -> None:
        style, layout = {"description_width": "110px"}, widgets.Layout(width="420px")
        common: dict[str, Any] = {"style": style, "layout": layout}
        found = self.exploration
        own = found.study.summary["fits"]["base"]["bias"]["set_size"]
        members = [(_MEMBERS[m], m) for m in found.members]
        low, high = TEMPERATURES
        self.member = widgets.Dropdown(options=members, value="derived", description="model", **common)
        self.kind = widgets.Dropdown(description="correction", **common)
        sizes = [(f"{own} (the study's)", _OWN_SET)]
        sizes += [(f"{k} (fitted anew)", k) for k in reversed(found.set_sizes())]
        self.top_k = widgets.Dropdown(options=sizes, description="ids K", **common)
        self.temperature = widgets.FloatSlider(1.0, min=low, max=high, step=0.01, description="temperature T", **common)
        self.strength = widgets.FloatSlider(1.0, min=0.0, max=1.0, step=0.01, description="bias strength", **common)
        self.reset = widgets.Button(description="back to the fitted values", layout=widgets.Layout(width="auto"))
        offsets = found.subsample.offsets.diff().tolist()
        documents = [
            (f"{key} ({n:,} tokens)", i) for i, (key, n) in enumerate(zip(found.subsample.keys, offsets, strict=True))
        ]
        self.document = widgets.Dropdown(options=documents, description="document", **common)
        self.colouring = widgets.ToggleButtons(options=list(COLOURINGS), description="colour by", style=style)
        self.search = widgets.Text(placeholder="part of a token", description="search", **common)
        self.sort = widgets.Dropdown(options=list(SORTS), description="order", **common)
        controls = (
            "member",
            "kind",
            "top_k",
            "temperature",
            "strength",
            "document",
            "colouring",
            "search",
            "sort",
            "reset",
        )
        for name in controls:
            getattr(self, name).add_class(f"psd-{name.replace('_', '-')}")

    def _layout(self) -> widgets.VBox:
        menus = widgets.VBox([self.member, self.kind, self.top_k, self.temperature, self.strength, self.reset])
        top = widgets.HBox([menus, self.readouts], layout=widgets.Layout(flex_flow="row wrap"))
        document = widgets.VBox([widgets.HTML("<b>A document of eval</b>"), self.document, self.colouring, self.text])
        biases = widgets.VBox([widgets.HTML("<b>The fitted biases</b>"), self.search, self.sort, self.biases])
        whole = widgets.VBox([top, self.status, self.plots.view, document, biases])
        whole.add_class("psd-explorer")
        return whole

    def choice(self) -> Choice:
        """Return what the controls now say; a slider at its fitted place stands for the fitted value itself."""
        member, kind = self.member.value, self.kind.value
        top_k = (self.top_k.value or None) if kind in OF_A_SET else None
        fitted = self.exploration.fitted(member, kind, top_k)
        # the browser adds rounding errors to a slider's steps
        temperature, strength = round(self.temperature.value, 2), round(self.strength.value, 2)
        as_fitted = temperature == _place(fitted.correction.temperature)
        return Choice(member, kind, top_k, None if as_fitted else temperature, None if strength == 1.0 else strength)

    def figure(self) -> Figure:
        """Return the pictures as they now are, as one still figure."""
        choice = self.reading.choice
        return reading_figure(self.reading, self.exploration.words(choice), self.exploration.study_share(choice))

    def table(self) -> pd.DataFrame:
        """Return the numbers that are now shown."""
        return self.reading.table()

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """Return the widget, and for viewers without a kernel the still figure."""
        bundle: dict[str, Any] = self.view._repr_mimebundle_(**options)
        picture = io.BytesIO()
        self.figure().savefig(picture, format="png")
        return bundle | {"image/png": base64.b64encode(picture.getvalue()).decode()}

    # ---- what the controls set off

    def _observe(self, action: Callable[[], object], *controls: widgets.Widget) -> None:
        for control in controls:
            control.observe(lambda _: self._safely(action), names="value")

    def _safely(self, action: Callable[[], object]) -> None:
        """Run an action in turn; an error is shown, since nobody would see it otherwise."""
        if self._setting == threading.get_ident():
            return  # set by ourselves, not by the user
        with self._turn:
            try:
                action()
            except Exception as error:
                self.status.value = f'<b style="color:#b00">Not shown:</b> {html.escape(str(error) or repr(error))}'

    @contextmanager
    def _setting_controls(self) -> Iterator[None]:
        """Change controls without setting off their callbacks; changes from other threads still do."""
        self._setting = threading.get_ident()
        try:
            yield
        finally:
            self._setting = None

    def _take_menus(self) -> None:
        self.status.value = "fitting …" if self.top_k.value else "…"
        self._kinds_of_member()
        self._take_fitted()
        self._draw()

    def _kinds_of_member(self) -> None:
        kinds = self.exploration.kinds(self.member.value)
        kept = self.kind.value if self.kind.value in kinds else "bias_temperature"
        with self._setting_controls():
            if [value for _, value in self.kind.options] != list(kinds):
                self.kind.options = [(correction_label(k), k) for k in kinds]
            self.kind.value = kept
        self.top_k.disabled = kept not in OF_A_SET

    def _take_fitted(self) -> None:
        """Set the sliders to the fitted values."""
        fitted = self.exploration.fitted(self.member.value, self.kind.value, self.top_k.value or None)
        with self._setting_controls():
            self.temperature.value, self.strength.value = _place(fitted.correction.temperature), 1.0
        self.strength.disabled = not fitted.correction.ids.numel()

    def _draw(self) -> None:
        choice = self.choice()
        before, self.reading = self.reading, self.exploration.reading(choice)
        self.plots.draw(self.reading, self.exploration.study_share(choice))
        self.readouts.value = _table_html(self.reading.table())
        self._draw_document()
        if before is None or before.fitted is not self.reading.fitted:
            self._find_biases()
        elif before.strength != self.reading.strength:
            self._draw_biases()
        self.status.value = f"<b>{html.escape(self.exploration.words(choice))}</b>: {html.escape(self.reading.origin)}"

    def _draw_document(self) -> None:
        tokens = self.exploration.document(self.document.value)
        values = {
            "loss": self.reading.token_loss,
            "lost": self.reading.token_lost,
            "given back": self.reading.token_given_back,
        }[self.colouring.value][tokens]
        colouring = COLOURINGS[self.colouring.value]
        self.text.value = document_html(self.exploration.tokens(self.document.value), values, colouring)

    def _find_biases(self) -> None:
        biases = self.exploration.biases(self.reading.fitted)
        self._found_biases = ordered_biases(biases, self.search.value, self.sort.value)
        self._draw_biases()

    def _draw_biases(self) -> None:
        self.biases.value = bias_html(self._found_biases, self.reading.strength)


def _place(temperature: float) -> float:
    """Return where the slider stands for a fitted T."""
    return round(min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1]), 2)


def _table_html(table: pd.DataFrame) -> str:
    rows = ""
    for row in table.to_dict("records"):
        value = f"{row['value']:.4f}" if np.isfinite(row["value"]) else "–"
        interval = f" [{row['low']:.4f}, {row['high']:.4f}]" if np.isfinite(row["low"]) else ""
        quantity, note = str(row["quantity"]), html.escape(str(row["note"]))
        name = quantity.replace(" ", "-").replace(",", "")
        rows += (
            f'<tr><td style="text-align:left">{quantity}</td><td data-quantity="{name}"><b>{value}</b>{interval}</td>'
        )
        rows += f'<td style="text-align:left;opacity:0.7">{note}</td></tr>'
    return f'<table style="text-align:right;border-spacing:10px 1px">{rows}</table>'
