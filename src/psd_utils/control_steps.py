"""The steps of a pair's controls: other damage, the ladder, and the sensitivity of the share, each as loss rows."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import pandas as pd
import torch

from . import controls, sensitivity
from .correction import Correction
from .head import OutputModel
from .ladder import RANKS, Rung, ladder
from .losses import loss_rows, rows_of
from .refitted_head import refitted_head
from .selection import choose_corrections
from .sensitivity import PairModels
from .settings import Settings
from .study import SET_KINDS, Study, score_pair

_LOG = logging.getLogger(__name__)

SECOND_TEXT = "demo_reference"
RUNG_FACTS = ("parameters", "convex", "status", "gradient_norm", "penalty", "selected_none")


@dataclass(frozen=True)
class ControlSettings:
    """What 03_controls is asked for, beyond the settings of the study it belongs to.

    `ladder_tokens`: tokens of `fit` for the ladder (0: all). `second_text`: a registered text or a path (None: none).
    """

    n_damage_seeds: int = 3
    ladder_tokens: int = 8192
    second_text: str | None = SECOND_TEXT
    n_refits: int = 20
    n_resamples: int = 10_000
    ranks: tuple[int, ...] = RANKS


def pair_models(study: Study, settings: Settings) -> PairModels:
    """Return the output models of a study's captures, without damage."""
    base, derived = (
        OutputModel.of(study.captures[role], settings.device.device, settings.mask_padding)
        for role in ("base", "derived")
    )
    tokenizer = study.summary["tokenizer"]
    special = torch.tensor(tokenizer["special"], dtype=torch.int64)
    return PairModels(study.pair.name, base, derived, special, tokenizer["length"])


def fit_gap(study: Study) -> tuple[float, float]:
    """Return the base's mean loss on `fit` and the pair's gap there, nats per token."""
    rows = study.losses[(study.losses["split"] == "fit") & (study.losses["correction"] == "none")]
    sums = rows[rows["member"] != "damaged"].groupby("member")[["loss_sum", "tokens"]].sum()
    loss = sums["loss_sum"] / sums["tokens"]
    return float(loss["base"]), float(loss["derived"] - loss["base"])


def corrections_of(study: Study, pair: PairModels) -> dict[str, dict[str, Correction]]:
    """Return the study's own corrections by role and kind; the damaged model's where both are there."""
    labels = {"base": "base", "derived": "derived"}
    if pair.damaged is not None and ("damaged-0", "none") in study.corrections:
        labels["damaged"] = "damaged-0"
    return {
        role: {kind: study.corrections[label, kind] for kind in sensitivity.KINDS} for role, label in labels.items()
    }


def with_damage(pair: PairModels, base_loss: float, gap: float, settings: Settings) -> PairModels:
    """Return the pair with its base damaged by matched noise on the head, by the first seed."""
    seed = controls.damage_seed(settings.seed, 0)
    damage = controls.matched_head_noise(pair.base, base_loss, gap, seed, pair.tokenizer_length)
    return replace(pair, damaged=damage.model)


def steps(
    study: Study, pair: PairModels, settings: Settings, chosen: ControlSettings
) -> Iterator[tuple[str, Callable[[], pd.DataFrame]]]:
    """Yield every analysis by name: other damage, the ladder, and the sensitivity of the share."""
    ids, top_k = pair.set_of(settings.top_k), settings.top_k
    for control in ("hidden_noise", "permuted_difference"):
        for index in range(chosen.n_damage_seeds):
            yield f"{control}, seed {index}", partial(_damage, study, pair, settings, control, index)
    part = pair if not chosen.ladder_tokens else pair.with_fit(chosen.ladder_tokens)
    for role in pair.members:
        yield f"ladder of {role}", partial(_ladder, part, role, ids, chosen.ranks)
        yield f"head of {role} fitted anew", partial(_refitted_head, part, role)
    for setting, size in sensitivity.set_sizes(pair).items():
        yield setting, partial(sensitivity.with_top_k, pair, size, setting)
    special = pair.special[pair.special < pair.tokenizer_length]
    if special.numel():
        # special ids hardly ever occur as targets, so they would not enter the set by their counts
        together = torch.cat([ids, special]).unique()
        yield "specials allowed", partial(sensitivity.with_set, pair, together, "specials allowed")
    yield "penalties", partial(sensitivity.penalties, pair, ids)
    for amount in sensitivity.amounts(pair):
        setting = f"fit_tokens={amount}"
        yield setting, partial(sensitivity.with_amount, pair, top_k, amount, setting)
    if chosen.second_text:
        yield from _second_text(study, pair, settings, f"text={chosen.second_text}", chosen.second_text)


