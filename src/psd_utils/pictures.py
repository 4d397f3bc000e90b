"""What a finished study shows: each picture with its table and a sentence on how to read it."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from . import control_figures, control_report, figures, report
from .files import read_table
from .pair_controls import PairControls
from .study import Study

REPORTED = "bias_temperature"
"""The kind whose biases and profile are drawn."""


@dataclass(frozen=True)
class Picture:
    """A picture, its name as a file, a title, how to read it, the table behind it, and the table as readers see it."""

    name: str
    title: str
    reading: str
    figure: Figure
    table: pd.DataFrame
    shown: pd.DataFrame


def study_pictures(study: Study) -> list[Picture]:
    """Return the pictures of one study, from its tables alone; those whose tables an older run lacks are left out."""
    pair, recovery = study.pair.name, study.recovery
    made = [
        Picture(
            f"shares_{pair}",
            "The share of the gap that each correction gives back",
            "The symmetric share is what the derived model gains beyond the base; matched damage has nothing to "
            "restore, yet gets its share; the excess is the difference, and the only one that speaks about training.",
            figures.share_figure(recovery),
            recovery,
            report.share_table(recovery).droplevel("pair").drop(columns="reason"),
        ),
        Picture(
            f"losses_{pair}",
            "Losses before and after",
            "Exact losses on held-out text. The damaged models start at the derived model's gap on the fitted text, so "
            "near it here.",
            figures.gap_figure(study.losses),
            report.loss_table(recovery),
            report.loss_table(recovery).droplevel("pair"),
        ),
        Picture(
            f"temperatures_{pair}",
            "Fitted temperatures",
            "Above 1 the logits lie too far apart: the model is too sure. Random damage is best answered by a T above"
            " 1, so this alone does not show that training changed the temperature.",
            figures.temperature_figure(recovery),
            report.temperature_table(recovery),
            report.temperature_table(recovery).droplevel("pair"),
        ),
    ]
    return made + _spectrum(study) + _profile(study)


def _spectrum(study: Study) -> list[Picture]:
    path, pair = study.path / "tokens.parquet", study.pair.name
    if not path.is_file():
        return []
    corrections = {role: study.corrections[role, REPORTED] for role in ("base", "derived")}
    biases = figures.bias_table(read_table(path), corrections)
    derived = biases[biases["model"] == "derived"]
    largest = figures.largest_biases(derived["bias"].tolist(), derived["token"].tolist(), derived["count"].tolist(), 16)
    return [
        Picture(
            f"biases_{pair}",
            "The biases, by frequency and by class of token",
            "A bias above 0 raises a token that the model expects too little. Frequent tokens decide the loss; rare "
            "ones are fitted on little text. The table has the largest biases of the derived model.",
            figures.bias_spectrum_figure(biases, pair, REPORTED),
            biases,
            largest.round(3).set_index("token"),
        )
    ]


def _profile(study: Study) -> list[Picture]:
    path, pair = study.path / "loss_profile.parquet", study.pair.name
    if not path.is_file():
        return []
    profile = read_table(path)
    table = figures.profile_table(profile, REPORTED)
    shown = table.drop(columns="bin").set_index(["axis", "label"]).round(4)
    return [
        Picture(
            f"profile_{pair}",
            "Where the loss sits",
            "Above, the loss of the tokens in each bin; below, what the bin adds to the gap of the whole text, so "
            "bars of one colour sum to the gap. Where the hatched bar is as high as the full one, the correction "
            "repairs nothing; where the squares lie elsewhere than the full bars, random damage hurts other tokens. "
            "Bins of few tokens are noisy; there are no intervals here.",
            figures.profile_figure(profile, pair, REPORTED),
            table,
            shown,
        )
    ]


def control_pictures(controls: PairControls) -> list[Picture]:
    """Return the pictures of one pair's controls."""
    table, pair = controls.table, str(controls.table["pair"].iloc[0])

    def rows(analysis: str) -> pd.DataFrame:
        return table[table["analysis"] == analysis]

    ladder = control_report.ladder_table(table)
    return [
        Picture(
            f"damage_{pair}",
            "Other damage of the same size",
            "Noise on the head, noise on the final states, and the pair's own change of the head given to the wrong "
            "tokens. A share that does not exceed these is no sign of a prior shift.",
            control_figures.damage_figure(table),
            rows("damage"),
            control_report.damage_table(table),
        ),
        Picture(
            f"ladder_{pair}",
            "The ladder: how much can any output-layer correction give back?",
            "From one number to a head fitted anew, each on the same part of the text. What even the best rung leaves"
            " is not at the output layer, or needs more text to be learned.",
            control_figures.ladder_figure(table),
            rows("ladder"),
            ladder[["parameters", "symmetric share", "damage share", "end (derived)", "not used (derived)"]],
        ),
        Picture(
            f"left_out_{pair}",
            "What the set leaves out",
            "Mean probability on special, padded and rare tokens. Far above its bar of targets: a prior shift that a "
            "bias on the set cannot reach directly.",
            control_figures.left_out_figure(controls.left_out),
            controls.left_out,
            control_report.left_out_table(controls.left_out),
        ),
        Picture(
            f"in_sample_{pair}",
            "In sample and out of sample",
            "What a correction seems to give on the text it was fitted on, beside what it gives on other text.",
            control_figures.in_sample_figure(table),
            rows("in-sample"),
            control_report.sensitivity_table(table, "in-sample").drop(columns="reason"),
        ),
        Picture(
            f"sensitivity_{pair}",
            "Sensitivity to choices",
            "The size of the set, the penalty (each by itself), the amount of text, other texts, and special tokens "
            "let into the set.",
            control_figures.sensitivity_figure(table),
            rows("sensitivity"),
            control_report.sensitivity_table(table).drop(columns="reason"),
        ),
    ]
