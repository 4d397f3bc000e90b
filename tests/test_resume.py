"""A run that is killed, disturbed or damaged goes on and ends with the bytes of one that never was."""

import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
import safetensors.torch
from conftest import Child

from psd_utils import capture, files, score
from psd_utils.capture import open_capture, read_shard, verify
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.score import prepare, score_member

CPU = choose_device("cpu", "float32")
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module", autouse=True)
def small_shards(single_thread):
    """Many small shards, so that there is much to interrupt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "SHARD_TOKENS", 150)
        yield


@pytest.fixture(scope="module")
def task(pair):
    return prepare(pair, None, 3000)


def slow_down(step):
    """Make every write slow and report it: before it, in its middle, and before and after the rename."""
    save, replace = safetensors.torch.save, os.replace

    def pause():
        step()
        time.sleep(0.002)

    def slow_save(tensors, path, metadata=None):
        content = save(tensors, metadata)
        pause()
        with open(path, "wb") as handle:
            handle.write(content[: len(content) // 2])
            handle.flush()
            pause()
            handle.write(content[len(content) // 2 :])

    def slow_replace(source, target):
        pause()
        replace(source, target)
        pause()

    files.save_file, files.os.replace = slow_save, slow_replace


def score_base(task, folder, slow=False):
    def work(step):
        if slow:
            slow_down(step)
        score_member(task, "base", CPU, folder)

    return work


def contents(folder):
    """Every file of the only capture in `folder`, by name."""
    (target,) = (path for path in folder.iterdir() if path.name != ".locks")
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(task, tmp_path_factory):
    """The files of a capture that was scored in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert Child(score_base(task, folder)).end() == 0
    found = contents(folder)
    assert len(found) > 20
    return found


def test_slowed_run_writes_the_same_bytes(task, tmp_path, undisturbed):
    assert Child(score_base(task, tmp_path, slow=True)).end() == 0
    assert contents(tmp_path) == undisturbed


def test_twenty_kills_also_inside_a_write_end_with_the_same_bytes(task, tmp_path, undisturbed):
    draw = random.Random(0)
    kills, inside_a_write, unfinished, folder = 0, 0, 0, tmp_path / "0"
    while kills < 20:
        missing = set(undisturbed) - {path.name for path in folder.glob("*/*")}
        child = Child(score_base(task, folder, slow=True))
        child.wait_for_steps(draw.randrange(4 * len(missing) + 1))
        time.sleep(draw.uniform(0, 0.004))
        os.kill(child.pid, signal.SIGKILL)
        killed = child.end() == -signal.SIGKILL
        left = [path.name for path in folder.glob("*/*")]
        kills += killed
        inside_a_write += killed and any(name.endswith(".tmp") for name in left)
        unfinished += killed and "manifest.json" not in left
        # now and then the run that resumes is killed as well
        if draw.random() < 0.6 or not killed:
            assert Child(score_base(task, folder)).end() == 0
            assert contents(folder) == undisturbed
            folder = tmp_path / str(kills)
    assert inside_a_write >= 3
    assert unfinished >= 15


def test_two_processes_on_one_capture_take_turns(task, tmp_path, undisturbed):
    compute, log = score._score_shard, tmp_path / "log"

    def work(step):
        def logged(model, corpus, shard, device):
            with open(log, "a") as handle:
                handle.write(f"{os.getpid()} ")
            return compute(model, corpus, shard, device)

        score._score_shard = logged
        score_base(task, tmp_path / "captures", slow=True)(step)

    children = [Child(work) for _ in range(2)]
    assert [child.end() for child in children] == [0, 0]
    assert contents(tmp_path / "captures") == undisturbed
    # one of them computed every shard, the other found them there
    computed = log.read_text().split()
    assert len(computed) == len(undisturbed) - 3
    assert len(set(computed)) == 1


def test_a_process_that_waits_goes_on_when_the_other_is_killed(task, tmp_path, undisturbed):
    first = Child(score_base(task, tmp_path, slow=True))
    first.wait_for_steps(20)
    second = Child(score_base(task, tmp_path))
    os.kill(first.pid, signal.SIGKILL)
    assert first.end() == -signal.SIGKILL
    assert second.end() == 0
    assert contents(tmp_path) == undisturbed


@contextmanager
def counted_shards(monkeypatch):
    """The numbers of the shards that are computed."""
    computed = []
    compute = score._score_shard

    def counting(model, corpus, shard, device):
        computed.append(shard.index)
        return compute(model, corpus, shard, device)

    with monkeypatch.context() as patch:
        patch.setattr(score, "_score_shard", counting)
        yield computed


