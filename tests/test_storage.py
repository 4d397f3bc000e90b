"""Storage: what scoring needs is said and held, damaged captures are found and mended, batches are hardly padded."""

import gc
import logging
import random
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import REPOSITORY, Child

from psd_utils import score, storage
from psd_utils.batching import MOST_PADDING, batches, padding_share
from psd_utils.capture import open_capture, plan_shards
from psd_utils.corpus import load_corpus
from psd_utils.devices import choose_device
from psd_utils.errors import PsdError
from psd_utils.files import save_file
from psd_utils.pairs import Member, Pair
from psd_utils.score import prepare, score_member
from psd_utils.sources import load_config, load_tokenizer, locate

CPU = choose_device("cpu", "float32")
Usage = namedtuple("Usage", "total used free")
pytestmark = pytest.mark.usefixtures("single_thread")
sys.path.insert(0, str(REPOSITORY / "scripts"))


@pytest.fixture
def scored(pair, tmp_path, monkeypatch):
    """A task and its base's capture, of several shards."""
    monkeypatch.setattr(score, "SHARD_TOKENS", 400)
    task = prepare(pair, None, 2000)
    return task, score_member(task, "base", CPU, tmp_path / "captures")


# ---- room


def test_capture_takes_what_was_said_before(scored, pair):
    task, capture = scored
    needs = storage.scoring_needs(task.corpus, task.base, CPU, load_config(task.base))
    taken = sum(path.stat().st_size for path in capture.folder.iterdir() if path.suffix == ".safetensors")
    assert taken <= needs.disk <= 1.2 * taken
    half = storage.scoring_needs(task.corpus, task.base, choose_device("cpu", "bfloat16"), load_config(task.base))
    assert half.disk < needs.disk
    assert half.memory < needs.memory


def test_disk_and_memory_are_said_before_scoring(pair, tmp_path, caplog):
    task = prepare(pair, None, 500)
    with caplog.at_level(logging.INFO, logger="psd_utils"):
        score_member(task, "base", CPU, tmp_path)
    pattern = r"the capture needs \d+ KiB on disk \([\d.]+ [GM]iB free\) and about [\d.]+ MiB of memory on cpu \("
    assert re.search(pattern, caplog.text)


def test_disk_that_is_too_small_is_refused_before_the_model_is_loaded(pair, tmp_path, monkeypatch):
    task = prepare(pair, None, 500)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 1000, 1000))
    monkeypatch.setattr(score, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(PsdError, match=r"its capture needs \d+ KiB more in .*, where 1 KiB are free; make room"):
        score_member(task, "base", CPU, tmp_path)


def test_what_is_written_already_needs_no_room(scored, tmp_path, monkeypatch):
    task, capture = scored
    (capture.folder / "manifest.json").unlink()
    (capture.folder / "hidden-00001.safetensors").unlink()
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: Usage(10**9, 0, 150_000))
    assert storage.scoring_needs(task.corpus, task.base, CPU, load_config(task.base)).disk > 200_000
    score_member(task, "base", CPU, tmp_path / "captures")


