"""Tensors and files that could give a wrong number are refused, in words."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psd_utils as psd
from psd_utils.files import read_tensors, write_tensors

N, V, WIDTH = 20, 30, 8


def arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(N, WIDTH, generator=generator),
        "head": torch.randn(V, WIDTH, generator=generator),
        "targets": torch.randint(0, V, (N,), generator=generator),
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.ones(N, WIDTH, dtype=torch.int64)}, "hidden must be floating point, found torch.int64"),
        (
            {"hidden": torch.ones(N, WIDTH, dtype=torch.complex64)},
            "hidden must be floating point, found torch.complex64",
        ),
        ({"head": torch.ones(V, WIDTH).numpy()}, "head must be a torch tensor, found ndarray"),
        ({"targets": torch.ones(N, dtype=torch.uint8)}, "targets must be int64 or int32 token ids, found torch.uint8"),
        ({"head": torch.full((V, WIDTH), float("nan"))}, "the head row 0 is NaN or infinite"),
        ({"hidden": torch.full((N, WIDTH), float("inf"))}, "the hidden state of token 0 is NaN or infinite"),
        ({"hidden": torch.full((N, WIDTH), 3e38), "head": torch.ones(V, WIDTH)}, "logits overflow torch.float32"),
    ],
)
def test_tensors_that_give_no_number_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(psd.PsdError, match=message):
        psd.corrected_nll(**arguments(**changes), correction=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": float("nan")}, "the scale of the logits must be finite"),
        ({"softcap": 0.0}, "the soft cap must be positive and finite"),
        ({"bias": torch.full((V,), float("nan"))}, "the head's bias must not be NaN"),
        ({"masked": torch.ones(V)}, "masked rows must be given as bool"),
    ],
)
def test_readouts_that_give_no_number_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(psd.PsdError, match=message):
        psd.Readout(**settings)


def test_int32_ids_and_tensors_with_gradients_give_the_same_numbers() -> None:
    plain = arguments()
    other = arguments(hidden=plain["hidden"].clone().requires_grad_(), targets=plain["targets"].int())
    ids = torch.tensor([5, 1, 7])
    assert torch.equal(psd.corrected_nll(**plain, correction=None), psd.corrected_nll(**other, correction=None))
    a, b = psd.head_statistics(**plain, ids=ids), psd.head_statistics(**other, ids=ids.int())
    assert torch.equal(a.set_logits, b.set_logits)
    assert torch.equal(a.target_index, b.target_index)


@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
def test_flipped_byte_in_a_tensor_file_is_noticed_when_it_is_read(tmp_path: Path, where: float) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"hidden": torch.randn(50, 8), "scalar": torch.tensor(1.0)}, {"keys": ["a", "b"]})
    tensors, note = read_tensors(path)
    assert tensors["hidden"].shape == (50, 8)
    assert note == {"keys": ["a", "b"]}
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)
    with pytest.raises(psd.PsdError, match=r"a.safetensors is damaged"):
        read_tensors(path)


def test_flipped_byte_in_a_capture_never_gives_another_gap(pair: psd.Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_damage_seeds": 0, "n_resamples": 200, "device": "cpu"}
    done = psd.run_study(pair, out_dir=tmp_path / "a", **options)
    for name in ("head.safetensors", "hidden-00001.safetensors", "corpus.safetensors"):
        path = done.captures["derived"].folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 0x40]) + whole[-4:])
        with pytest.raises(psd.PsdError, match=rf"{name} is damaged"):
            psd.run_study(pair, out_dir=tmp_path / "b", **options)
        path.write_bytes(whole)
    again = psd.run_study(pair, out_dir=tmp_path / "b", **options)
    assert again.recovery["gap"].tolist() == done.recovery["gap"].tolist()


@pytest.mark.usefixtures("single_thread")
def test_damaged_shard_is_scored_anew_where_the_manifest_is_gone(pair: psd.Pair, tmp_path: Path) -> None:
    # a token count of its own: captures of other tests may have been scored with another number of threads
    options: dict[str, Any] = {"n_damage_seeds": 0, "n_resamples": 200, "device": "cpu", "n_tokens": 2800}
    done = psd.run_study(pair, out_dir=tmp_path / "a", **options)
    path = done.captures["derived"].folder / "hidden-00000.safetensors"
    whole, manifest = path.read_bytes(), path.with_name("manifest.json").read_bytes()
    path.write_bytes(whole[:-100] + bytes(100))
    path.with_name("manifest.json").unlink()
    psd.run_study(pair, out_dir=tmp_path / "b", **options)
    assert path.read_bytes() == whole
    assert path.with_name("manifest.json").read_bytes() == manifest


def test_parts_without_a_summary_are_not_taken_for_this_run(pair: psd.Pair, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_damage_seeds": 0, "n_resamples": 200, "device": "cpu"}
    first = psd.run_study(pair, out_dir=tmp_path, **options)
    (first.path / "summary.json").unlink()
    found = psd.run_study(pair, out_dir=tmp_path, n_tokens=2500, **options).recovery
    expected = psd.run_study(pair, out_dir=tmp_path / "fresh", n_tokens=2500, **options).recovery
    assert found["gap"].tolist() == expected["gap"].tolist()
    (first.path / "summary.json").write_text("{ cut off")
    with pytest.raises(psd.PsdError, match=r"summary.json is damaged"):
        psd.run_study(pair, out_dir=tmp_path, n_tokens=2500, **options)
    replaced = psd.run_study(pair, out_dir=tmp_path, n_tokens=2500, overwrite=True, **options).recovery
    assert replaced["gap"].tolist() == expected["gap"].tolist()


def test_one_model_by_two_spellings_is_refused(pair: psd.Pair) -> None:
    with pytest.raises(psd.PsdError, match="base and derived are the same model"):
        psd.Pair(base=pair.base.model, derived=pair.base.model + "/.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"member": "damage"}, "unknown member 'damage'"),
        ({"control": "noise"}, "unknown control 'noise'"),
        ({"damage_seed": None}, "rows of a damaged model without a damage_seed"),
        ({"pair": None}, "rows without a pair"),
    ],
)
def test_loss_rows_that_would_vanish_are_refused(pair: psd.Pair, tmp_path: Path, change: Any, message: str) -> None:
    options: dict[str, Any] = {"n_damage_seeds": 1, "n_resamples": 200, "device": "cpu"}
    losses = psd.run_study(pair, out_dir=tmp_path, **options).losses.astype(object)
    damaged = losses["member"] == "damaged"
    for name, value in change.items():
        losses.loc[damaged, name] = value
    with pytest.raises(psd.PsdError, match=message):
        psd.recovery_table(losses, n_resamples=200)
