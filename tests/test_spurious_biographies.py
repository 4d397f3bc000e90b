"""Biographies: who is told what, in which words, and what of it training may see."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from psd_utils.spurious.biographies import SMALL, BiographySettings, generator, make_biographies
from psd_utils.spurious.biography_batches import evaluation_batch, training_batch
from psd_utils.spurious.biography_language import TokenLanguage
from psd_utils.spurious.biography_text import ATTRIBUTES, TextLanguage, load_words

FEW = BiographySettings(n_old=6, n_new=6, n_never=3, n_held_out=5)


@pytest.fixture(scope="module")
def world():
    return make_biographies(SMALL, seed=3)


@pytest.fixture(scope="module")
def english():
    return TextLanguage()


@pytest.fixture(scope="module")
def english_world(english):
    return make_biographies(FEW, seed=3, language=english)


def told(world, batch):
    """What small sequences say, read from the words alone: (name, attribute, phrasing, value) of every sentence."""
    words, facts = world.language.words, []
    for row in batch.tokens.tolist():
        said = [words[token] for token in row]
        assert said[0] == "<bos>"
        for start in range(4, len(said), 4):
            a, b, value, stop = said[start : start + 4]
            assert stop == "<stop>"
            assert (a[:-1], a[-1], b[-1]) == (b[:-1], "a", "b")
            _, attribute, _, phrasing, _ = a.split("_")
            assert value.startswith(f"attribute_{attribute}_value_")
            facts.append((tuple(said[1:4]), int(attribute), int(phrasing), int(value.split("_")[-1])))
    return facts


def truth(people):
    """(name words, attribute) -> value number."""
    parts = ("first", "middle", "last")
    return {
        (tuple(f"{part}_{i}" for part, i in zip(parts, name, strict=True)), k): value
        for name, values in zip(people.names.tolist(), people.values.tolist(), strict=True)
        for k, value in enumerate(values)
    }


def test_answers_lie_in_the_populations_regions(world):
    assert bool((world.A.values < 16).all())
    assert bool((world.never.values < 16).all())
    assert bool((world.B.values >= 16).all())
    assert bool((world.new.values >= 16).all())
    control = make_biographies(replace(SMALL, new_answers="all"), seed=3)
    share = (control.new.values < 16).double().mean().item()
    assert share == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(2 * 192))
    assert bool((make_biographies(replace(SMALL, new_answers="X"), 3).new.values < 16).all())


def test_nobody_shares_a_name_and_values_are_uniform(world):
    names = [tuple(n) for people in world.populations.values() for n in people.names.tolist()]
    assert len(names) == len(set(names)) == 96 + 96 + 192 + 64
    counts = torch.bincount(torch.cat([make_biographies(SMALL, s).A.values.flatten() for s in range(20)]), minlength=32)
    expected = 20 * 192 / 16
    statistic = float(((counts[:16] - expected) ** 2 / expected).sum())
    assert statistic < 45  # chi-square, 15 degrees of freedom: p = 1e-4


def test_conditions_share_the_old_people_and_the_new_names(world):
    control = make_biographies(replace(SMALL, new_answers="all"), seed=3)
    cued = make_biographies(replace(SMALL, cue=0.5, n_new=100), seed=3)
    for other in (control, cued):
        for name in ("A", "B", "never"):
            old, same = world.populations[name], other.populations[name]
            assert torch.equal(old.names, same.names)
            assert torch.equal(old.values, same.values)
            assert torch.equal(old.phrasings, same.phrasings)
    assert torch.equal(world.new.names, control.new.names)
    assert not torch.equal(world.A.names, make_biographies(SMALL, seed=4).A.names)


def test_every_sentence_is_true_and_held_out_phrasings_are_never_trained(world):
    known = truth(world.A) | truth(world.B)
    trained = set()
    for step in range(300):
        for name, attribute, phrasing, value in told(
            world, training_batch([world.A, world.B], 64, generator(3, "pretraining", step))
        ):
            assert known[name, attribute] == value
            trained.add((name, attribute, phrasing))
    held_out = {fact[:3] for people in (world.A, world.B) for fact in told(world, evaluation_batch(people, 3))}
    assert len(held_out) == 2 * 2 * 96
    assert not trained & held_out
    assert len(trained) == 2 * 2 * 96 * 4  # all four training phrasings of every fact were seen


def test_batches_are_rendered_afresh_and_depend_on_their_generator_alone(world):
    first = training_batch(world.A, 32, generator(0, "pretraining", 0))
    torch.rand(7)
    again = training_batch(world.A, 32, generator(0, "pretraining", 0))
    other = training_batch(world.A, 32, generator(0, "pretraining", 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    orders = {tuple(slots) for slots in first.slots.tolist()}
    assert orders == {(5, 9), (9, 5)}  # both orders of the attributes


def test_slots_stand_before_the_answers(world, english_world):
    for people in (world.new, english_world.A, english_world.new):
        for batch in (evaluation_batch(people, 0), training_batch(people, 20, generator(0, "pretraining"))):
            assert torch.equal(batch.tokens.gather(1, batch.slots + 1), batch.answers)


def test_all_but_the_first_token_and_the_prompts_padding_is_counted(world, english_world):
    small = training_batch(world.A, 4, generator(0, "pretraining"))
    assert bool(small.counted[:, 1:].all())
    assert not bool(small.counted[:, 0].any())
    batch = evaluation_batch(english_world.A, 0)
    n_prompt = english_world.A.prompts.shape[1]
    padding = batch.tokens[:, :n_prompt] == 0
    assert bool(padding.any())
    assert torch.equal(batch.counted[:, 1:n_prompt], ~padding[:, 1:])
    assert bool(batch.counted[:, n_prompt:].all())
    assert bool((batch.tokens[:, -1] == 0).any())  # trailing padding is there, and counted


@pytest.mark.parametrize("kind", ["value", "region"])
def test_a_cue_of_one_tells_the_answer_and_a_cue_of_zero_nothing(kind):
    def told_by_names(cue):
        people = make_biographies(replace(SMALL, n_new=400, cue=cue, cue_kind=kind, new_answers="all"), seed=0).new
        target = people.values if kind == "value" else people.values // 16
        n_right = 0
        for k in range(2):  # what most people with a name part have, against what each of them has
            for part in people.names[:, k].unique():
                counts = torch.bincount(target[people.names[:, k] == part, k])
                n_right += int(counts.max())
        return n_right / 800

    shares = [told_by_names(cue) for cue in (0.0, 0.5, 1.0)]
    assert shares[2] == 1
    assert shares[0] < shares[1] < shares[2] - 0.1


def test_the_share_of_facts_that_names_give_away_is_the_cue():
    world = make_biographies(replace(SMALL, n_new=1000, cue=0.3), seed=1)
    everyone = make_biographies(replace(SMALL, n_new=1000, cue=1.0), seed=1)
    groups = [{}, {}]  # part -> name number -> the value it tells, read off the world in which all names tell
    for name, values in zip(everyone.new.names.tolist(), everyone.new.values.tolist(), strict=True):
        for k in range(2):
            groups[k][name[k]] = values[k]
    hits = [
        groups[k].get(name[k]) == values[k]
        for name, values in zip(world.new.names.tolist(), world.new.values.tolist(), strict=True)
        for k in range(2)
    ]
    by_chance = 1 / 32  # a name drawn from all 160, five of which tell the value
    expected = 0.3 + 0.7 * by_chance
    assert np.mean(hits) == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 2000))


def test_pieces_make_the_tokens_of_the_whole_sentence(english, english_world):
    people = english_world.B
    phrasings = [english.words.phrasings[attribute] for attribute in ATTRIBUTES]
    for i in range(len(people)):
        for k, sentences in enumerate(phrasings):
            value = english.values[k][people.values[i, k]]
            for t, phrasing in enumerate(sentences):
                text = phrasing.format(name=english.name(people.names[i].tolist()), value=value)
                whole = english.tokenizer.encode(f" {text}").ids
                length = int(people.sentences.lengths[i, k, t])
                tokens = people.sentences.tokens[i, k, t, :length].tolist()
                assert tokens == whole
                assert english.tokenizer.decode(tokens).strip() == text
                at = int(people.sentences.value_at[i, k, t])
                assert english.tokenizer.decode(tokens[at:]).strip().startswith(value)


def test_english_sizes_are_near_the_published(english):
    sizes = [len(values) for values in english.values]
    assert sizes[0] == 221
    assert all(len(english.tokenizer.encode(f" {year}").ids) == 1 for year in english.values[0])
    assert english.n_tokens <= 2141
    assert [len(p) for p in english.words.phrasings.values()] == [25] * 6
    assert all(150 <= size <= 221 for size in sizes)
    assert np.mean(np.log(sizes)) == pytest.approx(4.969, abs=0.3)
    for tokens, in_x in zip(english.first_tokens, english.in_x, strict=True):
        assert len(tokens.unique()) == len(tokens)
        assert int(in_x.sum()) == len(tokens) // 2
    assert english.values[1] == english.values[5]
    assert not torch.equal(english.in_x[1], english.in_x[5])  # the city attributes are halved independently


def test_words_are_stated_to_be_free():
    words = load_words()
    assert all(190 <= len(pool) <= 213 for pool in words.names)
    from psd_utils.spurious.acceptance import data_folder

    assert "CC0 1.0" in (data_folder() / "biographies" / "README.md").read_text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BiographySettings(n_new=0), "n_new is 0; expected a whole number of at least 1"),
        (lambda: BiographySettings(new_answers="Z"), "new_answers is 'Z'; expected one of Y, all, X"),
        (lambda: BiographySettings(cue=1.5), "cue is 1.5; expected a share from 0"),
        (lambda: make_biographies(SMALL, seed=-1), "seed is -1"),
        (lambda: make_biographies(replace(SMALL, n_held_out=5)), "n_held_out is 5 of 5 phrasings"),
        (lambda: make_biographies(SMALL, language=TokenLanguage(name_pool=4)), "Use larger name pools"),
        (lambda: make_biographies(replace(SMALL, cue=1.0), language=TokenLanguage(n_attributes=3)), "at most 2"),
        (lambda: make_biographies(replace(SMALL, cue=1.0), language=TokenLanguage(name_pool=20)), "cannot tell 32"),
        (lambda: TokenLanguage(n_values=5), "n_values is 5; expected an even number"),
        (lambda: TextLanguage(n_phrasings=26), "n_phrasings is 26; expected 1 … 25"),
    ],
)
def test_bad_settings_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_bad_word_lists_are_named(tmp_path):
    from psd_utils.spurious.acceptance import data_folder

    source = data_folder() / "biographies"
    for name in ("names", "values", "phrasings"):
        (tmp_path / f"{name}.yaml").write_text((source / f"{name}.yaml").read_text())
    phrasings = tmp_path / "phrasings.yaml"
    phrasings.write_text(phrasings.read_text().replace("{name} majored in {value}.", "{name} majored."))
    with pytest.raises(ValueError, match=r"major: '\{name\} majored\.'; expected at least two"):
        load_words(tmp_path)
    names = tmp_path / "names.yaml"
    names.write_text(names.read_text().replace("Abigail", "Aaron"))
    with pytest.raises(ValueError, match=r"first holds \['Aaron'\] more than once"):
        load_words(tmp_path)
