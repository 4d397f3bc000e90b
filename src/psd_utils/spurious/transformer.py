"""A small decoder in plain torch: attention only or with MLPs, with or without the final norm.

In: settings and token ids. Out: the states that the unembedding reads, and logits.

Source: Palit et al. (2026), transformers trained from scratch: pre-LayerNorm blocks (scale and bias, ε 1e-6), rotary
positions on interleaved pairs, untied embedding and head, the head and the output projections with a bias, q, k and v
without. Embeddings start with sd 1/√width, dense weights LeCun-normal, biases at zero. Weights are float32.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUPS = {
    "embeddings": ("embedding.",),
    "attention_qk": ("attention.q.", "attention.k."),
    "attention_vo": ("attention.v.", "attention.o."),
    "mlp": ("mlp.",),
    "norms": ("norm.", "norm_1.", "norm_2."),
    "head": ("head.",),
}
"""Groups of parameters that can be frozen or exchanged, by what their names contain."""


@dataclass(frozen=True)
class TransformerSettings:
    """Sizes and ingredients; the defaults are the small study's configuration h.

    Attributes:
        n_tokens: size of the vocabulary.
        width: of states; a multiple of 2 × heads.
        n_layers: blocks.
        n_heads: attention heads.
        mlp: a GELU MLP of four times the width after every attention.
        final_norm: a LayerNorm before the head.
    """

    n_tokens: int
    width: int = 128
    n_layers: int = 2
    n_heads: int = 4
    mlp: bool = False
    final_norm: bool = True

    def __post_init__(self) -> None:
        for name in ("n_tokens", "width", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a whole number of at least 1.")
        if self.width % (2 * self.n_heads):
            raise ValueError(
                f"width is {self.width} with {self.n_heads} heads; expected a multiple of {2 * self.n_heads}: "
                "every head turns pairs of coordinates."
            )


class Decoder(nn.Module):
    """The model; `states` is what the head reads."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.n_tokens, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.n_layers))
        self.norm = _norm(settings.width) if settings.final_norm else None
        self.head = nn.Linear(settings.width, settings.n_tokens)

    def states(self, tokens: Tensor) -> Tensor:
        """The states that the head reads, [batch, length, width], from token ids [batch, length]."""
        x = self.embedding(tokens)
        turns = rotations(tokens.shape[1], self.settings.width // self.settings.n_heads, tokens.device)
        for block in self.blocks:
            x = block(x, turns)
        return x if self.norm is None else self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, [batch, length, n_tokens]."""
        return self.head(self.states(tokens))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) where there is one."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width = settings.width
        self.norm_1, self.attention = _norm(width), Attention(settings)
        self.mlp = self.norm_2 = None
        if settings.mlp:
            self.norm_2 = _norm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """The residual stream after the block, [batch, length, width]."""
        x = x + self.attention(self.norm_1(x), turns)
        return x if self.mlp is None or self.norm_2 is None else x + self.mlp(self.norm_2(x))


class Attention(nn.Module):
    """Causal attention of several heads with rotary positions."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.n_heads = settings.n_heads
        self.q, self.k, self.v = (nn.Linear(settings.width, settings.width, bias=False) for _ in range(3))
        self.o = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """What the attention adds, [batch, length, width]."""
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def rotations(length: int, head_width: int, device: torch.device | str = "cpu") -> Tensor:
    """Cosine and sine of every position's turn, [2, length, head_width / 2]: pair i turns by 10⁴^(−2i/width) a step."""
    rate = 10_000.0 ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angle = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(1) * rate
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn neighbouring pairs of coordinates of x, [..., length, head_width], by their position's angles."""
    cos, sin = turns
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def make_decoder(settings: TransformerSettings, draws: torch.Generator) -> Decoder:
    """A decoder with random weights that depend on the generator alone (on the CPU)."""
    with torch.device("meta"):
        model = Decoder(settings)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".norm" in f".{name}":
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                weight.zero_()
            elif name.startswith("embedding"):
                weight.normal_(0, 1 / math.sqrt(settings.width), generator=draws)
            else:
                _lecun_normal(weight, draws)
    return model


def next_token_loss(model: Decoder, tokens: Tensor, counted: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token of the counted tokens [batch, length], each predicted from those before."""
    logits = model(tokens[:, :-1])
    targets = torch.where(counted[:, 1:], tokens[:, 1:], -100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def group_of(name: str) -> str:
    """The group of GROUPS that a parameter belongs to.

    Raises:
        ValueError: a name that belongs to none.
    """
    for group, marks in GROUPS.items():
        if any(f".{mark}" in f".{name}" for mark in marks):
            return group
    raise ValueError(f"No group for parameter {name!r}; known groups: {', '.join(GROUPS)}.")


def freeze(model: Decoder, groups: Iterable[str]) -> None:
    """Let the parameters of these groups take no part in training, and all others take part.

    Raises:
        ValueError: an unknown group, or nothing left to train.
    """
    groups = set(groups)
    if groups - set(GROUPS):
        raise ValueError(f"No group {sorted(groups - set(GROUPS))[0]!r}; expected some of {', '.join(GROUPS)}.")
    for name, weight in model.named_parameters():
        weight.requires_grad_(group_of(name) not in groups)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ValueError(f"Freezing {sorted(groups)} leaves nothing to train.")


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)


def _lecun_normal(weight: Tensor, draws: torch.Generator) -> None:
    """Normal, cut at two standard deviations, with variance 1 / inputs; the weight is [outputs, inputs]."""
    sd = 1 / math.sqrt(weight.shape[1]) / 0.87962566103423978  # the cut normal's own sd
    nn.init.trunc_normal_(weight, 0, sd, -2 * sd, 2 * sd, generator=draws)
