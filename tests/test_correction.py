"""Corrections: applying, saving, loading, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import psd_utils as psd
from psd_utils.files import write_tensors


def correction(seed: int = 0, vocabulary: int = 30, k: int = 7, temperature: float = 1.3) -> psd.Correction:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(vocabulary, generator=generator)[:k]
    return psd.Correction(ids, torch.randn(k, generator=generator) * 5, temperature, vocabulary, "abc")


@given(seed=st.integers(0, 1000), temperature=st.floats(0.05, 20))
@settings(max_examples=30, deadline=None)
def test_apply_is_logits_over_temperature_plus_bias(seed: int, temperature: float) -> None:
    fix = correction(seed, temperature=temperature)
    logits = torch.randn(2, 3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    expected = logits / temperature
    for token, bias in zip(fix.ids.tolist(), fix.bias.tolist(), strict=True):
        expected[..., token] += bias
    assert torch.allclose(fix.apply(logits), expected, atol=1e-12)
    assert torch.equal(logits, before)


def test_corrected_nll_is_the_cross_entropy_of_the_applied_logits() -> None:
    fix = correction()
    hidden, head = torch.randn(40, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    targets = torch.randint(0, 30, (40,))
    expected = torch.nn.functional.cross_entropy(fix.apply(hidden @ head.T), targets, reduction="none")
    assert torch.allclose(psd.corrected_nll(hidden, head, targets, fix), expected, atol=1e-12)


def test_identity_reproduces_the_raw_loss_exactly() -> None:
    hidden, head, targets = torch.randn(40, 8), torch.randn(30, 8), torch.randint(0, 30, (40,))
    raw = psd.corrected_nll(hidden, head, targets, None)
    zero = psd.Correction(torch.arange(10), torch.zeros(10))
    assert torch.equal(psd.corrected_nll(hidden, head, targets, psd.Correction.identity()), raw)
    assert torch.equal(psd.corrected_nll(hidden, head, targets, zero), raw)


def test_saved_correction_loads_equal_and_saves_to_the_same_bytes(tmp_path: Path) -> None:
    fix = correction()
    fix.save(tmp_path / "a.safetensors", kind="bias", penalty=0.1)
    loaded = psd.Correction.load(tmp_path / "a.safetensors")
    assert torch.equal(loaded.ids, fix.ids)
    assert torch.equal(loaded.bias, fix.bias)
    assert (loaded.temperature, loaded.vocabulary, loaded.tokenizer) == (1.3, 30, "abc")
    loaded.save(tmp_path / "b.safetensors", kind="bias", penalty=0.1)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("ids", "bias", "temperature", "message"),
    [
        ([1, 2, 1], [0.0, 0.0, 0.0], 1.0, "token id 1 occurs more than once"),
        ([1, -2], [0.0, 0.0], 1.0, "token id -2 is negative"),
        ([1, 30], [0.0, 0.0], 1.0, "token id 30 is beyond the head, which has 30 rows"),
        ([1], [0.0, 0.0], 1.0, "1 ids but a bias of shape"),
        ([1], [float("nan")], 1.0, "without NaN"),
        ([1], [float("inf")], 1.0, "must not be \\+inf"),
        ([1], [0.0], 0.0, "temperature must be positive and finite, found 0.0"),
        ([1], [0.0], float("inf"), "temperature must be positive and finite, found inf"),
    ],
)
def test_impossible_corrections_are_refused(
    ids: list[int], bias: list[float], temperature: float, message: str
) -> None:
    with pytest.raises(psd.PsdError, match=message):
        psd.Correction(torch.tensor(ids), torch.tensor(bias), temperature, 30)


def test_ids_beyond_the_logits_are_refused() -> None:
    with pytest.raises(psd.PsdError, match="beyond the head, which has 5 rows"):
        correction().apply(torch.zeros(2, 5))


def test_files_that_are_no_correction_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, str(tmp_path / "foreign.safetensors"))
    write_tensors(tmp_path / "other.safetensors", {"weight": torch.zeros(2)})
    (tmp_path / "broken.safetensors").write_bytes(b"not a tensor file")
    for name, message in (
        ("missing.safetensors", "missing.safetensors is missing"),
        ("other.safetensors", "is not a saved correction: it holds \\['weight'\\]"),
        ("broken.safetensors", "is damaged, or not a file of this package"),
        ("foreign.safetensors", "is damaged, or not a file of this package"),
    ):
        with pytest.raises(psd.PsdError, match=message):
            psd.Correction.load(tmp_path / name)
