"""Shared fixtures: a throw-away project root, a tiny tokenizer, tiny models of real architectures, texts and a pair."""

import copy
import gzip
import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from psd_utils.pairs import Pair
from psd_utils.study import Study, run_study

REPOSITORY = Path(__file__).resolve().parents[1]
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TOKENIZER_LENGTH = 400
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}


@pytest.fixture(scope="session", autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project root that reads the repository's data but keeps captures and results to itself."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "data").mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for path in (REPOSITORY / "data").iterdir():
        if path.name not in ("captures", "results"):
            (folder / "data" / path.name).symlink_to(path)
    before = os.environ.get("PSD_ROOT")
    os.environ["PSD_ROOT"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PSD_ROOT"]
    else:
        os.environ["PSD_ROOT"] = before


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: the tiny models gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """`one_thread` for a module of tests."""
    with one_thread():
        yield


class Child:
    """A function run in a forked process; it may report its steps, one byte each."""

    def __init__(self, work: Callable[[Callable[[], object]], object]) -> None:
        self.steps, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.steps)
                work(lambda: os.write(writing, b"."))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)

    def wait_for_steps(self, n: int) -> None:
        """Return after `n` steps, or when the child has ended."""
        while n > 0 and (seen := os.read(self.steps, n)):
            n -= len(seen)

    def end(self) -> int:
        """Return the exit status, negative for a signal."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.steps)
        return status


def english_like(n_documents: int, seed: int, shortest: int = 5, longest: int = 60) -> list[str]:
    """Documents of made-up words, some far more frequent than others, so that a model has something to learn."""
    draw = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ter", "ing", "sto", "ne", "ra", "the", "ol", "en", "ush"]
    rank = random.Random(7)
    words = ["".join(rank.choices(syllables, k=rank.randint(1, 3))) for _ in range(150)]
    weights = [1 / (r + 1) for r in range(len(words))]
    documents = []
    for _ in range(n_documents):
        n_words = draw.randint(shortest, longest)
        documents.append(" ".join(draw.choices(words, weights, k=n_words)).capitalize() + ".")
    return documents


def make_tokenizer(texts: Iterable[str], length: int = TOKENIZER_LENGTH) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that can write any text; ids 0, 1, 2 are <pad>, <bos> and <eos>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=length,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of every tiny model: 400 entries."""
    made = make_tokenizer(english_like(200, seed=1))
    assert len(made) == TOKENIZER_LENGTH
    return made


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Any]:
    """Return make_model(folder, architecture, tied=True, rows=400, ...) -> the model it saved in `folder`.

    Random weights, width 32, 2 layers. `spread` is the sd of the weights, `settings` goes into the configuration,
    `change(model)` may alter the weights before they are saved in `dtype`, `with_tokenizer=False` saves none.
    """

    def make(
        folder: Path,
        architecture: str = "qwen2",
        *,
        tied: bool = True,
        rows: int = TOKENIZER_LENGTH,
        seed: int = 0,
        spread: float = 0.2,
        dtype: torch.dtype = torch.float32,
        with_tokenizer: bool = True,
        change: Callable[[Any], None] | None = None,
        **settings: Any,
    ) -> Any:
        config_class, model_class = ARCHITECTURES[architecture]
        if architecture == "gemma2":
            settings = {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0} | settings
        sizes = {
            "vocab_size": rows,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": spread,
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = model_class(config_class(**sizes | settings)).eval()
        if change is not None:
            with torch.no_grad():
                change(model)
        model.to(dtype).save_pretrained(folder)
        if with_tokenizer:
            tokenizer.save_pretrained(folder)
        return model

    return make


def make_adapter(base: Any, folder: Path, spread: float = 0.2, **settings: Any) -> Any:
    """Save a LoRA adapter with random weights; return the model with it applied by peft itself."""
    from peft import LoraConfig, get_peft_model  # slow to import

    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * spread
    adapted.save_pretrained(folder)
    return adapted.eval()


def write_lines(path: Path, lines: Iterable[bytes]) -> Path:
    """Write lines to a file, compressed as its suffix says (.gz, .zst, .zstd)."""
    content = b"".join(line + b"\n" for line in lines)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix in (".zst", ".zstd"):
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


@pytest.fixture(scope="session")
def write_documents() -> Callable[[Path, Iterable[str]], Path]:
    """Return write_documents(path, texts) -> path: JSON lines with a `text` field, compressed as the suffix says."""

    def write(path: Path, texts: Iterable[str]) -> Path:
        return write_lines(path, (json.dumps({"text": text}).encode() for text in texts))

    return write


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """The 120 documents of `text_file`, a few thousand tokens."""
    return english_like(120, seed=2)


@pytest.fixture(scope="session")
def text_file(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], write_documents: Callable[..., Path]
) -> Path:
    """A text of 120 documents, plain JSON lines."""
    return write_documents(tmp_path_factory.mktemp("text") / "text.jsonl", documents)


def train_a_little(model: Any, tokenizer: Any, steps: int = 120) -> None:
    """Train on documents of the same kind as `text_file` until the loss is well below ln of the vocabulary."""
    ids = torch.tensor(tokenizer(" ".join(english_like(500, seed=3)))["input_ids"])
    batches = ids[: len(ids) // 256 * 256].view(-1, 8, 32)
    with one_thread(), torch.enable_grad():
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            batch = batches[step % len(batches)]
            model(input_ids=batch, labels=batch).loss.backward()
            optimiser.step()
            optimiser.zero_grad()


def perturb(model: Any, relative_sd: float = 0.6, seed: int = 5) -> None:
    """Add Gaussian noise to every weight matrix, as large as `relative_sd` of its own spread."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight += torch.randn(weight.shape, generator=generator) * weight.std() * relative_sd


@pytest.fixture(scope="session")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: Callable[..., Any],
    tokenizer: PreTrainedTokenizerFast,
    text_file: Path,
) -> Pair:
    """A base that has learned a little (Qwen2, tied, 8 padded rows) and the same with perturbed weights: a gap > 0."""
    folder = tmp_path_factory.mktemp("models")
    rows = TOKENIZER_LENGTH + 8
    base = make_model(folder / "base", rows=rows, spread=0.05, change=lambda model: train_a_little(model, tokenizer))

    def forget(model: Any) -> None:
        model.load_state_dict(base.state_dict())
        perturb(model)

    make_model(folder / "derived", rows=rows, change=forget)
    return Pair(str(folder / "base"), str(folder / "derived"), text=str(text_file), top_k=64, dtype="float32")


@pytest.fixture(scope="session")
def small_study(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The finished study of `pair`, with one damaged model."""
    with one_thread():
        return run_study(pair, n_damage_seeds=1, n_resamples=300, out_dir=tmp_path_factory.mktemp("small_study"))
