"""Export: what a processor, a server's fields, generate() and a saved model compute is z/T + b, or it is refused."""

import json
import math
import re

import pytest
import torch
from conftest import TOKENIZER_LENGTH, english_like, make_adapter, make_tokenizer
from test_architectures import ARCHITECTURES, ROWS, make
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from psd_utils import export
from psd_utils.corpus import tokenizer_sha256
from psd_utils.correction import Correction
from psd_utils.errors import PsdError
from psd_utils.pairs import Member

PROMPT = torch.tensor([[1, 50, 60, 70, 300, 5]])
pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def correction(tokenizer):
    """Random biases on 60 ids, a temperature, and the tokenizer they belong to."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(TOKENIZER_LENGTH - 3, generator=generator)[:60] + 3
    bias = torch.randn(60, generator=generator) * 2
    return Correction(ids, bias, 1.7, vocabulary=TOKENIZER_LENGTH, tokenizer=tokenizer_sha256(tokenizer))


def logits_of(model, ids=PROMPT):
    with torch.inference_mode():
        return model(input_ids=ids).logits[0].double()


def generated(model, **settings):
    """What generate() makes of the prompt, and the scores that it chose from."""
    output = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=8,
        min_new_tokens=8,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    return output.sequences[0], torch.cat(output.scores).double()


def corrected_greedy(model, correction, steps=8):
    """Greedy decoding from z/T + b by hand (no end of sequence, which min_new_tokens forbids)."""
    ids = PROMPT
    for _ in range(steps):
        scores = correction.apply(logits_of(model, ids)[-1])
        scores[2] = -math.inf
        ids = torch.cat([ids, scores.argmax()[None, None]], dim=1)
    return ids[0]


def corrected_along(model, correction, sequence):
    """z/T + b before each generated token of a sequence."""
    expected = correction.apply(logits_of(model, sequence[None])[PROMPT.shape[1] - 1 : -1])
    expected[:, 2] = -math.inf
    return expected


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("export") / "model"
    make(folder, "Qwen2", tokenizer, tied=True)
    return folder


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


# ---- in generation


def test_greedy_generation_with_the_processor_is_that_of_the_corrected_model(model, correction, tokenizer):
    processor = export.CorrectionProcessor(correction, tokenizer)
    sequence, scores = generated(model, logits_processor=[processor], do_sample=False)
    assert torch.equal(sequence, corrected_greedy(model, correction))
    torch.testing.assert_close(scores, corrected_along(model, correction, sequence), rtol=1e-5, atol=1e-5)
    plain, _ = generated(model, do_sample=False)
    assert not torch.equal(sequence, plain)


def test_sampling_with_the_processor_draws_from_the_corrected_model(model, correction, tokenizer):
    processor = export.CorrectionProcessor(correction, tokenizer)
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    sequence, scores = generated(model, logits_processor=[processor], **settings)
    torch.testing.assert_close(scores, corrected_along(model, correction, sequence), rtol=1e-5, atol=1e-5)


def test_generation_settings_sample_from_the_corrected_model(model, correction, tokenizer):
    """transformers adds the bias before it divides by the temperature."""
    settings = export.generation_settings(correction, tokenizer)
    assert settings["temperature"] == 1.7
    sequence, scores = generated(model, **settings)
    torch.testing.assert_close(scores, corrected_along(model, correction, sequence), rtol=1e-5, atol=1e-5)
    greedy, _ = generated(model, do_sample=False, sequence_bias=settings["sequence_bias"])
    assert torch.equal(greedy, corrected_greedy(model, correction))


def test_generation_settings_survive_a_file(model, correction, tokenizer, tmp_path):
    GenerationConfig(**export.generation_settings(correction, tokenizer)).save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained(tmp_path)
    sequence, scores = generated(model, generation_config=read)
    torch.testing.assert_close(scores, corrected_along(model, correction, sequence), rtol=1e-5, atol=1e-5)


def test_identity_needs_no_sequence_bias(tokenizer):
    assert "sequence_bias" not in export.generation_settings(Correction.identity(), tokenizer)


def test_removed_token_is_never_generated(model, tokenizer):
    first = int(logits_of(model)[-1].argmax())
    removing = Correction(torch.tensor([first]), torch.tensor([-math.inf]), vocabulary=TOKENIZER_LENGTH)
    sequence, _ = generated(model, logits_processor=[export.CorrectionProcessor(removing, tokenizer)], do_sample=False)
    assert first not in sequence[PROMPT.shape[1] :].tolist()


# ---- for a server


def test_fields_of_a_server_give_the_corrected_model(model, correction, tokenizer):
    """As servers compute: softmax((z + logit_bias) / temperature), after a passage through JSON."""
    fields = json.loads(json.dumps(export.logit_bias(correction, tokenizer)))
    assert set(fields) == {"temperature", "logit_bias"}
    logits = logits_of(model)
    served = logits.clone()
    for token, value in fields["logit_bias"].items():
        served[:, int(token)] += value
    torch.testing.assert_close(served / fields["temperature"], correction.apply(logits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "limits", "message"),
    [
        ({"bias": [19.0, 1.0], "temperature": 6.0}, {}, r"id 5 times the temperature is 114, outside .*-100 to 100"),
        ({"bias": [-math.inf, 1.0]}, {}, r"id 5 times the temperature is -inf, outside"),
        ({"temperature": 2.5}, {}, r"temperature 2.5 is above the server's highest, 2"),
        ({}, {"max_entries": 1}, r"has 2 biased ids, the server takes 1: fit it with top_k=1, or raise max_entries"),
    ],
)
def test_what_a_server_does_not_take_is_refused(tokenizer, values, limits, message):
    values = {"bias": [1.0, 1.0]} | values
    bias = torch.tensor(values.pop("bias"))
    beyond = Correction(torch.tensor([5, 9]), bias, vocabulary=TOKENIZER_LENGTH, **values)
    with pytest.raises(PsdError, match=message):
        export.logit_bias(beyond, tokenizer, limits=export.ServerLimits(**limits))


def test_zero_biases_are_no_entries(tokenizer):
    partly = Correction(torch.tensor([5, 9]), torch.tensor([0.0, 1.0]), 2.0, vocabulary=TOKENIZER_LENGTH)
    assert export.logit_bias(partly, tokenizer) == {"temperature": 2.0, "logit_bias": {"9": 2.0}}


# ---- in a saved model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_model_is_the_corrected_one(tmp_path, tokenizer, correction, name, tied):
    """Loaded by transformers alone: its logits, or, where the head has no bias, what generate() makes of them."""
    original = make(tmp_path / "model", name, tokenizer, tied=tied)
    baked = export.bake(correction, str(tmp_path / "model"), tmp_path / "baked")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight, original.get_input_embeddings().weight)
    kept, expected = logits_of(loaded), correction.apply(logits_of(original))
    if ARCHITECTURES[name][-1]:
        assert baked.in_weights == ("temperature", "bias")
        assert baked.in_generation_config == ()
    else:
        assert baked.in_weights == ("temperature",)
        assert baked.in_generation_config == ("bias",)
        assert f"the head of {type(original).__name__} has no bias" in " ".join(baked.notes)
        kept = kept + Correction(correction.ids, correction.bias).apply(torch.zeros_like(kept))
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)
    sequence, scores = generated(loaded, do_sample=True, top_k=0, top_p=1.0)
    torch.testing.assert_close(scores, corrected_along(original, correction, sequence), rtol=1e-4, atol=1e-4)
    greedy, _ = generated(loaded, do_sample=False)
    assert torch.equal(greedy, corrected_greedy(original, correction))


def test_bias_that_the_head_cannot_hold_is_refused_by_name(tmp_path, model_folder, correction):
    message = f"{model_folder}: the head of Qwen2ForCausalLM has no bias, and a saved one would be dropped silently"
    with pytest.raises(PsdError, match=re.escape(message)):
        export.bake(correction, str(model_folder), tmp_path / "baked", weights_only=True)
    assert not (tmp_path / "baked").exists()


def test_saved_bias_of_a_head_without_one_is_dropped_silently(tmp_path, tokenizer):
    """The reason for the refusal: transformers says nothing and the bias is gone."""
    made = make(tmp_path / "model", "Qwen2", tokenizer, tied=False)
    made.lm_head.bias = torch.nn.Parameter(torch.full((ROWS,), 5.0))
    made.save_pretrained(tmp_path / "biased")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "biased").lm_head.bias is None


def test_temperature_alone_is_all_in_the_weights(tmp_path, model_folder, model, tokenizer):
    sharper = Correction(torch.empty(0, dtype=torch.int64), torch.empty(0), 0.6, vocabulary=TOKENIZER_LENGTH)
    baked = export.bake(sharper, str(model_folder), tmp_path / "baked", weights_only=True)
    assert baked.in_weights == ("temperature",)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(model) / 0.6, rtol=1e-5, atol=1e-5)
    saved = json.loads((tmp_path / "baked" / "correction.json").read_text())
    assert saved["temperature"] == 0.6
    assert "the head was tied to the embedding and is a matrix of its own now" in saved["notes"]


def test_identity_leaves_a_tied_head_tied(tmp_path, model_folder, model):
    identity = Correction(torch.empty(0, dtype=torch.int64), torch.empty(0), vocabulary=TOKENIZER_LENGTH)
    assert export.bake(identity, str(model_folder), tmp_path / "baked").in_weights == ()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_half_precision_stays_so_and_the_rounding_is_said(tmp_path, tokenizer, correction):
    made = make(tmp_path / "model", "Phi", tokenizer, tied=False)
    made.bfloat16().save_pretrained(tmp_path / "model")
    baked = export.bake(correction, str(tmp_path / "model"), tmp_path / "baked")
    assert "the scaled head is rounded to bfloat16" in baked.notes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    expected = correction.apply(logits_of(made))
    assert float((logits_of(loaded) - expected).abs().max() / expected.abs().max()) < 0.02


def test_member_with_an_adapter_is_merged_first(tmp_path, tokenizer, correction):
    base = make(tmp_path / "model", "Llama", tokenizer, tied=True)
    adapted = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    export.bake(correction, Member(str(tmp_path / "model"), adapter=str(tmp_path / "adapter")), tmp_path / "baked")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    torch.testing.assert_close(logits_of(loaded), logits_of(adapted) / 1.7, rtol=1e-4, atol=1e-4)


def test_folder_that_is_in_use_is_refused(tmp_path, model_folder, correction):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with pytest.raises(PsdError, match=r"there is not empty; give a new folder"):
        export.bake(correction, str(model_folder), tmp_path / "there")


# ---- whose ids


def test_correction_of_another_tokenizer_is_refused(tmp_path, tokenizer, correction):
    other = make_tokenizer([text[::-1] for text in english_like(200, seed=1)])
    make(tmp_path / "model", "Qwen2", tokenizer, tied=True)
    other.save_pretrained(tmp_path / "model")
    message = "the correction belongs to another tokenizer"
    for use in (export.CorrectionProcessor, export.logit_bias, export.generation_settings):
        with pytest.raises(PsdError, match=message):
            use(correction, other)
    with pytest.raises(PsdError, match=message):
        export.bake(correction, str(tmp_path / "model"), tmp_path / "baked")
    with pytest.raises(PsdError, match=r"id \d+ is '.*' to the correction's tokenizer, '.*' to this one"):
        export.CorrectionProcessor(correction, other, base=tokenizer)


def test_tokenizer_that_differs_in_special_tokens_only_is_accepted_beside_the_bases(
    tmp_path, model_folder, tokenizer, correction
):
    """An instruction-tuned model often ends its texts with another token than its base."""
    tokenizer.save_pretrained(tmp_path)
    derived = AutoTokenizer.from_pretrained(tmp_path)
    derived.eos_token = "<pad>"
    assert tokenizer_sha256(derived) != tokenizer_sha256(tokenizer)
    with pytest.raises(PsdError, match="give the base's tokenizer too"):
        export.CorrectionProcessor(correction, derived)
    export.CorrectionProcessor(correction, derived, base=tokenizer)


def test_correction_without_a_tokenizer_is_used_with_a_warning(tokenizer, caplog):
    nameless = Correction(torch.tensor([5]), torch.tensor([1.0]))
    with caplog.at_level("WARNING", logger="psd_utils"):
        export.CorrectionProcessor(nameless, tokenizer)
    assert "the correction names no tokenizer" in caplog.text
    with pytest.raises(PsdError, match="token id 400 is beyond the head"):
        export.CorrectionProcessor(Correction(torch.tensor([400]), torch.tensor([1.0])), tokenizer)
