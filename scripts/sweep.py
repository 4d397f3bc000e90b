"""Run a sweep: `python scripts/sweep.py tiny`, as `make sweep PAIRS=tiny` does; `-n` shows the plan.

Snakemake does the scheduling. This script writes its plan, ends what a killed sweep left behind, starts it, and says
which pairs failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
import yaml
from filelock import FileLock, Timeout

from psd_utils.errors import PsdError
from psd_utils.files import sha256_of_json, write_json
from psd_utils.paths import project_root, results_dir
from psd_utils.plan import MACHINES, STEPS, Size, plan_table
from psd_utils.progress import forget_stale, pair_states, write_report
from psd_utils.sweep import make_plan, read_entries

MARK = "PSD_SWEEP"


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="Run all pairs through the notebooks.")
    parser.add_argument("pairs", nargs="+", help="tiny, public, names of registered pairs, or a YAML file")
    parser.add_argument("-n", "--dry-run", action="store_true", help="show the plan and what would run")
    parser.add_argument("--out", help="results folder (default: data/results/sweep)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="parameters for all pairs")
    parser.add_argument("--no-controls", action="store_true", help="leave out 03_controls")
    parser.add_argument(
        "--profile", help="slurm, kubernetes, or the path of a Snakemake profile; default: this machine"
    )
    parser.add_argument("--cores", default="all", help="cores of this machine to use")
    parser.add_argument("--threads", type=positive, default=1, help="threads of a job")
    parser.add_argument(
        "--processes", type=positive, default=1, help="processes (one a GPU) that score a model together"
    )
    parser.add_argument("--machine", choices=list(MACHINES), help="what expected times are for")
    return parser.parse_args(argv)


def common_parameters(settings: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE words as parameters; values are read as YAML."""
    pairs = [word.partition("=") for word in settings]
    for name, sign, _ in pairs:
        if not sign:
            raise PsdError(f"--set takes NAME=VALUE, found {name!r}")
    try:
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    except yaml.YAMLError as error:
        raise PsdError(f"--set takes NAME=VALUE with a value in YAML: {error}") from error


def snakemake(plan_file: Path, folder: Path, given: argparse.Namespace, *more: str) -> list[str]:
    """Return Snakemake's command for a plan."""
    root = project_root()
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(root / "workflow" / "Snakefile")]
    command += ["--configfile", str(plan_file), "--directory", str(folder), "--keep-going", "--nolock"]
    command += ["--rerun-triggers", "mtime", "params", "input", "--scheduler", "greedy"]
    if given.profile:
        own = root / "workflow" / "profiles" / given.profile
        command += ["--profile", str(own if own.is_dir() else Path(given.profile).expanduser().resolve())]
        command += ["--resources", "figures=1"]
    else:
        memory = psutil.virtual_memory().total // 10**6
        command += ["--cores", given.cores, "--resources", "figures=1", "gpu_jobs=1", f"mem_mb={memory}"]
    return [*command, *more]


def end_leftovers(mark: str, profile: str | None) -> None:
    """End what an earlier sweep in this folder left running, on this machine and in the profile's queue."""
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MARK) == mark:
                process.kill()
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    psutil.wait_procs(found, timeout=30)
    script = project_root() / "workflow" / "profiles" / str(profile) / "end-leftovers.sh"
    if profile and script.is_file():
        subprocess.run(["bash", str(script), mark], check=True)


def _short(number: float) -> str:
    """Return a number with its digits grouped, to three places where it is small."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def show_plan(plan: Mapping[str, Any], table: pd.DataFrame, machine: str) -> None:
    """Print what each pair is expected to cost."""
    print(f"Expected on {machine} (assumed throughput; see docs/sweep.md):")
    print(table.to_string(index=False, float_format=_short, na_rep="unknown"))
    gpus, memory, minutes = (
        max(j["resources"][k] for j in plan["jobs"].values()) for k in ("gpu", "mem_mb", "runtime")
    )
    print(f"largest job: {gpus} GPUs, {memory / 1000:.1f} GB of memory, at most {minutes} minutes", flush=True)


def sweep(given: argparse.Namespace) -> int:
    """Run or show a sweep; return the exit status.

    Raises:
        PsdError: pairs or parameters that make no plan, or another sweep at work in the same folder.
    """
    out_dir = Path(given.out).expanduser().resolve() if given.out else results_dir() / "sweep"
    on_gpu = torch.cuda.is_available() or bool(given.profile)
    name = given.machine or ("A100" if on_gpu else "cpu core")
    entries = read_entries(" ".join(given.pairs), common_parameters(given.set))
    settings = {"controls": not given.no_controls, "processes": given.processes, "threads": given.threads}
    plan = make_plan(entries, out_dir, MACHINES[name], **settings)
    if not given.profile:
        limit = psutil.virtual_memory().total // 10**6
        for job in plan["jobs"].values():
            job["resources"]["mem_mb"] = min(job["resources"]["mem_mb"], limit)
    sizes = {entry.name: (entry.pair, Size.of(entry.pair, entry.parameters)) for entry in entries.values()}
    steps = [step for step in STEPS if step != "controls" or not given.no_controls]
    show_plan(plan, plan_table(sizes, MACHINES[name], steps), name)
    folder = out_dir / "sweep"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PsdError(f"--out {out_dir} cannot be written: {error}; give a folder") from error
    mark = f"psd-{sha256_of_json(str(folder))[:12]}"
    environment = os.environ | {MARK: mark, "PSD_ROOT": str(project_root()), "PSD_PYTHON": sys.executable}
    if given.dry_run:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(plan, file)
            file.flush()
            return subprocess.run(
                snakemake(Path(file.name), folder, given, "-n", "-q", "rules"), env=environment
            ).returncode
    try:
        with FileLock(folder / ".lock", timeout=0):
            return run(plan, folder, given, mark, environment)
    except Timeout as error:
        raise PsdError(f"another sweep is at work in {folder}; wait for it, or give another --out") from error


def run(
    plan: Mapping[str, Any], folder: Path, given: argparse.Namespace, mark: str, environment: Mapping[str, str]
) -> int:
    """Run Snakemake on a plan, then the report; say which pairs are not finished."""
    end_leftovers(mark, given.profile)
    # a stamp is written last and at once, so an incomplete job has left none, and nothing needs Snakemake's marks
    for leftover in (folder / ".snakemake" / "incomplete").glob("*"):
        leftover.unlink()
    write_json(folder / "plan.json", plan)
    for job in forget_stale(plan):
        print(f"{job}: its parameters or its tables are not those of the last run, so it runs again")
    status = 1
    try:
        status = subprocess.run(snakemake(folder / "plan.json", folder, given), env=environment, check=False).returncode
    finally:
        end_leftovers(mark, given.profile)
        report = write_report(plan)
    unfinished = [state for state in pair_states(plan) if state.state != "finished"]
    for state in unfinished:
        print(f"{state.name}: {state.state} at {state.job}. {state.reason} (log: {folder / 'logs' / state.job}.log)")
    print(f"{len(plan['pairs']) - len(unfinished)} of {len(plan['pairs'])} pairs finished; report: {report}")
    return status or (1 if unfinished else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that its jobs are ended as well
    try:
        sys.exit(sweep(parse()))
    except PsdError as error:
        sys.exit(f"error: {error}")
