"""One self-contained HTML page per pair: verdict, pictures, tables and limits; no network, no scripts, no widgets."""

import base64
import html
import io
import re
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from . import control_report, report
from .decision import RULE, decide
from .drawing import STYLE
from .files import write_atomically
from .limits import LIMITS
from .pair_controls import PairControls
from .pictures import Picture, control_pictures, study_pictures
from .study import Study
from .version import __version__


def write_report(study: Study, controls: PairControls | None = None, path: Path | None = None) -> Path:
    """Write the report of one study, by default `report.html` beside its tables; return the file.

    `controls` adds the pair's controls. The page holds its pictures as SVG and depends on nothing outside it.
    """
    path = path or study.path / "report.html"
    page = render(study, controls)
    write_atomically(path, lambda p: p.write_text(page, encoding="utf-8"))
    return path


def render(study: Study, controls: PairControls | None = None) -> str:
    """Return the report of one study as HTML."""
    table = None if controls is None else controls.table
    said = report.sentences(study.recovery)
    said += [] if controls is None else control_report.control_sentences(controls)
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        pair=study.pair.name,
        base=_name(study.summary["base"]["model"]),
        derived=_name(study.summary["derived"]["model"]),
        decision=decide(study.recovery, table),
        said=said,
        rule=[_marked(step) for step in RULE],
        limits=[_marked(text) for text in LIMITS],
        facts=_facts(study),
        pictures=[_shown(p) for p in study_pictures(study)],
        control_pictures=[] if controls is None else [_shown(p) for p in control_pictures(controls)],
        version=__version__,
    )


def _shown(picture: Picture) -> dict[str, Any]:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None})
    table = picture.shown.to_html(border=0, na_rep="–", classes="numbers")
    return {
        "title": picture.title,
        "reading": picture.reading,
        "svg": base64.b64encode(buffer.getvalue()).decode("ascii"),
        "table": table,
    }


def _marked(text: str) -> str:
    """Return a sentence with its **bold** and *slanted* words as HTML."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    return re.sub(r"\*(.+?)\*", r"<i>\1</i>", text)


def _name(model: str) -> str:
    """Return a hub name as it is, and of a path no more than its last part: a reader has other folders."""
    return Path(model).name if Path(model).is_absolute() else model


def _facts(study: Study) -> dict[str, str]:
    """Return what the numbers were made from, in words."""
    row, corpus, settings = study.recovery.iloc[0], study.summary["corpus"], study.summary["settings"]
    return {
        "text": f"{corpus['n_documents']:,} documents, {corpus['n_tokens']:,} tokens, sha256 {corpus['sha256'][:12]}…",
        "reported on": f"{row['n_documents']:,} documents, {row['n_tokens']:,} tokens (eval)",
        "set": f"the {settings['top_k']} most frequent tokens",
        "damage": f"{settings['n_damage_seeds']} seeds",
        "intervals": f"{settings['n_resamples']:,} resamples of documents, seed {settings['seed']}",
        "device": str(study.summary["device"]),
    } | {f"note {i + 1}": str(note) for i, note in enumerate(study.summary["notes"])}
