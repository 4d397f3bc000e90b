"""What became of a sweep's jobs and pairs, and the report on all of them.

<out_dir>/<pair>/, figures/   as the notebooks write them
<out_dir>/report.md           which pairs are finished, which are not and why
<out_dir>/sweep/plan.json     the jobs, from which Snakemake runs
<out_dir>/sweep/done/         a stamp per finished job: its parameters, and the hashes of its tables
<out_dir>/sweep/status/       a file per job that was started: how it ended and why
<out_dir>/sweep/logs/, notebooks/   each job's log and executed notebook
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import PsdError
from .files import read_json, read_table, sha256_of_file, write_atomically

TABLES = {
    "fit": ("losses.parquet", "recovery.parquet", "summary.json"),
    "controls": ("controls.parquet", "controls_losses.parquet", "left_out.parquet", "controls.json"),
}

_KILLED = "It did not come to its end: killed, or out of time or memory."


@dataclass(frozen=True)
class PairState:
    """Where a pair stands: finished, failed, running, interrupted or waiting; if not finished, at which job and why."""

    name: str
    folder: str
    state: str
    job: str = ""
    reason: str = ""


def stamp_path(plan: Mapping[str, Any], job: str) -> Path:
    """Return the path of the stamp that says a job is done."""
    return Path(plan["out_dir"]) / "sweep" / "done" / f"{job}.json"


def status_path(plan: Mapping[str, Any], job: str) -> Path:
    """Return the path of the file that says how a job went."""
    return Path(plan["out_dir"]) / "sweep" / "status" / f"{job}.json"


def table_hashes(plan: Mapping[str, Any], job: str) -> dict[str, str | None]:
    """Return the sha256 of a job's tables by path in the results folder; None for one that is not there."""
    made = plan["jobs"][job]
    paths = [f"{made['folder']}/{name}" for name in TABLES.get(made["step"], ())]
    files = {path: Path(plan["out_dir"]) / path for path in paths}
    return {path: sha256_of_file(file) if file.is_file() else None for path, file in files.items()}


def is_done(plan: Mapping[str, Any], job: str) -> bool:
    """Return whether a job was done with the plan's parameters, and its tables are as it left them."""
    path = stamp_path(plan, job)
    try:
        stamp = read_json(path) if path.is_file() else {}
    except PsdError:
        return False
    made = plan["jobs"][job]
    # any pair's way to a shared model gives the same capture, so the list may grow
    same = made["step"] == "score" or stamp.get("parameters") == made["parameters"]
    return bool(stamp) and same and stamp.get("tables") == table_hashes(plan, job)


def forget_stale(plan: Mapping[str, Any]) -> list[str]:
    """Delete the stamps of jobs that must be done again; return their names."""
    stale = [job for job in plan["jobs"] if stamp_path(plan, job).is_file() and not is_done(plan, job)]
    for job in stale:
        stamp_path(plan, job).unlink()
    return stale


def pair_states(plan: Mapping[str, Any], at_work: bool = False) -> list[PairState]:
    """Return where every pair stands, from stamps and status files.

    `at_work`: the sweep is still running, so a job without an end is running and not interrupted.
    """
    states = []
    for name, pair in plan["pairs"].items():
        lacking = [job for job in pair["jobs"] if not is_done(plan, job)]
        if not lacking:
            states.append(PairState(name, pair["folder"], "finished"))
            continue
        found = {job: _status(status_path(plan, job)) for job in lacking}
        first = next((job for job in lacking if found[job].get("state") in ("failed", "running")), lacking[0])
        said = found[first].get("state")
        state = {"failed": "failed", "running": "running" if at_work else "interrupted"}.get(str(said), "waiting")
        reason = _KILLED if state == "interrupted" else str(found[first].get("reason", ""))
        states.append(PairState(name, pair["folder"], state, first, reason))
    return states


def _status(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except PsdError:
        return {}


def write_report(plan: Mapping[str, Any], at_work: bool = False) -> Path:
    """Write report.md, the summary over all pairs of a sweep; return its path."""
    out_dir = Path(plan["out_dir"])
    states = pair_states(plan, at_work)
    finished = [s for s in states if s.state == "finished"]
    lines = ["# Sweep", "", f"{len(finished)} of {len(states)} pairs finished.", ""]
    lines += ["| pair | state | gap | symmetric share | damage share | excess share |", "|---|---|---|---|---|---|"]
    for s in states:
        table = out_dir / s.folder / "recovery.parquet"
        numbers = _shares(read_table(table)) if s.state == "finished" else ["–"] * 4
        lines.append(f"| {s.name} | {' | '.join([s.state, *numbers])} |")
    lines += ["", "Shares are of bias and temperature; gaps in nats per token; intervals 95 %, over documents.", ""]
    for s in states:
        if s.state != "finished":
            files = f"`sweep/logs/{s.job}.log`, `sweep/notebooks/{s.job}.ipynb`"
            lines.append(f"- **{s.name}** is missing: {s.state} at {s.job}. {s.reason} ({files})")
    lines += ["", "Pictures and the tables behind them: `figures/`; a page per pair: `<pair>/`.", ""]
    path = out_dir / "report.md"
    write_atomically(path, lambda p: p.write_text("\n".join(lines), encoding="utf-8"))
    return path


def _shares(recovery: pd.DataFrame) -> list[str]:
    """Return gap and shares of bias and temperature as text."""
    row = recovery[recovery["correction"] == "bias_temperature"].iloc[0].to_dict()
    found = []
    for value, interval in (
        ("gap", "gap"),
        ("symmetric_share", "symmetric"),
        ("damage_share", ""),
        ("excess_share", "excess"),
    ):
        low, high = row.get(f"{interval}_low"), row.get(f"{interval}_high")
        between = f" [{low:.3f}, {high:.3f}]" if interval and pd.notna(low) and pd.notna(high) else ""
        found.append("undefined" if pd.isna(row[value]) else f"{row[value]:.3f}{between}")
    return found
