"""Run one job of a sweep: `python workflow/run_notebook.py plan.json fit-tiny_math` (or `report`).

The notebook is run by papermill, by the command that a user would type, which the log begins with. Whatever happens,
the job's status file says it; only a job that succeeded leaves a stamp in done/.
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from psd_utils.files import write_json
from psd_utils.progress import stamp_path, status_path, table_hashes, write_report

_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w+(?:Error|Exception|Interrupt)\b.*)")


def papermill(plan: Mapping[str, Any], job: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return the command that runs the job's notebook."""
    source = Path(plan["root"]) / "notebooks" / plan["notebooks"][plan["jobs"][job]["step"]]
    command = [plan["python"], "-m", "papermill", "--log-output", "--no-progress-bar", str(source)]
    command.append(f"notebooks/{job}.ipynb")
    for name, value in parameters.items():
        command += ["-r" if isinstance(value, str) else "-p", name, str(value)]
    return command


def together(plan: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Return the command by which several processes score a model, after which the notebook finds it scored."""
    command = [
        plan["python"],
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(plan["processes"]),
    ]
    command += ["-m", "psd_utils.distributed"]
    for name, value in parameters.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def commands(plan: Mapping[str, Any], job: str) -> Iterator[list[list[str]]]:
    """Yield what to run for a job, one way after the other, until one succeeds."""
    for parameters in plan["jobs"][job]["parameters"]:
        shared = plan["processes"] > 1 and plan["jobs"][job]["step"] == "score"
        yield [*([together(plan, parameters)] if shared else []), papermill(plan, job, parameters)]


def run(command: list[str], threads: int, log: TextIO) -> str | None:
    """Run a command with its output in the log; return None, or why it failed."""
    log.write(f"$ {shlex.join(command)}\n")
    log.flush()
    begin = log.tell()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if status == 0:
        return None
    if status < 0:
        return f"ended by {signal.Signals(-status).name}, as happens when memory or time runs out"
    lines = Path(log.name).read_bytes()[begin:].decode(errors="replace").splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    errors = said[:1] or [found[1] for line in lines if (found := _ERROR.match(line.strip()))]
    if any("DeadKernelError" in line for line in lines):
        return "the kernel died, as happens when memory runs out"
    return (errors or [line for line in lines if line.strip()] or [f"exit status {status}"])[-1][:500]


def work(plan: Mapping[str, Any], job: str, log: TextIO) -> str | None:
    """Run a job; return None, or why it failed."""
    reason: str | None = "nothing to run"
    for way in commands(plan, job):
        for command in way:
            reason = run(command, plan["threads"], log)
            if reason:
                break
        if reason is None or "runs out" in reason:
            break
    return reason


def main(plan_file: str, job: str) -> int:
    """Run a job and say how it went; return the exit status."""
    plan = json.loads(Path(plan_file).read_text())
    if job == "report":
        write_report(plan)
        return 0
    log_path = Path("logs") / f"{job}.log"
    for folder in ("logs", "notebooks"):
        Path(folder).mkdir(exist_ok=True)
    started = time.time()
    status = {"job": job, "log": str(log_path.resolve()), "notebook": str(Path("notebooks", f"{job}.ipynb").resolve())}
    status |= {"host": socket.gethostname(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(status_path(plan, job), status | {"state": "running"})
    # an engine that ends a job gives it a moment to say so
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    reason: str | None = "ended by SIGTERM, as happens when memory or time runs out"
    try:
        with open(log_path, "w", encoding="utf-8") as log:
            reason = work(plan, job, log)
    finally:
        seconds = round(time.time() - started, 1)
        how = {"state": "failed" if reason else "done", "reason": reason or "", "seconds": seconds}
        write_json(status_path(plan, job), status | how)
        made = plan["jobs"][job]
        if reason is None:
            stamp = {"parameters": made["parameters"], "tables": table_hashes(plan, job), "seconds": seconds}
            write_json(stamp_path(plan, job), stamp)
        elif made["step"] == "fit":
            # what an earlier run with other parameters left must not be drawn as this pair's
            (Path(plan["out_dir"]) / made["folder"] / "recovery.parquet").unlink(missing_ok=True)
        write_report(plan, at_work=True)
    if reason:
        sys.stderr.write(f"{job}: {reason}\n")
    return 1 if reason else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("job")
    given = parser.parse_args()
    sys.exit(main(given.plan, given.job))
