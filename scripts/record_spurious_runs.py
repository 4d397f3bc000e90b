"""Records the small transformer's runs as tidy tables, for the notebook's figures and for warning rules.

    .venv/bin/python scripts/record_spurious_runs.py main cues surgery doses frozen --seeds 0 1 2
    .venv/bin/python scripts/record_spurious_runs.py more --seeds 3 4 5 6 7

About 6 minutes of one core a seed for the first line, 1.5 for the second.

    .venv/bin/python scripts/record_spurious_runs.py report  # acceptance table and figures, from the tables

Writes data/spurious/transformer_run/PART.csv. Finished runs and checkpoints are kept in --work: a killed run goes on.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from psd_utils.spurious import acceptance
from psd_utils.spurious import transformer_plots as plots
from psd_utils.spurious.plots_causes import acceptance as acceptance_picture
from psd_utils.spurious.transformer_findings import cue_summary, load_runs, summary, transformer_findings
from psd_utils.spurious.transformer_runs import (
    CONDITIONS,
    FROZEN,
    Condition,
    Study,
    cue_condition,
    run_conditions,
)
from psd_utils.spurious.transformer_surgery import equal_recall


def named(*names: str) -> dict[str, Condition]:
    """Conditions by name."""
    return {name: CONDITIONS[name] for name in names}


PARTS: dict[str, list[tuple[Mapping[str, Condition], int]]] = {
    "main": [(named("B_prime", "C", "no_final_norm"), 1200), (named("X", "rehearsal", "tiny_rate"), 600)],
    "more": [(named("B_prime"), 600), (named("C"), 400), (named("tiny_rate"), 300)],
    "cues": [(dict(cue_condition(kind, cue) for kind in ("value", "region") for cue in (0.25, 0.5, 0.75, 1.0)), 500)],
    "surgery": [({"B_prime_surgery": CONDITIONS["B_prime"]}, 500)],
    "doses": [(named("rate_half", "batch_half"), 800), (named("rate_double"), 300), (named("batch_double"), 400)],
    "frozen": [(named(*FROZEN), 400)],
}
"""Part -> groups of conditions and the length of their injections."""


def report(out: Path, figures: Path) -> None:
    """Write the acceptance table and the figures of the recorded runs; the three seeds of main are judged."""
    runs, doses, frozen, surgery, cues = (load_runs(part) for part in ("main", "doses", "frozen", "surgery", "cues"))
    rows = acceptance.load_rows(acceptance.data_folder() / "acceptance_transformer.yaml")
    found = transformer_findings(runs, doses)
    table = acceptance.judge(rows, found)
    table.to_csv(out / "acceptance.csv", index=False)
    every = summary(load_runs(*(part for part in PARTS if (out / f"{part}.csv").is_file())))
    every.to_csv(out / "summary.csv", index=False, float_format="%.4g")
    base = runs[runs["condition"] == "B_prime"]
    pictures = {
        "acts": plots.acts(runs, ("B_prime", "C", "no_final_norm")),
        "shifts": plots.shifts(runs, ("B_prime", "C", "no_final_norm")),
        "readouts": plots.readouts(runs),
        "splices": plots.splices(runs),
        "clock": plots.clock(pd.concat([base, doses])),
        "frozen": plots.freezing(
            pd.concat([base[(base["step"] <= 400) & base["seed"].isin(frozen["seed"])], frozen]), ("B_prime", *FROZEN)
        ),
        "surgery": plots.surgery(surgery, equal_recall(surgery)),
        "cues": plots.cues(cue_summary(pd.concat([base[base["step"] <= 500], cues]))),
        "acceptance": acceptance_picture(table, rows, found),
    }
    for name, picture in pictures.items():
        picture.savefig(figures / f"spurious_transformer_{name}.png", dpi=100)


def main() -> None:
    """Run what is missing and write the tables, after every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "report"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("data/spurious/transformer_run"))
    parser.add_argument("--work", type=Path, default=Path("data/results/spurious_transformer"))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts:
        if part == "report":
            report(given.out, Path("figures"))
            continue
        tables = []
        for seed in given.seeds:
            for conditions, n_steps in PARTS[part]:
                study, edits = Study(n_steps=n_steps), part == "surgery"
                tables.append(run_conditions(conditions, [seed], study, given.work, given.device, edits, progress=True))
            pd.concat(tables).to_csv(given.out / f"{part}.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
