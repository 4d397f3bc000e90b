"""From runs to the numbers that the acceptance table asks for.

In: results of the arms, equations, interventions and sweeps. Out: findings, name -> values over seeds or
runs. A number whose run was too short or too small is left out, and the acceptance table says "not run".
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from psd_utils.spurious.acceptance import Findings
from psd_utils.spurious.arms import ArmResult
from psd_utils.spurious.equations import ReducedRun, state_gradient
from psd_utils.spurious.laws import cell_means, depth, timing, withdrawal
from psd_utils.spurious.memory import raw_states
from psd_utils.spurious.trajectory import Trajectory

FULL_STEPS = 5000
"""Length of the specification's runs: what is claimed of their end is claimed of this step."""


def arm_findings(results: dict[str, ArmResult]) -> Findings:
    """Numbers of rows 1–14, 23 and 24, as far as the arms that were run allow."""
    found: dict[str, np.ndarray] = {}
    for name, result in results.items():
        table = result.summary()
        columns = ["trough", "trough_step", "max_after", "recovery", "new_at_trough", "B_at_trough"]
        if result.trajectory.steps[-1] >= FULL_STEPS:
            columns += ["end", "B_end", "peak_content", "end_content"]
        found |= {f"{name}.{column}": table[column].to_numpy(float) for column in columns}
        found[f"{name}.gate_step"] = table["gate_step"].fillna(np.inf).to_numpy(float)
        found[f"{name}.rebound"] = _one(rebound(result.trajectory["accuracy_A"].mean(1).numpy()))
        for step in (80, 100, 200):
            found[f"{name}.A_{step}"] = result.trajectory.at("accuracy_A", step).numpy()
    if "model" in results:
        found |= _model_findings(results["model"])
    if "all_values" in results:
        run = results["all_values"].trajectory
        early = np.array(run.steps) <= 1000
        gap = (run["accuracy_A"] - run["accuracy_B"]).mean(1).abs().numpy()
        found["all_values.A_minus_B"] = _one(gap[early].max())
    if "linear" in results:
        length = results["linear"].trajectory["state_length"].numpy()
        fall = (np.maximum.accumulate(length, 0) - length).max(0) / np.ptp(length, axis=0)
        found["linear.state_fall"] = fall
    if {"model", "frozen_readout"} <= set(results):
        for column in ("trough", "max_after"):
            found[f"frozen_minus_model.{column}"] = found[f"frozen_readout.{column}"] - found[f"model.{column}"]
    ends = [r.summary()["erosion_ratio"].to_numpy(float) for r in results.values()]
    found["erosion.ratio"] = np.concatenate(ends)
    return found


def _model_findings(model: ArmResult) -> dict[str, np.ndarray]:
    run, table = model.trajectory, model.summary()
    steps = np.array(run.steps)
    low = [run.nearest(step) for step in table["trough_step"]]
    seeds = range(len(run.seeds))

    def at_trough(name: str) -> np.ndarray:
        return np.array([run[name][t, i].item() for i, t in zip(seeds, low, strict=True)])

    length, margin = run["state_length"].numpy(), run["individual_margin"].numpy()
    peaks = steps[length.argmax(0)]
    right = margin >= 0
    crossings = np.where(right.any(0), steps[right.argmax(0)], np.nan)
    found = {
        "pretraining.gate_step": model.pretrained.gate_step.numpy().astype(float),
        "pretraining.rate": model.pretrained.rate.numpy(),
        "pretraining.accuracy_A": run["accuracy_A"][0].numpy(),
        "pretraining.accuracy_B": run["accuracy_B"][0].numpy(),
        "matching.rate": model.matched.rate.numpy(),
        "matching.gate_step": model.matched.gate_step.numpy(),
        "matching.matched": _one(model.matched.matched.double().mean().item()),
        "model.recovered_share": _one((table["recovery"] >= 0.25).mean()),
        "model.own_half_min": run["own_half_A"].min(0).values.numpy(),
        "model.B_minus_A_at_trough": (table["B_at_trough"] - table["trough"]).to_numpy(float),
        "split.individual_at_trough": at_trough("individual_only_A"),
        "split.common_at_trough": at_trough("common_only_A"),
        "turning.peak_step": _one(steps[length.mean(1).argmax()]),
        "turning.crossing_minus_peak": _one(np.abs(crossings - peaks).max()),
    }
    if steps[-1] >= 1000:
        found["turning.length_1000_over_peak"] = run.at("state_length", 1000).numpy() / length.max(0)
    if steps[-1] >= FULL_STEPS:
        found["model.end_below_max"] = (table["max_after"] - table["end"]).to_numpy(float)
        individual = run["individual"]
        found["model.individual_growth"] = (individual[-1] - individual[run.nearest(2000)]).numpy()
        found["split.individual_at_end"] = run["individual_only_A"][-1].numpy()
        found["split.common_at_end"] = run["common_only_A"][-1].numpy()
    return found


