"""A sweep: what is planned, that Snakemake runs it, that failures are told, and that nothing is done twice.

The fast tests run Snakemake, papermill and real kernels on short notebooks that stand in for the real ones; the slow
ones run the real notebooks, kill the sweep at any moment, and go through Slurm.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest
import yaml
from conftest import REPOSITORY

from psd_utils.errors import PsdError
from psd_utils.plan import MACHINES
from psd_utils.progress import forget_stale, is_done, pair_states, stamp_path, status_path, table_hashes, write_report
from psd_utils.sweep import make_plan, notebook_parameters, read_entries

CPU, GPU = MACHINES["cpu core"], MACHINES["A100"]
TINY = {"n_tokens": 3000, "top_k": 64, "n_damage_seeds": 1, "n_resamples": 200, "device": "cpu"}


@pytest.fixture(autouse=True)
def sweep_root(tmp_path, monkeypatch):
    """A project root of the test's own, whose captures and results nobody else has."""
    root = make_root(tmp_path / "root")
    monkeypatch.setenv("PSD_ROOT", str(root))
    monkeypatch.chdir(tmp_path)
    return root


def make_root(root, notebooks=REPOSITORY / "notebooks"):
    (root / "data").mkdir(parents=True)
    for name in ("pyproject.toml", "workflow"):
        (root / name).symlink_to(REPOSITORY / name)
    (root / "notebooks").symlink_to(notebooks)
    for path in (REPOSITORY / "data").iterdir():
        if path.name not in ("captures", "results"):
            (root / "data" / path.name).symlink_to(path)
    return root


def write_pairs(path, pairs, **parameters):
    path.write_text(yaml.safe_dump({"pairs": pairs, "parameters": parameters}))
    return str(path)


def sweep_command(pairs, out, *more):
    return [sys.executable, str(REPOSITORY / "scripts" / "sweep.py"), pairs, "--out", str(out), *more]


