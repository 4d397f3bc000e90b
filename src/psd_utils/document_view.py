"""A document's tokens, coloured by a number each, and a table of biases: HTML for the explorer."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

MOST_TOKENS = 1000
SORTS = {
    "largest first, either sign": ("size", False),
    "highest first": ("bias", False),
    "lowest first": ("bias", True),
    "most frequent first": ("count", False),
    "by token": ("token", True),
}


@dataclass(frozen=True)
class Colouring:
    """How numbers become colours: from `low` to `high` nats over part of a colour map, so that black text stays
    readable; `words` say what the number is."""

    words: str
    low: float
    high: float
    colours: tuple[str, ...]

    def of(self, values: np.ndarray) -> list[str]:
        """Return a hex colour for each value; those beyond the ends get the ends' colours."""
        steps = len(self.colours) - 1
        places = np.clip((values - self.low) / (self.high - self.low), 0, 1) * steps
        return [self.colours[i] for i in np.rint(places).astype(int).tolist()]

    @property
    def legend(self) -> str:
        """Return a strip of the colours with the numbers at its ends, as HTML."""
        strip = f"linear-gradient(to right, {', '.join(self.colours)})"
        box = f'<span style="display:inline-block;width:120px;height:10px;background:{strip}"></span>'
        return f"{self.words}: {self.low:g} {box} {self.high:g} nats and more"


def _colours(name: str, low: float, high: float, n: int = 33) -> tuple[str, ...]:
    return tuple(to_hex(c) for c in matplotlib.colormaps[name](np.linspace(low, high, n)))


COLOURINGS: Mapping[str, Colouring] = {
    "loss": Colouring("loss of this model, as set", 0, 10, _colours("Oranges", 0.0, 0.65)),
    "lost": Colouring(
        "loss lost in the derived model (uncorrected, beyond the base)", -3, 3, _colours("PuOr_r", 0.24, 0.76)
    ),
    "given back": Colouring("loss given back by the correction, as set", -1.5, 1.5, _colours("PuOr", 0.24, 0.76)),
}


def document_html(tokens: Sequence[str], values: np.ndarray, colouring: Colouring) -> str:
    """Return the tokens of a document as HTML, each on the colour of its value (nats), which it also tells on hover."""
    shown = min(len(tokens), MOST_TOKENS)
    spans = [
        f'<i style="background:{colour}" title="{value:.2f}">{_visible(token)}</i>'
        for token, value, colour in zip(
            tokens[:shown], values[:shown].tolist(), colouring.of(values[:shown]), strict=True
        )
    ]
    head = f"{colouring.legend}. Mean of the document: {values.mean():.4f}."
    if shown < len(tokens):
        head += f" The first {shown:,} of {len(tokens):,} tokens are shown."
    style = "white-space:pre-wrap;line-height:1.7;color:#000;background:#fff;padding:6px"
    italics = "<style>.psd-tokens i{font-style:normal}</style>"  # the shortest name for a span, not its slant
    return f'{italics}{head}<div class="psd-tokens" style="{style}">{"".join(spans)}</div>'


def _visible(token: str) -> str:
    return html.escape(token).replace("\n", "⏎\n")


def ordered_biases(biases: pd.DataFrame, search: str, sort: str) -> pd.DataFrame:
    """Return the rows whose token holds `search` (in either case), ordered by a key of `SORTS`.

    `biases` has `id, token, bias, count`.
    """
    found = biases[biases["token"].astype("string").str.contains(search, case=False, regex=False)]
    column, ascending = SORTS[sort]
    return found.assign(size=found["bias"].abs()).sort_values(column, ascending=ascending, kind="stable")


def bias_html(biases: pd.DataFrame, strength: float, n: int = 25) -> str:
    """Return the first rows of a table of biases as HTML, beside the fitted bias the one that is at work."""
    rows = ""
    for row in biases[:n].to_dict("records"):
        token = html.escape(str(row["token"]))
        rows += f'<tr><td style="font-family:monospace;text-align:left">{token}</td><td>{row["bias"]:+.3f}</td>'
        rows += f"<td>{strength * row['bias']:+.3f}</td><td>{row['count']:,}</td><td>{row['id']}</td></tr>"
    titles = ("token", "fitted bias (nats)", "bias at work", "times in fit", "id")
    head = "".join(f"<th>{title}</th>" for title in titles)
    words = f"{min(n, len(biases))} shown of {len(biases):,} found"
    return f'<table style="text-align:right;border-spacing:10px 1px"><tr>{head}</tr>{rows}</table>{words}'
