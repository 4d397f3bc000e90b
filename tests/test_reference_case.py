"""A small problem with its exact optimum (float64 Newton), solved through the public functions."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import psd_utils as psd

CASE = json.loads((Path(__file__).parent / "data" / "reference_case.json").read_text())
EXPECTED = CASE["expected"]
PROBLEMS = [key for key in EXPECTED if "|" in key]
N_FIT = CASE["n_fit"]


def logits(member: str) -> torch.Tensor:
    return torch.tensor(CASE[f"{member}_logits"], dtype=torch.float64)


def solve(key: str, member: str) -> tuple[psd.Fit, torch.Tensor]:
    """Return the fit and its exact losses on all rows: hidden = logits, head = identity."""
    kind, penalty = key.split("|l2=")
    hidden, head = logits(member), torch.eye(CASE["vocab"], dtype=torch.float64)
    targets, ids = torch.tensor(CASE["targets"]), torch.tensor(EXPECTED["ids"])
    statistics = psd.head_statistics(hidden[:N_FIT], head, targets[:N_FIT], ids)
    fit = psd.fit_correction(statistics, kind=kind, penalty=float(penalty))
    return fit, psd.corrected_nll(hidden, head, targets, fit.correction)


@pytest.mark.parametrize("member", ["base", "derived"])
@pytest.mark.parametrize("key", PROBLEMS)
def test_fit_is_the_exact_optimum(key: str, member: str) -> None:
    expected = EXPECTED[key][member]
    fit, losses = solve(key, member)
    assert fit.convergence.status == "converged"
    assert fit.correction.temperature == pytest.approx(expected["temperature"], abs=1e-6)
    if fit.kind != "temperature":
        assert fit.correction.ids.tolist() == EXPECTED["ids"]
        assert fit.correction.bias.dtype == torch.float64
        assert fit.correction.bias.tolist() == pytest.approx(expected["bias"], abs=1e-6)
    assert float(losses[:N_FIT].mean()) == pytest.approx(expected["fit_loss"], abs=1e-9)
    assert fit.convergence.loss == pytest.approx(expected["fit_loss"], abs=1e-9)
    assert float(losses[N_FIT:].mean()) == pytest.approx(expected["eval_loss"], abs=1e-7)


@pytest.mark.parametrize("key", PROBLEMS)
def test_shares_are_the_published_formula(key: str) -> None:
    frames = []
    for member in ("base", "derived"):
        head, targets = torch.eye(CASE["vocab"], dtype=torch.float64), torch.tensor(CASE["targets"])
        by_correction = {
            "none": psd.corrected_nll(logits(member), head, targets, None),
            "fitted": solve(key, member)[1],
        }
        for correction, losses in by_correction.items():
            rows = pd.DataFrame({"document": CASE["document"], "loss_sum": losses.numpy()})[N_FIT:]
            sums = rows.groupby("document").agg(loss_sum=("loss_sum", "sum"), tokens=("loss_sum", "size")).reset_index()
            frames.append(
                sums.assign(
                    pair="case",
                    member=member,
                    control=None,
                    damage_seed=None,
                    correction=correction,
                    setting=None,
                    split="eval",
                ).astype({"document": str})
            )
    table = psd.recovery_table(pd.concat(frames), n_resamples=200).set_index("correction")
    row, expected = table.loc["fitted"], EXPECTED[key]
    assert row["gap"] == pytest.approx(
        expected["uncorrected_eval"]["derived"] - expected["uncorrected_eval"]["base"], abs=1e-9
    )
    assert row["raw_share"] == pytest.approx(expected["raw_share"], abs=1e-7)
    assert row["symmetric_share"] == pytest.approx(expected["symmetric_share"], abs=1e-7)
