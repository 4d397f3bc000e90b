"""The explorer: its numbers are those of exact passes, and its controls always end in the state that they say."""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import binned_statistic

import psd_utils as psd
from psd_utils import subsample
from psd_utils.calibration import reliability
from psd_utils.capture import TextStates
from psd_utils.document_view import COLOURINGS, MOST_TOKENS, SORTS, bias_html, document_html, ordered_biases
from psd_utils.errors import PsdError
from psd_utils.exploration import Exploration
from psd_utils.fit import fit_correction
from psd_utils.head import OutputModel
from psd_utils.kernels import head_statistics
from psd_utils.kernels.reference import logits as reference_logits
from psd_utils.readings import Choice
from psd_utils.recovery import recovery_table
from psd_utils.smaller_set import refit, smaller
from psd_utils.study import Study
from psd_utils.subsample import load_subsample, sampled_documents, sampled_states
from psd_utils.surface import BETAS, Surface, upper_envelope
from psd_utils.widgets import Explorer, explore

pytestmark = pytest.mark.usefixtures("single_thread")


# ---- surfaces


def problem(n_ids: int, vocabulary: int = 60, tokens: int = 300, spread: float = 2.0) -> tuple[torch.Tensor, ...]:
    """Logits [tokens, vocabulary], targets, ids of a set and their biases, up to ±5."""
    draw = torch.Generator().manual_seed(n_ids)
    logits = torch.randn(tokens, vocabulary, generator=draw) * spread
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    ids = torch.randperm(vocabulary, generator=draw)[:n_ids]
    return logits, targets, ids, (torch.randn(n_ids, generator=draw) * 1.5).clamp(-5, 5)


@pytest.mark.parametrize("n_ids", [0, 1, 25, 60])
@pytest.mark.parametrize(("temperature", "strength"), [(1.0, 1.0), (0.5, 0.0), (2.0, 0.37), (0.83, 0.92)])
def test_surface_agrees_with_the_full_softmax(n_ids: int, temperature: float, strength: float) -> None:
    logits, targets, ids, bias = problem(n_ids)
    statistics = head_statistics(logits, torch.eye(logits.shape[1]), targets, ids, BETAS)
    at = Surface.of(statistics, targets, bias).at(temperature, strength)
    exact = logits.double() / temperature
    exact[:, ids] += strength * bias.double()
    probabilities = exact.softmax(1)
    loss = -probabilities[torch.arange(len(targets)), targets].log()
    assert float((at.loss - loss).abs().max()) < 2e-3
    assert abs(float((at.loss - loss).mean())) < 1e-4
    torch.testing.assert_close(at.confidence.double(), probabilities.amax(1), rtol=2e-3, atol=2e-4)
    assert torch.equal(at.correct, probabilities.argmax(1) == targets)


def test_mean_losses_are_the_means_of_token_losses() -> None:
    logits, targets, ids, bias = problem(25)
    surface = Surface.of(head_statistics(logits, torch.eye(60), targets, ids, BETAS), targets, bias)
    temperatures = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
    means = [float(surface.at(t, 0.4).loss.double().mean()) for t in temperatures.tolist()]
    assert surface.mean_losses(temperatures, 0.4).tolist() == pytest.approx(means, abs=1e-5)


def test_joined_pieces_are_the_surface_of_all_tokens() -> None:
    logits, targets, ids, bias = problem(25)
    head = torch.eye(60)
    pieces = [
        Surface.of(head_statistics(logits[c], head, targets[c], ids, BETAS), targets[c], bias)
        for c in (slice(0, 7), slice(7, 120), slice(120, 300))
    ]
    whole = Surface.of(head_statistics(logits, head, targets, ids, BETAS), targets, bias).at(1.3, 0.7)
    joined = Surface.joined(pieces).at(1.3, 0.7)
    torch.testing.assert_close(joined.loss, whole.loss)
    assert torch.equal(joined.correct, whole.correct)
    torch.testing.assert_close(joined.confidence, whole.confidence)