def run_sweep(pairs, out, *more, environment=None):
    """Run a sweep to its end; return (exit status, everything it printed)."""
    done = subprocess.run(
        sweep_command(pairs, out, *more),
        env=os.environ | {"OMP_WAIT_POLICY": "passive"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    return done.returncode, done.stdout


# ---- which pairs


def test_groups_and_names_stand_for_registered_pairs():
    assert len(read_entries("public")) == 14
    assert all(name.startswith("tiny_") for name in read_entries("tiny"))
    assert list(read_entries("tiny_math, math_7b")) == ["tiny_math", "math_7b"]


def test_a_file_gives_own_pairs_and_parameters_and_its_paths_hang_on_the_working_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "text.jsonl").write_text("")
    pairs = {"mine": {"base": "a", "derived": "b", "text": "text.jsonl", "n_tokens": 50}, "tiny_math": None}
    entries = read_entries(write_pairs(tmp_path / "p.yaml", pairs, n_tokens=99, seed=3), {"seed": 4})
    mine, registered = entries["mine"], entries["tiny_math"]
    assert mine.parameters["base"] == str(tmp_path / "a")
    assert mine.parameters["text"] == str(tmp_path / "text.jsonl")
    assert (mine.parameters["n_tokens"], registered.parameters["n_tokens"]) == (50, 99)
    assert mine.parameters["seed"] == registered.parameters["seed"] == 4
    assert mine.pair.name.startswith("a--b-")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"pairs": ["tiny_maths"]}, "did you mean 'tiny_math"),
        ({"pairs": {"tiny_math": {"n_token": 3}}}, "tiny_math: unknown parameter 'n_token'; did you mean 'n_tok"),
        ({"pairs": {"tiny_math": {"out_dir": "x"}}}, "out_dir is set by the sweep"),
        ({"pairs": {"tiny_math": {"n_tokens": [3]}}}, "n_tokens must be text, a number"),
        ({"pairs": {"tiny_math": 3}}, "must be a mapping, found 3"),
        ({"pairs": {"a/b": {"base": "x", "derived": "y"}}}, "a name has letters"),
        ({"pairs": {"a": {"base": "x"}}}, "derived is missing"),
        ({"pairs": {n: {"base": "x", "derived": "y"} for n in ("a", "b")}}, "a and b are the same two models"),
        ({"pair": ["tiny_math"]}, "must hold `pairs:`"),
        ("[", "not valid YAML"),
        ({"pairs": {"tiny_math": {"top_k": "many"}}}, "top_k must be a whole number, found 'many'"),
        ({"pairs": {"tiny_math": {"n_tokens": 2.5}}}, "n_tokens must be a whole number, found 2.5"),
        ({"pairs": {"tiny_math": {"seed": True}}}, "seed must be a whole number, found True"),
        ({"pairs": {"tiny_math": {"text": 7}}}, r"text must be text \(in quotes where it looks like a num"),
        ({"pairs": [["tiny_math"]]}, "a list of `pairs` holds names"),
        ({"pairs": [{"tiny_math": {"seed": 1}}]}, "a list of `pairs` holds names"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_of_pairs_are_said_in_words(tmp_path, content, message):
    path = tmp_path / "p.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(PsdError, match=message):
        read_entries(str(path))


def test_a_word_that_is_no_pair_and_a_file_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(PsdError, match="did you mean 'public'"):
        read_entries("pubic")
    with pytest.raises(PsdError, match="no file of pairs at"):
        read_entries("none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    for name in ("folder", "bytes"):
        with pytest.raises(PsdError, match="cannot be read as YAML"):
            read_entries(str(tmp_path / f"{name}.yaml"))


# ---- which jobs


def plan_of(tmp_path, pairs="tiny", machine=CPU, **settings):
    return make_plan(read_entries(pairs), tmp_path / "out", machine, **settings)


def test_a_model_that_pairs_share_is_scored_once(tmp_path):
    plan = plan_of(tmp_path, "public")
    scores = [job for job in plan["jobs"].values() if job["step"] == "score"]
    registered = read_entries("public").values()
    models = {(m.model, m.revision) for entry in registered for m in (entry.pair.base, entry.pair.derived)}
    assert len(scores) == len(models) == 19
    # the base of three OLMo pairs is the derived model of a fourth
    (shared,) = [job for job in scores if len(job["parameters"]) == 4]
    assert [p["members"] for p in shared["parameters"]] == ["base", "base", "base", "derived"]


def test_each_notebook_gets_the_parameters_it_has_and_no_others(tmp_path):
    path = write_pairs(tmp_path / "p.yaml", {"tiny_math": {"n_refits": 2, "seed": 5, "n_tokens": 900}})
    plan = plan_of(tmp_path, path)
    for job in plan["jobs"].values():
        for parameters in job["parameters"]:
            assert set(parameters) <= set(notebook_parameters(job["step"]))
    assert plan["jobs"]["controls-tiny_math"]["parameters"][0]["n_refits"] == 2
    assert "n_refits" not in plan["jobs"]["fit-tiny_math"]["parameters"][0]
    scored = [job["parameters"][0] for job in plan["jobs"].values() if job["step"] == "score"]
    assert all("seed" not in p and p["n_tokens"] == 900 for p in scored)


def test_a_job_asks_for_gpus_memory_and_time_by_the_size_of_its_model(tmp_path):
    plan = plan_of(tmp_path, "olmo_sft_1b math_7b tiny_math", GPU)
    small, large, tiny = (plan["jobs"][f"fit-{n}"]["resources"] for n in ("olmo_sft_1b", "math_7b", "tiny_math"))
    assert (small["gpu"], large["gpu"], tiny["gpu"]) == (1, 1, 0)
    assert tiny["mem_mb"] < small["mem_mb"] < large["mem_mb"]
    assert small["runtime"] < large["runtime"]
    assert all(job["resources"]["gpu"] == 0 for job in plan_of(tmp_path, "public")["jobs"].values())
    shared = plan_of(tmp_path, "math_7b tiny_math", GPU, processes=4)["jobs"]
    asked = {name.split("-")[1]: job["resources"]["gpu"] for name, job in shared.items() if job["step"] == "score"}
    assert asked["Qwen2.5"] == 4
    assert asked["math"] == 0


# ---- what is done, and what is not


def finish(plan, job, tables=b"numbers"):
    """Leave behind what a finished job leaves."""
    for path in table_hashes(plan, job):
        file = Path(plan["out_dir"]) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tables)
    stamp = {"parameters": plan["jobs"][job]["parameters"], "tables": table_hashes(plan, job)}
    stamp_path(plan, job).parent.mkdir(parents=True, exist_ok=True)
    stamp_path(plan, job).write_text(json.dumps(stamp))


def test_only_jobs_whose_parameters_or_tables_changed_are_done_again(tmp_path):
    before = plan_of(tmp_path, "tiny_math tiny_code")
    for job in before["jobs"]:
        finish(before, job)
    assert forget_stale(before) == []
    path = write_pairs(tmp_path / "p.yaml", {"tiny_math": {"seed": 1}, "tiny_code": None})
    after = plan_of(tmp_path, path)
    assert [job for job in after["jobs"] if not is_done(after, job)] == ["fit-tiny_math", "controls-tiny_math"]
    (tmp_path / "out" / "tiny_code" / "losses.parquet").write_bytes(b"number")
    (tmp_path / "out" / "tiny_code" / "controls.parquet").unlink()
    assert forget_stale(before) == ["fit-tiny_code", "controls-tiny_code"]
    assert not stamp_path(before, "fit-tiny_code").exists()
    assert is_done(before, "fit-tiny_math")
    stamp_path(before, "fit-tiny_math").write_text("half of a")
    assert not is_done(before, "fit-tiny_math")


def test_states_and_report_say_where_each_pair_stands_and_why(tmp_path):
    plan = plan_of(tmp_path, "tiny_math tiny_code tiny_dpo tiny_instruct", controls=False)
    for job in plan["jobs"]:
        if job.startswith("score") or job.endswith("tiny_math"):
            finish(plan, job)
    columns = ("gap", "gap_low", "gap_high", "symmetric_share", "symmetric_low", "symmetric_high", "damage_share",
               "excess_share", "excess_low", "excess_high")  # fmt: skip
    recovery = pd.DataFrame([{"correction": "bias_temperature", **dict.fromkeys(columns, 0.25), "excess_share": None}])
    recovery.to_parquet(tmp_path / "out" / "tiny_math" / "recovery.parquet")
    finish_again = {"parameters": plan["jobs"]["fit-tiny_math"]["parameters"]}
    stamp = finish_again | {"tables": table_hashes(plan, "fit-tiny_math")}
    stamp_path(plan, "fit-tiny_math").write_text(json.dumps(stamp))
    status_path(plan, "x").parent.mkdir(parents=True)
    status_path(plan, "fit-tiny_code").write_text(json.dumps({"state": "failed", "reason": "PsdError: no such model"}))
    status_path(plan, "fit-tiny_dpo").write_text(json.dumps({"state": "running"}))
    found = {s.name: (s.state, s.job) for s in pair_states(plan)}
    assert found == {
        "tiny_math": ("finished", ""),
        "tiny_code": ("failed", "fit-tiny_code"),
        "tiny_dpo": ("interrupted", "fit-tiny_dpo"),
        "tiny_instruct": ("waiting", "fit-tiny_instruct"),
    }
    report = write_report(plan).read_text()
    assert "1 of 4 pairs finished" in report
    assert "| tiny_math | finished | 0.250 [0.250, 0.250] | 0.250 [0.250, 0.250] | 0.250 | undefined |" in report
    assert "**tiny_code** is missing: failed at fit-tiny_code. PsdError: no such model" in report


# ---- through Snakemake, on short notebooks

SHORT = {
    "score": """
import os
if pair == "tiny_dpo":
    raise ValueError("the other model of tiny_dpo is not there")
""",
    "fit": """
import os, pathlib, signal
if seed == 666:
    os.kill(os.getpid(), signal.SIGKILL)
import pandas as pd
folder = pathlib.Path(out_dir, pair)
folder.mkdir(parents=True, exist_ok=True)
names = ["gap", "symmetric_share", "damage_share", "excess_share"]
table = pd.DataFrame([{"correction": "bias_temperature", **dict.fromkeys(names, float(seed))}])
for name in ("recovery.parquet", "losses.parquet"):
    table.to_parquet(folder / name)
(folder / "summary.json").write_text("{}")
""",
    "figures": "import os\n",
}


def short_notebooks(folder):
    """Notebooks with the real parameters and short work; each notes that it ran."""
    folder.mkdir()
    for step, real in (
        ("score", "01_score"),
        ("fit", "02_fit"),
        ("controls", "03_controls"),
        ("figures", "04_figures"),
    ):
        notebook = nbformat.read(REPOSITORY / "notebooks" / f"{real}.ipynb", as_version=4)
        cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
        note = f'open(os.environ["CALLS"], "a").write(f"{step} {{pair}}\\n")'
        cells.append(nbformat.v4.new_code_cell(SHORT.get(step, "import os\n") + note))
        notebook.cells = cells
        nbformat.write(notebook, folder / f"{real}.ipynb")
    return folder


def calls(path):
    made = sorted(path.read_text().splitlines()) if path.exists() else []
    path.unlink(missing_ok=True)
    return made


def test_a_pair_whose_kernel_dies_is_named_and_the_next_call_repeats_only_that(tmp_path, monkeypatch):
    shutil.rmtree(tmp_path / "root")
    monkeypatch.setenv("PSD_ROOT", str(make_root(tmp_path / "root", short_notebooks(tmp_path / "short"))))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    out = tmp_path / "out"
    pairs = write_pairs(tmp_path / "p.yaml", {"tiny_math": None, "tiny_code": {"seed": 666}}, device="cpu")
    status, printed = run_sweep(pairs, out, "--no-controls")
    assert status != 0
    assert "tiny_code: failed at fit-tiny_code. the kernel died, as happens when memory runs out" in printed
    assert "1 of 2 pairs finished" in printed
    # the shared base once, the other pair to its end
    assert calls(tmp_path / "calls") == [
        "figures ",
        "fit tiny_math",
        *["score tiny_code"] * 1,
        *["score tiny_math"] * 2,
    ]
    said = json.loads((out / "sweep" / "status" / "fit-tiny_code.json").read_text())
    assert (said["state"], said["job"]) == ("failed", "fit-tiny_code")
    assert "papermill" in Path(said["log"]).read_text()
    assert Path(said["notebook"]).is_file()
    assert "**tiny_code** is missing" in (out / "report.md").read_text()

    pairs = write_pairs(tmp_path / "p.yaml", {"tiny_math": None, "tiny_code": {"seed": 7}}, device="cpu")
    status, printed = run_sweep(pairs, out, "--no-controls")
    assert status == 0, printed
    assert calls(tmp_path / "calls") == ["figures ", "fit tiny_code"]
    assert "| tiny_code | finished | 7.000 |" in (out / "report.md").read_text()
    assert sorted(p.name for p in (out / "sweep" / "done").iterdir()) == sorted(
        f"{job}.json" for job in json.loads((out / "sweep" / "plan.json").read_text())["jobs"]
    )


def test_a_shared_base_is_scored_by_way_of_another_pair_where_the_first_ones_other_model_is_missing(
    tmp_path, monkeypatch
):
    sys.path.insert(0, str(REPOSITORY / "workflow"))
    import run_notebook

    shutil.rmtree(tmp_path / "root")
    monkeypatch.setenv("PSD_ROOT", str(make_root(tmp_path / "root", short_notebooks(tmp_path / "short"))))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    plan = make_plan(read_entries("tiny_dpo tiny_math"), tmp_path / "out", CPU)
    (shared,) = [name for name, job in plan["jobs"].items() if job["step"] == "score" and len(job["parameters"]) == 2]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert run_notebook.main("plan.json", shared) == 0
    assert calls(tmp_path / "calls") == ["score tiny_math"]
    own = next(name for name in plan["pairs"]["tiny_dpo"]["jobs"] if name != shared)
    assert run_notebook.main("plan.json", own) == 1
    said = json.loads(status_path(plan, own).read_text())
    assert said["reason"] == "ValueError: the other model of tiny_dpo is not there"
    assert not stamp_path(plan, own).exists()


def test_dry_run_shows_cost_and_jobs_and_runs_nothing(tmp_path):
    status, printed = run_sweep("public", tmp_path / "out", "-n", "--profile", "slurm", "--machine", "H200")
    assert status == 0, printed
    assert "Expected on H200" in printed
    assert all(name in printed for name in read_entries("public"))
    assert not (tmp_path / "out" / "sweep" / "done").exists()
    counts = dict(
        line.split() for line in printed.splitlines() if line.split()[:1] and line.split()[0] in ("score", "fit")
    )
    assert counts == {"score": "19", "fit": "14"}


def test_kubernetes_job_asks_for_what_the_model_needs(tmp_path, monkeypatch):
    sys.path.insert(0, str(REPOSITORY / "workflow" / "profiles" / "kubernetes"))
    import submit

    monkeypatch.setenv("PSD_SWEEP", "psd-123")
    job = yaml.safe_load(submit.manifest("/psd/job.sh", gpus=2, memory=40_000, minutes=90, cores=4))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "40000M", "nvidia.com/gpu": 2}
    assert container["resources"]["requests"]["cpu"] == "4"
    assert container["command"] == ["bash", "/psd/job.sh"]
    assert container["workingDir"] == str(tmp_path)
    assert job["spec"]["activeDeadlineSeconds"] == 5400
    assert job["metadata"]["labels"] == {"psd-sweep": "psd-123"}


