"""Print the recovery tables of a results folder and where its files are: `python scripts/show_results.py FOLDER`."""

import sys
from pathlib import Path

import pandas as pd

from psd_utils import report
from psd_utils.decision import decide


def main(folder: str) -> None:
    """Print tables, sentences and files."""
    studies = report.finished_studies(folder)
    recovery = pd.concat([study.recovery for study in studies], ignore_index=True)
    with pd.option_context("display.width", 200, "display.max_columns", 20, "display.max_colwidth", 60):
        print(report.share_table(recovery).drop(columns=["raw share", "reason"]).to_string())
    print()
    for sentence in report.sentences(recovery):
        print(sentence)
    for study in studies:
        found = decide(study.recovery)
        print(f"{study.pair.name}: {found.verdict}. {found.steps[-1]}")
    here = Path.cwd()
    print("\nexecuted notebooks:", ", ".join(_relative(p, here) for p in sorted(Path(folder).glob("*.ipynb"))))
    print("figures:           ", _relative(report.figures_folder(folder), here))
    print("reports:           ", ", ".join(_relative(study.path / "report.html", here) for study in studies))
    print("tables:            ", ", ".join(_relative(study.path, here) for study in studies))


def _relative(path: Path, start: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(start)) if path.is_relative_to(start) else str(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