def test_envelope_is_the_highest_line_everywhere() -> None:
    draw = torch.Generator().manual_seed(3)
    heights, slopes = torch.randn(200, 40, generator=draw), torch.randn(40, generator=draw) * 3
    starts, places = upper_envelope(heights, slopes, 2.0)
    assert starts.shape[1] > 3
    for r in np.linspace(0, 1.999, 41):
        piece = (starts <= r).sum(1) - 1
        found = places[torch.arange(200), piece]
        lines = heights.double() + slopes.double() * r
        assert torch.allclose(lines[torch.arange(200), found], lines.amax(1), atol=1e-5)


def test_of_equal_lines_at_the_start_the_steepest_goes_on() -> None:
    starts, places = upper_envelope(torch.zeros(1, 3), torch.tensor([0.0, 2.0, -1.0]), 2.0)
    assert places[0, 0] == 1
    assert starts.shape[1] == 1


# ---- calibration


def test_reliability_agrees_with_binned_statistics() -> None:
    draw = np.random.default_rng(0)
    confidence, correct = draw.uniform(size=4000) ** 2, draw.uniform(size=4000) < 0.4
    found = reliability(confidence, correct)
    bins = {"bins": 15, "range": (0, 1)}
    accuracy = binned_statistic(confidence, correct.astype(float), "mean", **bins).statistic
    mean = binned_statistic(confidence, confidence, "mean", **bins).statistic
    counts = np.histogram(confidence, **bins)[0]
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.accuracy, accuracy)
    np.testing.assert_allclose(found.confidence, mean)
    assert found.error == pytest.approx(np.sum(counts / 4000 * np.abs(accuracy - mean)))


def test_a_model_that_is_as_right_as_it_is_sure_has_no_calibration_error() -> None:
    confidence = np.repeat([0.25, 0.75], 400)
    correct = np.concatenate([np.arange(400) < 100, np.arange(400) < 300])
    assert reliability(confidence, correct).error == 0.0
    assert reliability(np.ones(10), np.zeros(10, dtype=bool)).error == 1.0


@pytest.mark.parametrize("confidence", [np.array([]), np.array([0.5, 1.2]), np.array([[0.5]])])
def test_reliability_refuses_what_is_no_confidence(confidence: np.ndarray) -> None:
    with pytest.raises(PsdError, match=r"confidence"):
        reliability(confidence, np.zeros(confidence.shape, dtype=bool))


# ---- the subsample


def test_sampled_documents_are_whole_and_within_the_budget_whatever_the_global_state() -> None:
    lengths = torch.randint(5, 90, (100,), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    documents, used = sampled_documents(lengths, 1000)
    torch.manual_seed(6)
    again, _ = sampled_documents(lengths, 1000)
    assert torch.equal(documents, again)
    assert torch.equal(used, lengths[documents])
    assert bool((documents.diff() > 0).all())
    assert 1000 - 90 < int(used.sum()) <= 1000
    assert torch.equal(sampled_documents(lengths, 10**6)[0], torch.arange(100))


def test_a_document_longer_than_the_budget_is_cut() -> None:
    states = TextStates(torch.arange(40.0)[:, None], torch.arange(40), torch.tensor([20, 20]), ("a", "b"))
    cut = sampled_states(states, 7)
    assert cut.lengths.tolist() == [7]
    start = 0 if cut.keys == ("a",) else 20
    assert cut.targets.tolist() == list(range(start, start + 7))
    assert torch.equal(cut.hidden[:, 0], cut.targets.float())


@pytest.fixture(scope="module")
def exploration(small_study: Study) -> Exploration:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subsample, "TOKENS", {"eval": 1500, "fit": 1200})
        patch.setattr(subsample, "MOST_IDS", 32)
        # a folder of its own, since the sizes are not the usual ones
        return Exploration(replace(small_study, path=small_study.path / "sampled"))


def sampled_rows(exploration: Exploration) -> pd.DataFrame:
    """The study's own loss rows of the sampled documents."""
    losses = exploration.study.losses
    return losses[(losses["split"] == "eval") & losses["document"].isin(exploration.subsample.keys)]