# ---- the real notebooks


def results_of(out):
    """Every table and correction of a sweep, by its path."""
    tables = [p for p in out.glob("tiny_*/**/*") if p.suffix in (".parquet", ".safetensors") and p.is_file()]
    return {str(p.relative_to(out)): p.read_bytes() for p in tables}


def kill_after(seconds, pairs, out, *more, signal_number=signal.SIGKILL):
    """Start a sweep and kill its first process after a while; its other processes are left to themselves."""
    with open(out.with_suffix(".log"), "a") as log:
        started = subprocess.Popen(sweep_command(pairs, out, *more), stdout=log, stderr=log, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(seconds)
        started.send_signal(signal_number)
        return started.wait()


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_ends_with_the_tables_of_one_that_never_was(tmp_path, monkeypatch):
    pairs = write_pairs(tmp_path / "p.yaml", ["tiny_math", "tiny_code"], **TINY)
    assert run_sweep(pairs, tmp_path / "calm", "--no-controls")[0] == 0
    monkeypatch.setenv("PSD_ROOT", str(make_root(tmp_path / "other")))
    out = tmp_path / "killed"
    for seconds in (20, 50, 80):  # while it starts, scores, fits
        kill_after(seconds, pairs, out, "--no-controls")
    status, printed = run_sweep(pairs, out, "--no-controls")
    assert status == 0, printed
    expected = results_of(tmp_path / "calm")
    assert len(expected) > 2 * 10
    assert results_of(out) == expected
    # and nothing is left to do, nor anything still at work
    status, printed = run_sweep(pairs, out, "--no-controls")
    assert "Nothing to be done" in printed
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
def test_a_bad_revision_fails_alone_and_the_shared_base_is_scored_all_the_same(tmp_path):
    base, derived = (str(REPOSITORY / "data" / "demo" / name) for name in ("base", "math"))
    pairs = {
        "wrong": {"base": base, "derived": derived, "derived_revision": "abc"},
        "tiny_code": None,
    }
    common = TINY | {"text": "demo_prose", "dtype": "float32"}
    out = tmp_path / "out"
    status, printed = run_sweep(write_pairs(tmp_path / "p.yaml", pairs, **common), out, "--no-controls")
    assert status != 0
    assert len(list((out / "sweep" / "status").glob("score-base-*.json"))) == 1
    assert "wrong: failed at score-math" in printed
    assert "is a local folder and has no revisions" in printed
    assert "tiny_code | finished" in (out / "report.md").read_text()


@pytest.mark.slow
def test_processes_share_the_scoring(tmp_path):
    pairs = write_pairs(tmp_path / "p.yaml", ["tiny_math"], **TINY)
    status, printed = run_sweep(pairs, tmp_path / "out", "--no-controls", "--processes", "2")
    assert status == 0, printed
    (log,) = (tmp_path / "out" / "sweep" / "logs").glob("score-math-*.log")
    assert "by 2 processes" in log.read_text()


# ---- Slurm


def free_ports(n):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """Debian's Slurm on one node of our own, on loopback; yields its folder."""
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"needs root and Debian's slurmctld, slurmd, slurm-client and munge; lacking: {lacking}")
    folder = tmp_path_factory.mktemp("slurm", numbered=True)
    folder.chmod(0o755)
    for parent in list(folder.parents)[:3]:
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o755)
    key, munge = folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname()
    ports = free_ports(2)
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=16000
PartitionName=all Nodes=n1 Default=YES State=UP
"""
    )
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = {"key-file": key, "socket": munge}
    files |= {f"{name}-file": folder / "munge" / name for name in ("pid", "log", "seed")}
    own = [f"--{name}={path}" for name, path in files.items()]
    try:
        subprocess.run(["munged", *own], check=True)
        subprocess.run(["slurmctld", "-f", str(folder / "slurm.conf")], check=True)
        subprocess.run(["slurmd", "-f", str(folder / "slurm.conf"), "-N", "n1"], check=True)
        wait_for(lambda: "idle" in output_of("sinfo", "-h", "-N", "-o", "%T"))
        yield folder
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        for path in (folder / "slurmd.pid", folder / "slurmctld.pid", folder / "munge" / "pid"):
            if path.is_file():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGTERM)


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.3)


@pytest.mark.slow
def test_three_pairs_go_through_slurm_and_a_killed_sweep_leaves_no_jobs_behind(slurm, tmp_path):
    pairs = write_pairs(tmp_path / "p.yaml", ["tiny_math", "tiny_code", "tiny_instruct"], **TINY)
    out = tmp_path / "out"
    kill_after(45, pairs, out, "--no-controls", "--profile", "slurm")
    status, printed = run_sweep(pairs, out, "--no-controls", "--profile", "slurm")
    assert status == 0, printed
    assert "3 of 3 pairs finished" in printed
    assert "with external jobid" in printed
    assert output_of("squeue", "-h") == ""
    assert len(results_of(out)) > 3 * 10
    assert list((out / "sweep").glob("slurm-*.out"))