def _damage(study: Study, pair: PairModels, settings: Settings, control: str, index: int) -> pd.DataFrame:
    """Return loss rows of a model damaged otherwise than by noise on the head."""
    base_loss, gap = fit_gap(study)
    seed = controls.damage_seed(settings.seed, index)
    if control == "hidden_noise":
        damage = controls.matched_hidden_noise(pair.base, base_loss, gap, seed)
    else:
        length = pair.tokenizer_length
        damage = controls.matched_permuted_difference(pair.base, pair.derived, base_loss, gap, seed, length)
    _LOG.info("%s %d: sd %.4g, gap on fit %.4f", control, index, damage.noise_sd, damage.fit_gap)
    kinds = choose_corrections(damage.model, pair.set_of(settings.top_k), SET_KINDS)
    corrections = {kind: c.correction for kind, c in kinds.items()}
    return loss_rows(damage.model, corrections, pair=pair.name, member="damaged", control=control, damage_seed=index)


def _ladder(pair: PairModels, role: str, ids: torch.Tensor, ranks: tuple[int, ...]) -> pd.DataFrame:
    """Return loss rows of a model's rungs on `eval`, and of the model itself; each rung with how its fit ended."""
    model = pair.members[role]
    rungs = [_rung_rows(pair, role, rung) for rung in ladder(model, ids, pair.special, pair.tokenizer_length, ranks)]
    labels = {"pair": pair.name, **sensitivity.labels_of(role)}
    own = rows_of(model.splits["eval"], model.losses("eval", [None])[0], "eval", "none", "ladder", labels)
    return pd.concat([own, *rungs], ignore_index=True)


def _refitted_head(pair: PairModels, role: str) -> pd.DataFrame:
    return _rung_rows(pair, role, refitted_head(pair.members[role]))


def _rung_rows(pair: PairModels, role: str, rung: Rung) -> pd.DataFrame:
    labels = {"pair": pair.name, **sensitivity.labels_of(role)}
    rows = rows_of(pair.members[role].splits["eval"], rung.losses("eval"), "eval", rung.name, "ladder", labels)
    _LOG.info("ladder, %s, %s: %s, %d evaluations", role, rung.name, rung.status, rung.evaluations)
    return rows.assign(**{name: getattr(rung, name) for name in RUNG_FACTS})


def _second_text(
    study: Study, pair: PairModels, settings: Settings, setting: str, text: str
) -> Iterator[tuple[str, Callable[[], pd.DataFrame]]]:
    """Yield the study on another text: corrections fitted there, and those of the first text carried over."""

    @cache
    def second() -> PairModels:
        _, captures = score_pair(study.pair, replace(settings, text=text))
        return pair_models(replace(study, captures=captures), settings)

    def fitted_there() -> pd.DataFrame:
        models = second()
        base_loss = models.base.mean_loss("fit")
        gap = models.derived.mean_loss("fit") - base_loss
        if pair.damaged is not None and gap > 0:
            models = with_damage(models, base_loss, gap, settings)
        return sensitivity.with_set(models, models.set_of(settings.top_k), setting)

    def carried_over() -> pd.DataFrame:
        models, corrections = second(), corrections_of(study, pair)
        if pair.damaged is not None and "damaged" in corrections:
            models = replace(models, damaged=models.base.with_head(pair.damaged.head))
        return sensitivity.transferred(models, corrections, f"{setting}, fitted on the first")

    yield setting, fitted_there
    yield f"{setting}, fitted on the first", carried_over
