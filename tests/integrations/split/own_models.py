"""Small models of one's own, written as scripts write them, and micro-batches for them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


class Attention(nn.Module):
    """A block: attention, which a factor may rotate, and two linear layers."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, rotation: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norms[0](hidden)).chunk(3, dim=-1)
        if rotation is not None:
            query, key = query * rotation, key * rotation
        hidden = hidden + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal))
        return hidden + self.mlp(self.norms[1](hidden))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Gpt(nn.Module):
    """An embedding, blocks and a head. Tests derive models that replace a part of it."""

    def __init__(self, block: Any = Attention, blocks: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(block(causal=True) for _ in range(blocks))

    def through(self, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        """Runs the blocks, which all get what is ``given``."""
        for block in self.blocks:
            hidden = block(hidden, *given, **named)
        return hidden

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(self.through(self.embedding(tokens))), labels)


class TiedGpt(nn.Module):
    """Its parts lie in an nn.ModuleDict, its head is the embedding, and it returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Attention(causal=True) for _ in range(3))
        parts = {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "norm": nn.LayerNorm(WIDTH)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.transformer["wte"].weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], device=idx.device)
        hidden = self.transformer["wte"](idx) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            hidden = block(hidden)
        logits = self.head(self.transformer["norm"](hidden))
        return logits, None if targets is None else cross_entropy(logits, targets)


class PositionsGpt(nn.Module):
    """Has a parameter of its own before the blocks and one after them, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.temperature = nn.Parameter(torch.tensor([0.5]))
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(*(Attention(causal=True) for _ in range(3)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[:, : tokens.shape[1]]
        return cross_entropy(self.head(self.blocks(hidden)) * self.temperature, labels)


class RotaryGpt(nn.Module):
    """Its blocks lie in an nn.ModuleDict and get a buffer, all by name. It returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotation", torch.randn(LENGTH, WIDTH), persistent=False)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleDict({str(number): Attention(causal=True) for number in range(3)})

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden=hidden, rotation=self.rotation[: tokens.shape[1]])
        logits = self.head(hidden)
        return {"logits": logits, "ce": cross_entropy(logits, labels)}


class Mixing(Attention):
    """A block that mixes other tensors into its hidden states."""

    def forward(self, hidden: Tensor, first: Tensor, values: Tensor, mix: Tensor) -> Tensor:
        return super().forward(hidden + mix * first + values)


class MixingGpt(nn.Module):
    """Every block, and the head, get what was computed before the blocks, besides hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.values = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.mixes = nn.Parameter(torch.randn(3))
        self.blocks = nn.ModuleList(Mixing(causal=True) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = first = functional.normalize(self.embedding(tokens), dim=-1)
        values = [embedding(tokens) for embedding in self.values]
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, first=first, values=values[number % 2], mix=self.mixes[number])
        return cross_entropy(self.head(hidden + first), labels)


class Classifier(nn.Module):
    """Classifies images: a convolution, a token for the class, blocks, and a head. The script computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.class_token, self.positions = (
            nn.Parameter(torch.randn(1, 1, WIDTH)),
            nn.Parameter(torch.randn(1, 5, WIDTH)),
        )
        self.blocks = nn.Sequential(*(Attention(causal=False) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(len(images), -1, -1), hidden], dim=1) + self.positions
        return self.head(self.norm(self.blocks(hidden))[:, 0])


IMAGES = {"images": {"shape": [1, 3, 8, 8]}}
BLOCKS = {"a classifier": {"outputs": "all", "dummy_inputs": IMAGES}}
"""What models need in their block."""


class Rotation(nn.Module):
    """A table that all blocks share, which a state of the model has once for each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.table[: hidden.shape[1]]


class Rotating(Attention):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__(causal=True)
        self.rotation = rotation

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.rotation(hidden))


class SharedTableGpt(nn.Module):
    """Its blocks hold one and the same module, which has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        rotation = Rotation()
        self.blocks = nn.ModuleList(Rotating(rotation) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), labels)


class Function(nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Any) -> Any:
        return self.function(given)


class InOneTuple(Attention):
    """Takes hidden states and a mask in one tuple, and returns such a tuple."""

    def __init__(self) -> None:
        super().__init__(causal=True)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = given
        return super().forward(hidden.masked_fill(mask, 0.0)), mask


class MaskedEmbedding(nn.Module):
    """Takes tokens and a mask in one tuple, and passes the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.tokens(given[0]), given[1]


class SequentialGpt(nn.Module):
    """Its layers are those of a pipeline, in one nn.Sequential. The last one reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        embedding = MaskedEmbedding()
        self.layers = nn.Sequential(
            embedding,
            Function(lambda given: (given[0].transpose(0, 1).contiguous(), given[1].transpose(0, 1))),
            *(InOneTuple() for _ in range(3)),
            Function(lambda given: given[0].transpose(0, 1).contiguous()),
            nn.LayerNorm(WIDTH),
            Function(lambda hidden: functional.linear(hidden, embedding.tokens.weight)),
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        given: Any = tokens, (tokens % 5 == 0)[..., None]
        for layer in self.layers[:]:
            given = layer(given)
        return cross_entropy(given, labels)


class Experts(Attention):
    """A block with experts, of which each token chooses one. Returns the logits of its router, too, and their mean
    square logarithm."""

    def __init__(self, causal: bool) -> None:
        super().__init__(causal)
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(hidden)
        logits = self.router(hidden)
        weights, chosen = logits.softmax(-1).max(-1)
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            # Some get no tokens.
            if (own := chosen == number).any():
                made[own] = weights[own, None] * expert(hidden[own])
        return hidden + made, logits, logits.logsumexp(-1).square().mean()


class ExpertsGpt(Gpt):
    """Its loss balances experts, over the tokens of all blocks, and keeps the logits of routers small."""

    def __init__(self) -> None:
        super().__init__(Experts)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, routers, penalty = self.embedding(tokens), [], torch.zeros(())
        for block in self.blocks:
            hidden, logits, square = block(hidden)
            routers.append(logits)
            penalty = penalty + square
        probabilities = torch.cat(routers).softmax(-1).flatten(0, 1)
        shares = functional.one_hot(probabilities.argmax(-1), 5).float().mean(0)
        balance = (shares * probabilities.mean(0)).sum()
        return cross_entropy(self.head(hidden), labels) + 0.5 * balance + 0.1 * penalty


MODELS = {
    "a tied GPT": TiedGpt,
    "a GPT with positions": PositionsGpt,
    "a GPT with rotations": RotaryGpt,
    "a GPT that mixes": MixingGpt,
    "a GPT with a shared table": SharedTableGpt,
    "a GPT in a sequence": SequentialGpt,
    "a GPT with experts": ExpertsGpt,
    "a classifier": Classifier,
}


def make(name: str) -> Any:
    """Makes a model with the same values on every rank."""
    torch.manual_seed(0)
    return MODELS[name]()


def micro_batch(name: str, *numbers: int) -> tuple[Tensor, ...]:
    """Returns the positional arguments of a call, and for a classifier its labels after them."""
    draw = torch.Generator().manual_seed(hash(numbers) % 2**31)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
    if name == "a classifier":
        return torch.randn(2, 3, 8, 8, generator=draw), tokens[:, 0]
    return tokens, tokens.roll(1, 1)


def loss_of(name: str, compute: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Returns the loss of a micro-batch, as a script gets it from ``compute``, the model or its engine."""
    if name == "a classifier":
        return functional.cross_entropy(compute(batch[0]), batch[1])
    output = compute(*batch)
    return {"a tied GPT": lambda: output[1], "a GPT with rotations": lambda: output["ce"]}.get(name, lambda: output)()