def rebound(curve: np.ndarray) -> float:
    """The largest rise of a curve above its lowest point so far, in the curve's units."""
    return float((curve - np.minimum.accumulate(curve)).max())


def equation_findings(model: ArmResult, reduced: dict[str, ReducedRun]) -> Findings:
    """Numbers of rows 21 and 22: the gradient split against autograd, and the reduced equation's errors.

    Args:
        model: an arm with RMS normalisation; its pretrained weights are used.
        reduced: "rms" and "linear" -> the reduced equation along 1000 steps.
    """
    h = raw_states(model.world.new.keys, model.pretrained.weights).requires_grad_()
    answers, U = model.world.new.answers, model.pretrained.weights.U
    x = h * h.shape[-1] ** 0.5 / torch.linalg.vector_norm(h, dim=-1, keepdim=True)
    loss = torch.nn.functional.cross_entropy(torch.bmm(x, U).flatten(0, 1), answers.flatten(), reduction="sum")
    (true,) = torch.autograd.grad(loss, h)
    split = state_gradient(h.detach(), answers, U, "rms").total
    error = torch.linalg.vector_norm(split - true, dim=(1, 2)) / torch.linalg.vector_norm(true, dim=(1, 2))
    found = {"gradient_split.error": error.numpy()}
    for arm, run in reduced.items():
        for which in ("predicted", "corrected", "vector"):
            found[f"reduced.{arm}.{which}"] = run.error(which).numpy()
    return found


def intervention_findings(
    offsets: dict[str, pd.DataFrame],
    replays: pd.DataFrame,
    surgeries: pd.DataFrame,
    equal: pd.DataFrame,
    leading: pd.DataFrame,
    last_step: int,
) -> Findings:
    """Numbers of rows 15–20.

    Args:
        offsets: moment ("trough", "end") -> table of offset_subtraction.
        replays: brief_replay at the trough.
        surgeries: table of surgery.
        equal: table of equal_accuracy with removed "trained" and "row".
        leading: table of leading_directions.
        last_step: length of the run: numbers of its end are left out if shorter than the specification's.
    """
    found: dict[str, np.ndarray] = {}
    for moment, table in offsets.items():
        if moment == "end" and last_step < FULL_STEPS:
            continue
        for name, part in table.groupby("estimated_from"):
            found[f"offset.{moment}.{name}"] = part["accuracy"].to_numpy()
    for (k, steps), part in replays.groupby(["n_facts", "n_steps"]):
        found[f"replay.{k}.{steps}"] = part["accuracy"].to_numpy()
    at = surgeries[surgeries["moment"] == "trough"].pivot(index="seed", columns="removed", values="accuracy_A")
    found["surgery.random_4_change"] = (at["random_4"] - at["trained"]).to_numpy()
    for level, part in equal.groupby("level"):
        wide = part.pivot(index="seed", columns="removed", values="accuracy_A")
        if bool(wide.isna().to_numpy().any()):
            continue
        found[f"equal.{level:g}.trained"] = wide["trained"].to_numpy()
        found[f"equal.{level:g}.row"] = wide["row"].to_numpy()
        found[f"equal.{level:g}.gap"] = (wide["row"] - wide["trained"]).to_numpy()
    cosine = leading.groupby("step")["cosine"].mean()
    found["leading.cosine_5_100"] = _one(cosine[(cosine.index >= 5) & (cosine.index <= 100)].min())
    if 200 in cosine.index:
        found["leading.cosine_200"] = leading.loc[leading["step"] == 200, "cosine"].to_numpy()
    return found


