"""Submit a job script to Kubernetes: fill in job.yaml, hand it to kubectl, and print the name that it gives."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from string import Template


def manifest(script: str, gpus: int, memory: int, minutes: int, cores: int) -> str:
    """Return the Job's manifest; memory in megabytes."""
    root = os.environ["PSD_ROOT"]
    template = Template((Path(__file__).parent / "job.yaml").read_text())
    return template.substitute(
        script=script,
        folder=os.getcwd(),
        root=root,
        sweep=os.environ["PSD_SWEEP"],
        gpus=gpus,
        memory=memory,
        seconds=60 * minutes,
        cores=cores,
        image=os.environ.get("PSD_K8S_IMAGE", "python:3.11"),
        claim=os.environ.get("PSD_K8S_CLAIM", "psd-data"),
        mount=os.environ.get("PSD_K8S_MOUNT", root),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gpus", "memory", "minutes", "cores"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("script")
    given = vars(parser.parse_args())
    command = ["kubectl", "create", "-f", "-", "-o", "name"]
    sys.exit(subprocess.run(command, input=manifest(**given), text=True, check=False).returncode)