def test_stored_losses_are_those_of_the_study_for_every_member_and_correction(exploration: Exploration) -> None:
    rows = sampled_rows(exploration)
    assert 10 < len(exploration.subsample.keys) < exploration.study.recovery["n_documents"].iloc[0]
    seen = 0
    for member in exploration.members:
        own = rows[(rows["member"] == member.partition("-")[0])]
        for kind in exploration.kinds(member):
            expected = own[own["correction"] == kind].set_index("document")["loss_sum"]
            loss = exploration.subsample.models[member].losses[kind].double()
            sums = [float(loss[exploration.document(i)].sum()) for i in range(len(exploration.subsample.keys))]
            np.testing.assert_allclose(sums, expected[list(exploration.subsample.keys)], rtol=1e-5)
            seen += 1
    assert seen == 6 + 6 + 5


def test_fitted_readings_are_the_recovery_table_of_the_sampled_documents(exploration: Exploration) -> None:
    table = recovery_table(sampled_rows(exploration), n_resamples=2000, seed=0).set_index("correction")
    for kind in exploration.kinds("derived"):
        reading = exploration.reading(Choice(kind=kind))
        row = table.loc[kind]
        assert not reading.by_hand
        assert reading.loss == pytest.approx(row["loss_derived"], rel=1e-6)
        found = (reading.gap.value, reading.gap.low, reading.gap.high)
        assert found == pytest.approx(tuple(row[["gap", "gap_low", "gap_high"]]), rel=1e-5)
        found = (reading.share.value, reading.share.low, reading.share.high)
        assert found == pytest.approx(tuple(row[["symmetric_share", "symmetric_low", "symmetric_high"]]), abs=1e-5)
        if kind != "bias_all":
            damaged = exploration.reading(Choice("damaged-0", kind))
            assert damaged.share.value == pytest.approx(row["damage_share"], abs=1e-5)