def test_little_memory_is_a_warning(scored, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(storage, "free_memory", lambda device: 2**20)
    with caplog.at_level(logging.WARNING, logger="psd_utils"):
        storage.check_room("model", storage.Needs(10, 2**30), tmp_path, CPU)
    assert caplog.messages == ["model: scoring may run out of memory: about 1.0 GiB needed, 1.0 MiB free"]


def test_configuration_without_sizes_needs_nothing_said(scored):
    assert storage.scoring_needs(scored[0].corpus, scored[0].base, CPU, object()) is None


# ---- memory


def resident(field):
    values = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(values[field].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("rows", [4096, 65_536])
def test_scoring_stays_within_weights_a_shard_and_the_stated_constant(tmp_path, make_model, text_file, rows):
    for seed, name in enumerate(("base", "derived")):
        make_model(tmp_path / name, rows=rows, seed=seed, tied=False, hidden_size=256)
    task = prepare(Pair(str(tmp_path / "base"), str(tmp_path / "derived")), str(text_file), 10**6)
    needs = storage.scoring_needs(task.corpus, task.base, CPU, load_config(task.base))
    weights = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert weights > 2 * 4 * 256 * rows
    assert weights < needs.memory < weights + 6 * 2**20 + storage.WORKSPACE

    def work(step):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        score_member(task, "base", CPU, tmp_path / "captures")
        added = resident("VmHWM") - before
        assert added < needs.memory, (added, needs)

    assert Child(work).end() == 0


def test_tensors_are_written_as_safetensors_writes_them(tmp_path):
    """Piece by piece, so that no copy of a head is made, and with the same bytes."""
    draw = random.Random(0)
    kinds = [torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.bool]
    for _ in range(40):
        tensors = {}
        for i in range(draw.randint(1, 5)):
            shape = draw.choice([(), (0,), (3,), (5, 7), (2, 3, 4), (0, 4), (9000, 300)])
            tensors[f"{draw.choice('abc')}{i}"] = torch.ones(shape).cumsum(0).to(draw.choice(kinds))
        note = draw.choice([None, {"note": '{"a": "é\\n\\u0001\u007f ☃"}'}])
        save_file(tensors, str(tmp_path / "x"), note)
        assert (tmp_path / "x").read_bytes() == safetensors.torch.save(tensors, note)


# ---- batches


@pytest.mark.parametrize("budget", [1024, 8192, 32_768])
def test_at_most_a_twentieth_of_the_demo_text_is_padding(budget):
    tokenizer = load_tokenizer(locate(Member(str(REPOSITORY / "data" / "demo" / "base"))))
    corpus = load_corpus(REPOSITORY / "data" / "demo" / "prose.jsonl.zst", tokenizer, n_tokens=100_000)
    lengths = corpus.lengths.tolist()
    groups = [group for shard in plan_shards(corpus) for group in batches(shard.documents, lengths, budget)]
    assert sorted(d for group in groups for d in group) == list(range(len(lengths)))
    assert padding_share(groups, lengths) <= MOST_PADDING == 0.05
    assert len(groups) < len(lengths) / 2


def test_padding_is_bounded_whatever_the_lengths():
    draw = random.Random(5)
    for longest in (1, 3, 50, 2047):
        for n in (1, 2, 7, 100):
            lengths = [draw.randint(1, longest) for _ in range(n)]
            assert padding_share(batches(range(n), lengths, 4096), lengths) <= MOST_PADDING


def test_equal_lengths_fill_whole_batches():
    assert [len(group) for group in batches(range(100), [10] * 100, 250)] == [25] * 4


# ---- verification


def run_script(capsys, *arguments):
    import verify_captures

    status = verify_captures.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().out


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_sound_captures_are_found_sound(scored, tmp_path, capsys):
    status, said = run_script(capsys, tmp_path / "captures")
    assert status == 0
    assert "1 captures in" in said
    assert "0 damaged files" in said


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_damaged_shard_is_named_and_after_repair_scored_alone(scored, tmp_path, capsys, monkeypatch, damage):
    task, capture = scored
    whole = {path.name: path.read_bytes() for path in capture.folder.iterdir()}
    shard = capture.folder / "hidden-00002.safetensors"
    damage(shard)
    status, said = run_script(capsys, tmp_path / "captures")
    assert status == 1
    assert f"damaged: {shard}" in said
    assert "1 damaged files" in said
    assert (capture.folder / "manifest.json").is_file()  # nothing is changed unless asked for
    status, said = run_script(capsys, tmp_path / "captures", "--repair")
    assert status == 0
    assert f"deleted: {shard}" in said
    assert set(whole) - {path.name for path in capture.folder.iterdir()} == {shard.name, "manifest.json"}
    computed, compute = [], score._score_shard
    monkeypatch.setattr(score, "_score_shard", lambda *a: computed.append(a[2].index) or compute(*a))
    score_member(task, "base", CPU, tmp_path / "captures")
    assert computed == [2]
    assert {path.name: path.read_bytes() for path in capture.folder.iterdir()} == whole


@pytest.mark.parametrize("content", [b"{", b'{"files": []}', b"{}"])
def test_damaged_manifest_takes_the_files_with_it(scored, tmp_path, capsys, content):
    """Without their hashes nothing says that the other files are sound."""
    _, capture = scored
    names = {path.name for path in capture.folder.iterdir()}
    (capture.folder / "manifest.json").write_bytes(content)
    (found,) = storage.verify_captures(tmp_path / "captures", repair=True)
    assert set(found.damaged) == names
    assert list(capture.folder.iterdir()) == []


def test_repair_never_deletes_outside_the_capture(scored, tmp_path):
    _, capture = scored
    outside = tmp_path / "captures" / "mine.safetensors"
    outside.write_text("mine")
    manifest = capture.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"head.safetensors"', '"../mine.safetensors"'))
    storage.verify_captures(tmp_path / "captures", repair=True)
    assert outside.read_text() == "mine"


def test_unfinished_capture_is_left_to_its_next_run(scored, tmp_path):
    _, capture = scored
    (capture.folder / "manifest.json").unlink()
    assert storage.verify_captures(tmp_path / "captures", repair=True) == []
    assert open_capture(capture.folder) is None
    assert (capture.folder / "head.safetensors").is_file()
    shutil.rmtree(capture.folder)
    assert storage.verify_captures(tmp_path / "captures") == []
