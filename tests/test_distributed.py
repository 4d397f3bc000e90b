"""Several gloo processes write the capture that one writes, and fit what one fits."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY, Child

from psd_utils import score
from psd_utils.capture import open_capture, verify
from psd_utils.correction import KINDS
from psd_utils.devices import choose_device
from psd_utils.distributed import ShardedObjective, crew_of, fit_together, start_processes
from psd_utils.errors import PsdError
from psd_utils.fit import fit_correction
from psd_utils.kernels import head_statistics
from psd_utils.objectives import StatisticsObjective
from psd_utils.score import prepare, score_member

CPU = choose_device("cpu", "float32")
pytestmark = pytest.mark.usefixtures("single_thread")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(n, work):
    """Run work(accelerator) in `n` forked gloo processes with the environment that torchrun gives; return statuses."""
    port = str(free_port())

    def child(rank):
        def run(_step):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            accelerator = start_processes("cpu")
            assert (accelerator.num_processes, accelerator.process_index) == (n, rank)
            work(accelerator)
            accelerator.end_training()

        return Child(run)

    return [started.end() for started in [child(rank) for rank in range(n)]]


@pytest.fixture(scope="module", autouse=True)
def small_shards(single_thread):
    """Some ten shards, so that there is something to deal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "SHARD_TOKENS", 300)
        yield


@pytest.fixture(scope="module")
def task(pair):
    return prepare(pair, None, 3000)


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """The files of a capture that one process wrote."""
    folder = tmp_path_factory.mktemp("alone")
    assert Child(lambda _: score_member(task, "derived", CPU, folder)).end() == 0
    return contents(folder)


def contents(folder):
    (target,) = (path for path in folder.iterdir() if path.name != ".locks")
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.mark.parametrize("n", [2, 3])
def test_n_processes_write_the_bytes_that_one_writes(task, alone, n, tmp_path):
    def work(accelerator):
        dealt = []
        crew = crew_of(accelerator)

        def deal(shards):
            dealt.extend(crew.deal(shards))
            return dealt

        score_member(task, "derived", CPU, tmp_path, crew=score.Crew(crew.leader, deal, crew.wait))
        assert 0 < len(dealt) < len(alone) - 3  # each has its part, and none has all

    assert together(n, work) == [0] * n
    assert contents(tmp_path) == alone
    capture = open_capture(next(tmp_path.glob("*/manifest.json")).parent)
    assert verify(capture) == []


def test_processes_finish_what_one_began(task, alone, tmp_path):
    assert Child(lambda _: score_member(task, "derived", CPU, tmp_path)).end() == 0
    (target,) = (path for path in tmp_path.iterdir() if path.name != ".locks")
    for name in ("manifest.json", "hidden-00001.safetensors", "hidden-00004.safetensors"):
        (target / name).unlink()
    (target / "hidden-00002.safetensors").write_bytes(b"half")
    assert together(2, lambda a: score_member(task, "derived", CPU, tmp_path, crew=crew_of(a))) == [0, 0]
    assert contents(tmp_path) == alone


def problem(n_tokens=600, vocabulary=60, width=12):
    g = torch.Generator().manual_seed(3)
    head = torch.randn(vocabulary, width, generator=g, dtype=torch.float64)
    hidden = torch.randn(n_tokens, width, generator=g, dtype=torch.float64)
    tilt = torch.randn(vocabulary, generator=g, dtype=torch.float64) * 0.5
    targets = torch.multinomial((0.8 * hidden @ head.T + tilt).softmax(1), 1, generator=g)[:, 0]
    return hidden, head, targets, torch.arange(0, vocabulary, 2)


def test_sharded_fit_reaches_the_optimum_of_one_process_to_1e_8(tmp_path):
    hidden, head, targets, ids = problem()
    whole = head_statistics(hidden, head, targets, ids)
    pieces = [slice(0, 350), slice(350, 380), slice(380, 600)]  # parts of very different size

    def work(accelerator):
        part = whole.tokens(pieces[accelerator.process_index])
        fits = {}
        for kind in KINDS:
            if kind not in ("none", "bias_all"):
                fit = fit_together(part, kind, 1e-4 if "bias" in kind else 0.0)
                fits[kind] = (fit.correction.beta, fit.correction.bias, fit.convergence)
        torch.save(fits, tmp_path / f"{accelerator.process_index}.pt")

    assert together(3, work) == [0, 0, 0]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(3)]
    for kind, (beta, bias, convergence) in found[0].items():
        one = fit_correction(whole, kind, 1e-4 if "bias" in kind else 0.0)
        assert abs(beta - one.correction.beta) < 1e-8
        # the objective is flat at its optimum: 1e-8 in a bias would need 1e-16 in the loss
        torch.testing.assert_close(bias, one.correction.bias, atol=1e-6, rtol=0)
        assert abs(convergence.loss - one.convergence.loss) < 1e-10
        assert convergence.status == one.convergence.status
        for other in found[1:]:
            assert other[kind][0] == beta
            assert torch.equal(other[kind][1], bias)


def test_statistics_that_do_not_go_together_are_refused_in_every_process():
    hidden, head, targets, ids = problem()

    def work(accelerator):
        first = accelerator.process_index == 0
        own = head_statistics(hidden, head, targets, ids if first else ids[1:])
        with pytest.raises(PsdError, match="process 1 has statistics of other ids"):
            ShardedObjective(StatisticsObjective(own))
        part = head_statistics(hidden, head, targets, ids).tokens(slice(None) if first else slice(0, 0))
        with pytest.raises(PsdError, match="process 1 has no tokens"):
            ShardedObjective(StatisticsObjective(part))

    assert together(2, work) == [0, 0]


def test_without_processes_the_error_says_how_to_start_them():
    statistics = head_statistics(*problem())
    with pytest.raises(PsdError, match="start with torchrun"):
        ShardedObjective(StatisticsObjective(statistics))
    with pytest.raises(PsdError, match="auto, cpu or cuda"):
        start_processes("cuda:1")


def torchrun(n, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port"]
    command += [str(free_port()), "-m", "psd_utils.distributed", "--device", "cpu", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_torchrun_scores_a_registered_pair_and_a_mistake_ends_with_its_reason(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "pyproject.toml").symlink_to(REPOSITORY / "pyproject.toml")
    for name in ("pairs.yaml", "demo", "golden"):
        (root / "data" / name).symlink_to(REPOSITORY / "data" / name)
    monkeypatch.setenv("PSD_ROOT", str(root))
    done = torchrun(2, "--pair", "tiny_math", "--n-tokens", "40000")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "by 2 processes" in done.stderr
    captures = [open_capture(path.parent) for path in (root / "data" / "captures").glob("*/manifest.json")]
    assert len(captures) == 2
    assert all(verify(capture) == [] for capture in captures)
    failed = torchrun(2, "--pair", "tiny_maths", "--n-tokens", "40000")
    assert failed.returncode != 0
    assert "did you mean 'tiny_math" in failed.stderr