def exact_logits(exploration: Exploration, member: str, split: str = "eval") -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 logits and targets of the sampled tokens, straight from the capture."""
    capture = exploration.study.captures[member]
    model = OutputModel.of(capture, torch.device("cpu"))
    states = sampled_states(model.splits[split], {"eval": 1500, "fit": 1200}[split])
    z = reference_logits(states.hidden.double(), model.head.double(), model.readout)
    return z, states.targets


def exact_loss(z: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -z.log_softmax(1)[torch.arange(len(targets)), targets]


def test_values_set_by_hand_agree_with_an_exact_pass(exploration: Exploration) -> None:
    z, targets = exact_logits(exploration, "derived")
    correction = exploration.study.corrections["derived", "bias_temperature"]
    plain = exact_loss(z, targets)
    for temperature, strength in ((0.7, 1.0), (1.6, 0.35), (1.0, 0.0)):
        reading = exploration.reading(Choice(temperature=temperature, strength=strength))
        corrected = z / temperature
        corrected[:, correction.ids] += strength * correction.bias.double()
        loss = exact_loss(corrected, targets)
        assert reading.loss == pytest.approx(float(loss.mean()), abs=5e-5)
        np.testing.assert_allclose(reading.token_given_back, plain - loss, atol=2e-3)
        probabilities = corrected.softmax(1)
        sure, likeliest = probabilities.max(1)
        exact = reliability(sure.numpy(), (likeliest == targets).numpy())
        assert reading.reliability.error == pytest.approx(exact.error, abs=2e-3)
        assert reading.by_hand
        assert "illustration, not a result" in reading.origin


def test_marked_optimum_is_the_temperature_of_the_lowest_exact_loss(exploration: Exploration) -> None:
    z, targets = exact_logits(exploration, "derived")
    best = minimize_scalar(
        lambda t: float(exact_loss(z / t, targets).mean()), bounds=(0.5, 2), method="bounded", options={"xatol": 1e-6}
    )
    reading = exploration.reading(Choice(kind="none"))
    assert reading.best_temperature == pytest.approx(best.x, abs=2e-3)
    assert reading.best_loss == pytest.approx(best.fun, abs=2e-5)
    temperatures, losses = reading.curve
    exact = [float(exact_loss(z / t, targets).mean()) for t in temperatures[::12]]
    np.testing.assert_allclose(losses[::12], exact, atol=5e-5)


def test_smaller_statistics_are_those_made_for_the_smaller_set() -> None:
    logits, targets, ids, _ = problem(25)
    found = smaller(head_statistics(logits, torch.eye(60), targets, ids, BETAS), 9)
    direct = head_statistics(logits, torch.eye(60), targets, ids[:9], BETAS)
    for name in ("ids", *direct.PER_TOKEN):
        torch.testing.assert_close(getattr(found, name), getattr(direct, name), rtol=1e-5, atol=1e-5)


def test_refit_is_the_fit_on_the_sampled_tokens_of_fit(exploration: Exploration) -> None:
    z, targets = exact_logits(exploration, "derived", "fit")
    ids = exploration.subsample.set_ids[:16]
    exact = fit_correction(head_statistics(z, torch.eye(z.shape[1]).double(), targets, ids), penalty=1e-3)
    found = refit(exploration.subsample, "derived", "bias_temperature", 1e-3, 16).correction
    assert found.temperature == pytest.approx(exact.correction.temperature, abs=2e-3)
    np.testing.assert_allclose(found.bias, exact.correction.bias, atol=5e-3)
    counts = torch.bincount(exploration.study.captures["base"].states("fit").targets)
    assert counts[ids].tolist() == sorted(counts.tolist(), reverse=True)[:16]


def test_share_of_a_smaller_set_is_against_the_base_refitted_alike(exploration: Exploration) -> None:
    reading = exploration.reading(Choice(kind="bias", top_k=16))
    model = exploration.subsample.models
    base = exploration.fitted("base", "bias", 16)
    gain = float((model["derived"].losses["none"] - torch.tensor(reading.token_loss)).double().sum())
    gain_base = float((model["base"].losses["none"] - base.token_loss).double().sum())
    gap = float((model["derived"].losses["none"] - model["base"].losses["none"]).double().sum())
    assert reading.share.value == pytest.approx((gain - gain_base) / gap, rel=1e-5)
    assert "rougher than the study" in reading.origin


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice("devired"), "did you mean 'derived'"),
        (Choice(kind="bais"), "did you mean 'bias'"),
        (Choice("damaged-0", "bias_all"), "damaged-0 has no correction 'bias_all'"),
        (Choice(top_k=33), "K must lie between 1 and the 32 stored ids, found 33"),
        (Choice(temperature=2.5), "T must lie between 0.5 and 2.0"),
        (Choice(strength=math.nan), "the strength between 0 and 1, found"),
    ],
)
def test_wrong_choices_are_refused_in_words(exploration: Exploration, choice: Choice, words: str) -> None:
    with pytest.raises(PsdError) as caught:
        exploration.reading(choice)
    assert words in str(caught.value)


def test_the_base_has_neither_gap_nor_share(exploration: Exploration) -> None:
    reading = exploration.reading(Choice("base"))
    assert math.isnan(reading.share.value)
    assert reading.share.reason == "the base has no gap to itself"
    assert not math.isnan(reading.loss)


@pytest.mark.parametrize("choice", [Choice(), Choice(kind="bias", top_k=16), Choice(temperature=1.5, strength=0.2)])
def test_random_damage_stands_beside_every_share_at_its_own_fitted_values(
    exploration: Exploration, choice: Choice
) -> None:
    reading = exploration.reading(choice)
    own = exploration.reading(Choice("damaged-0", choice.kind, choice.top_k))
    assert reading.damage_share == own.share
    assert "share of random damage" in set(reading.table()["quantity"])


def test_without_a_gap_the_share_is_undefined_in_words_and_pictures(exploration: Exploration) -> None:
    swapped = replace(exploration.subsample)
    models = exploration.subsample.models
    swapped.__dict__["models"] = {**models, "base": models["derived"], "derived": models["base"]}
    explorer = Explorer(Exploration(exploration.study, swapped))
    reading = explorer.reading
    assert reading.gap.value == pytest.approx(-exploration.reading(Choice()).gap.value)
    assert math.isnan(reading.share.value)
    assert "nothing to recover" in explorer.readouts.value
    assert explorer.plots._values.x[0] == explorer.exploration.study_share(Choice()).value
    assert 2 not in explorer.plots._values.y
    assert explorer.figure().axes[2].get_title("left") == "Share given back: undefined"


# ---- the store


def test_explorer_needs_neither_models_nor_captures(
    exploration: Exploration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    for name in ("pyproject.toml", "data/pairs.yaml"):
        (root / name).write_text("")
    monkeypatch.setenv("PSD_ROOT", str(root))
    gone = psd.Pair("gone/base", "gone/derived", name=exploration.study.pair.name)
    study = replace(exploration.study, pair=gone, captures={})
    expected = exploration.reading(Choice())
    assert psd.explore(study).reading.loss == expected.loss
    with pytest.raises(PsdError, match=r"the capture .* to make them from is gone: run 02_fit for the pair again"):
        load_subsample(replace(study, path=tmp_path / "elsewhere"))


def test_damaged_store_is_an_error_that_says_what_to_delete(exploration: Exploration, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(exploration.study.path / "explorer", tmp_path / "explorer")
    study = replace(exploration.study, path=tmp_path)
    path = tmp_path / "explorer" / "derived.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    with pytest.raises(PsdError, match=r"derived\.safetensors is damaged.*; delete .*explorer to have"):
        explore(study)


def test_store_of_another_run_is_made_again(exploration: Exploration, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(exploration.study.path / "explorer", tmp_path / "explorer")
    summary = {**exploration.study.summary, "settings_sha256": "of another run"}
    study = replace(exploration.study, path=tmp_path, summary=summary)
    assert load_subsample(study).identity["study"] == "of another run"
    assert len(load_subsample(study).keys) > len(exploration.subsample.keys)


# ---- the widget


@pytest.fixture
def explorer(exploration: Exploration) -> Iterator[Explorer]:
    made = Explorer(exploration)
    yield made
    made.view.close()


def shown_loss(explorer: Explorer) -> str:
    return explorer.readouts.value.split('data-quantity="loss"><b>')[1].split("</b>")[0]


def test_explorer_starts_at_the_fitted_values(explorer: Explorer, exploration: Exploration) -> None:
    assert explorer.choice() == Choice()
    assert shown_loss(explorer) == f"{exploration.reading(Choice()).loss:.4f}"
    assert "fitted on fit by the study" in explorer.status.value
    quantities = set(explorer.table()["quantity"])
    assert {"loss", "gap to the base", "symmetric share", "calibration error", "best T at this strength"} <= quantities


def test_fifty_fast_moves_from_several_threads_end_in_one_right_state(
    explorer: Explorer, exploration: Exploration
) -> None:
    def move(control: str, values: np.ndarray) -> None:
        for value in values.tolist():
            getattr(explorer, control).value = value

    threads = [
        threading.Thread(target=move, args=("temperature", np.linspace(0.5, 1.7, 50))),
        threading.Thread(target=move, args=("strength", np.linspace(1, 0.25, 50))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = exploration.reading(Choice(temperature=1.7, strength=0.25))
    assert explorer.reading.loss == expected.loss
    assert shown_loss(explorer) == f"{expected.loss:.4f}"
    assert float(explorer.plots._now.x[0]) == 1.7
    np.testing.assert_allclose(explorer.plots._curve.y, expected.curve[1])
    assert "illustration, not a result" in explorer.status.value


def test_menus_bring_the_fitted_values_of_their_choice(explorer: Explorer, exploration: Exploration) -> None:
    explorer.temperature.value = 1.9
    explorer.kind.value = "temperature"
    assert explorer.choice() == Choice(kind="temperature")
    assert explorer.strength.disabled
    assert explorer.top_k.disabled
    explorer.kind.value = "bias_all"
    explorer.member.value = "damaged-0"
    assert explorer.choice() == Choice("damaged-0", "bias_temperature")
    explorer.top_k.value = 16
    reading = exploration.reading(Choice("damaged-0", "bias_temperature", 16))
    assert explorer.reading.loss == reading.loss
    explorer.strength.value = 0.5
    explorer.reset.click()
    assert explorer.reading.loss == reading.loss


def test_rounding_of_the_browser_does_not_make_a_fitted_value_one_set_by_hand(explorer: Explorer) -> None:
    explorer.temperature.value += 3e-16
    explorer.strength.value = 0.5
    explorer.strength.value = 1.0
    assert explorer.choice() == Choice()


def test_errors_in_callbacks_are_shown_and_the_explorer_goes_on(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(choice: Choice) -> None:
        raise PsdError("no <such> thing")

    with monkeypatch.context() as patch:
        patch.setattr(explorer.exploration, "reading", fail)
        explorer.temperature.value = 0.8
        assert "Not shown:" in explorer.status.value
        assert "no &lt;such&gt; thing" in explorer.status.value
    explorer.temperature.value = 0.9
    assert "Not shown" not in explorer.status.value


def test_document_shows_every_token_on_the_colour_of_its_value(explorer: Explorer, exploration: Exploration) -> None:
    for name in COLOURINGS:
        explorer.colouring.value = name
        assert COLOURINGS[name].words in explorer.text.value
        assert explorer.text.value.count("<i ") == len(exploration.tokens(0))
    before = explorer.text.value
    explorer.strength.value = 0.2
    assert explorer.text.value != before
    explorer.document.value = 2
    assert explorer.text.value.count("<i ") == len(exploration.tokens(2))


def test_document_html_escapes_tokens_and_says_when_it_is_cut() -> None:
    tokens = ["<b>", "a&b", "line\n"] * 400
    page = document_html(tokens, np.linspace(-1, 20, 1200), COLOURINGS["loss"])
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "line⏎\n" in page
    assert page.count("<i ") == MOST_TOKENS
    assert "The first 1,000 of 1,200 tokens are shown" in page
    low, high = COLOURINGS["loss"].of(np.array([-5.0, 99.0]))
    assert (low, high) == (COLOURINGS["loss"].colours[0], COLOURINGS["loss"].colours[-1])


def test_biases_are_searched_and_sorted(explorer: Explorer) -> None:
    biases = pd.DataFrame(
        {
            "id": [4, 5, 6, 7],
            "token": ["' the'", "'The'", "'<x>'", "'a'"],
            "bias": [0.5, -2.0, 1.0, 0.1],
            "count": [9, 3, 5, 7],
        }
    )

    def order(search: str, sort: str) -> list[int]:
        page = bias_html(ordered_biases(biases, search, sort), 0.5)
        places = {i: page.find(f"<td>{i}</td></tr>") for i in biases["id"]}
        return sorted((i for i, place in places.items() if place >= 0), key=lambda i: places[i])

    assert order("", "largest first, either sign") == [5, 6, 4, 7]
    assert order("", "lowest first") == [5, 7, 4, 6]
    assert order("", "most frequent first") == [4, 7, 6, 5]
    assert order("THE", "highest first") == [4, 5]
    page = bias_html(biases, 0.5)
    assert "&lt;x&gt;" in page
    assert "<x>" not in page
    assert "-1.000" in page
    explorer.search.value = "no such token"
    assert "0 shown of 0 found" in explorer.biases.value


def test_bundle_has_the_widget_and_a_still_figure_with_the_same_numbers(explorer: Explorer) -> None:
    explorer.temperature.value = 1.4
    bundle = explorer._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.view.model_id
    assert bundle["image/png"].startswith("iVBOR")
    loss, bins, share = explorer.figure().axes
    reading = explorer.reading
    assert f"{reading.loss:.4f}" in loss.get_title("left")
    np.testing.assert_allclose(loss.lines[0].get_ydata(), reading.curve[1])
    assert f"{reading.reliability.error:.4f}" in bins.get_title("left")
    assert f"{reading.share.value:.3f}" in share.get_title("left")


def test_a_move_takes_far_less_than_a_tenth_of_a_second(explorer: Explorer) -> None:
    times = []
    for value in np.linspace(0.6, 1.9, 30).tolist():
        start = time.perf_counter()
        explorer.temperature.value = value
        times.append(time.perf_counter() - start)
    assert np.median(times) < 0.1


def test_a_table_without_biases_is_searched_like_any_other() -> None:
    none = pd.DataFrame({"id": [], "token": [], "bias": [], "count": []})
    assert ordered_biases(none, "the", next(iter(SORTS))).empty