def test_a_resumed_run_computes_only_what_is_missing(task, tmp_path, undisturbed, monkeypatch):
    child = Child(score_base(task, tmp_path, slow=True))
    child.wait_for_steps(40)
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    (target,) = (path for path in tmp_path.iterdir() if path.name != ".locks")
    before = {path.name for path in target.glob("hidden-*.safetensors")}
    assert 0 < len(before) < len(undisturbed) - 3
    with counted_shards(monkeypatch) as computed:
        score_member(task, "base", CPU, tmp_path)
    expected = {name for name in undisturbed if name.startswith("hidden-")} - before
    assert {f"hidden-{index:05d}.safetensors" for index in computed} == expected


# ---- damage


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "seen_at_opening"),
    [
        (lambda content: flip(content, len(content) - 1), False),
        (lambda content: flip(content, len(content) // 2), False),
        (lambda content: content[:-100], True),
        (lambda content: content[:10], True),
        (lambda content: b"", True),
        (lambda content: None, True),
    ],
    ids=["last byte", "middle byte", "cut", "header cut", "empty", "missing"],
)
def test_damaged_shard_is_named_and_scored_anew_alone(task, tmp_path, monkeypatch, damage, seen_at_opening):
    scored = score_member(task, "base", CPU, tmp_path)
    whole = contents(tmp_path)
    path = scored.folder / "hidden-00003.safetensors"
    damaged = damage(path.read_bytes())
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    assert verify(scored) == ["hidden-00003.safetensors"]
    if seen_at_opening:
        with pytest.raises(PsdError) as caught:
            score_member(task, "base", CPU, tmp_path)
        size = "no file" if damaged is None else f"{len(damaged)} bytes"
        assert f"hidden-00003.safetensors is damaged ({size}, the manifest says" in str(caught.value)
        assert "delete that file and manifest.json, and score again: only that part is made anew" in str(caught.value)
    path.unlink(missing_ok=True)
    (scored.folder / "manifest.json").unlink()
    assert open_capture(scored.folder) is None
    with counted_shards(monkeypatch) as computed:
        again = score_member(task, "base", CPU, tmp_path)
    assert computed == [3]
    assert verify(again) == []
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("cut", [0, 10, -100], ids=["empty", "header cut", "cut"])
def test_half_a_shard_of_an_unfinished_run_is_scored_again(task, tmp_path, cut, monkeypatch):
    """A file system may lose the end of a file at a power cut, rename or not."""
    scored = score_member(task, "base", CPU, tmp_path)
    whole = contents(tmp_path)
    (scored.folder / "manifest.json").unlink()
    path = scored.folder / "hidden-00005.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with counted_shards(monkeypatch) as computed:
        score_member(task, "base", CPU, tmp_path)
    assert computed == [5]
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("name", ["head.safetensors", "corpus.safetensors"])
def test_damaged_head_or_corpus_is_named(task, tmp_path, name):
    scored = score_member(task, "base", CPU, tmp_path)
    path = scored.folder / name
    path.write_bytes(flip(path.read_bytes(), 3))  # in the length of the header
    assert verify(scored) == [name]
    with pytest.raises(PsdError, match=f"{name} is damaged.*delete manifest.json beside it and score again"):
        open_capture(scored.folder).head()


def test_shard_that_is_damaged_when_it_is_read_is_named(task, tmp_path):
    scored = score_member(task, "base", CPU, tmp_path)
    path = scored.folder / "hidden-00000.safetensors"
    path.write_bytes(flip(path.read_bytes(), 3))
    with pytest.raises(PsdError, match=r"hidden-00000.safetensors is damaged"):
        scored.nll()
    path.unlink()
    shard = capture.plan_shards(scored.corpus, 150)[0]
    with pytest.raises(
        PsdError, match=r"hidden-00000.safetensors is missing; delete manifest.json beside it and score"
    ):
        read_shard(scored.folder, shard)


def test_damaged_manifest_is_named(task, tmp_path):
    scored = score_member(task, "base", CPU, tmp_path)
    for content in (b"{", b"[]", b"\xff"):
        (scored.folder / "manifest.json").write_bytes(content)
        with pytest.raises(PsdError, match=r"manifest.json is damaged: .*; delete it to have it made again"):
            open_capture(scored.folder)


def test_capture_of_another_format_is_refused(task, tmp_path, monkeypatch):
    scored = score_member(task, "base", CPU, tmp_path)
    monkeypatch.setattr(capture, "FORMAT", 99)
    with pytest.raises(PsdError, match=r"has capture format 2, this version reads 99"):
        open_capture(scored.folder)