def replay_findings(table: pd.DataFrame) -> Findings:
    """Numbers of row 33, from replay_in_training: the never-replayed facts' trough for 0, 4, 16 and 64
    facts.
    """
    wanted = (0, 4, 16, 64)
    part = table[(table["per_step"] == 16) | (table["n_facts"] == 0)]
    means = part.groupby("n_facts")["trough"].mean()
    if not set(wanted) <= set(means.index):
        return {}
    found = {f"training_replay.{k}": part.loc[part["n_facts"] == k, "trough"].to_numpy(float) for k in wanted}
    return found | {"training_replay.smallest_rise": _one(np.diff(means.loc[list(wanted)]).min())}


def law_findings(table: pd.DataFrame, base: ArmResult | None = None) -> Findings:
    """Numbers of rows 26–32 from a sweep; a row whose cells were not all run is left out.

    Args:
        table: from laws.sweep.
        base: the model arm, whose runs join the recovery-level law.
    """
    means = {axis: part.set_index("value") for axis, part in cell_means(table).groupby("setting")}
    found: dict[str, np.ndarray] = {}

    def has(axis: str, values: Sequence[float]) -> bool:
        return axis in means and set(values) <= set(means[axis].index)

    doses = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4]
    if has("dose", [*doses, 8]):
        for name, fit in timing(table).items():
            found[f"timing.{name}"] = _one(fit.slope)
            found[f"timing.{name}_r2"] = _one(fit.r2)
        part = means["dose"].loc[doses]
        for column in ("trough", "end", "max_after", "at_equal_training", "trough_every_step", "probability_trough"):
            found[f"dose.{column}_spread"] = _one(np.ptp(part[column]))
        found["dose.new_at_trough_low"] = _one(part["new_at_trough"].min())
        found["dose.new_at_trough_high"] = _one(part["new_at_trough"].max())
    for axis, values, column, sign in (
        ("alpha", [0.3, 0.4, 0.5, 0.6, 0.7], "trough", -1),
        ("n_new", [32, 64, 128, 256], "trough", -1),
        ("dimension", [64, 96, 128, 192, 256], "max_after", 1),
    ):
        if has(axis, values):
            curve = means[axis].loc[values, column]
            found[f"{axis}.smallest_step"] = _one((sign * np.diff(curve)).min())
            found |= {f"{axis}.{column}_{v:g}": _one(curve[v]) for v in values}
    if has("alpha", [0.3, 0.4, 0.5, 0.6, 0.7]):
        recovered = means["alpha"].loc[[0.3, 0.4, 0.5, 0.6, 0.7], "max_after"]
        found["alpha.max_after_low"] = _one(recovered.min())
        found["alpha.max_after_high"] = _one(recovered.max())
    if has("alpha", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]) and has("n_new", [16, 32, 50, 64, 128, 256]):
        for name, fit in depth(table).items():
            found[f"depth.{name}"], found[f"depth.{name}_r2"] = _one(fit.slope), _one(fit.r2)
        if "dose" in means:
            runs = table[table["setting"].isin(["alpha", "n_new", "dose"])]
            runs = runs if base is None else pd.concat([runs, base.summary()], ignore_index=True)
            law = withdrawal(runs)
            found |= {"withdrawal.K": _one(law.K), "withdrawal.K_sd": _one(law.sd)}
            found |= {"withdrawal.r2": _one(law.r2), "withdrawal.n": _one(law.n)}
    return found


def erosion_findings(table: pd.DataFrame, run: Trajectory) -> Findings:
    """Numbers of row 25, from erosion_in_time; nothing if the run is shorter than 30,000 steps."""
    if run.steps[-1] < 30_000:
        return {}
    return {f"erosion_time.{column}": table[column].to_numpy() for column in ("c", "k", "r2", "A_since", "A_end")}


def _one(value: float) -> np.ndarray:
    return np.array([float(value)])
