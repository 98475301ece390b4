"""A small model as a list of layers, and the ground truth: its training on one process without parallelism."""

from typing import NamedTuple

import torch
from torch import nn

WIDTH = 15
LEARNING_RATE = 0.02


class Block(nn.Module):
    """A residual block with an odd number of parameters, so that shards need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.inner(self.norm(inputs)))


class Embedding(nn.Module):
    """An embedding. A tied model uses it again, transposed, as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, WIDTH) * 0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


class TiedHead(nn.Module):
    """The head of a tied model. It owns no parameter."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = [embedding]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._embedding[0].weight.T


class AddMask(nn.Module):
    """Starts a tuple that travels on from here: activations, an integer tensor and a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden, torch.arange(hidden.shape[0]), self.gain.view(1)


class TupleBlock(Block):
    def forward(self, inputs):
        if not isinstance(inputs, tuple):
            return super().forward(inputs)
        hidden, positions, gain = inputs
        return super().forward(hidden) * gain + hidden * 0.5, positions, gain


def drop_mask(inputs):
    return inputs[0]


class Model(NamedTuple):
    layers: list
    tied: bool

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by global name: layer index and name inside the layer."""
        return {
            f"{index}.{name}": parameter
            for index, layer in enumerate(self.layers)
            if isinstance(layer, nn.Module)
            for name, parameter in layer.named_parameters()
        }


def build_model(blocks: int, tied: bool, seed: int = 0) -> Model:
    """Builds an embedding, ``blocks`` blocks with tuples between them, and a head."""
    torch.manual_seed(seed)
    embedding = Embedding()
    body = [TupleBlock() for _ in range(blocks)]
    head = TiedHead(embedding) if tied else nn.Linear(WIDTH, 11)
    return Model([embedding, body[0], AddMask(), *body[1:], drop_mask, head], tied)


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Recording(nn.Module):
    """Keeps what it draws where no recomputation takes it away again."""

    def __init__(self):
        super().__init__()
        self.note = [].append

    @property
    def drawn(self):
        return self.note.__self__


def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``index``-th micro-batch of a step over all data-parallel ranks: tokens and labels, [4, 16] each."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, 11, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Reference(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: list[dict[str, torch.Tensor]]


def train_reference(model: Model, steps: int, micro_batches: int, learning_rate: float = LEARNING_RATE) -> Reference:
    """Trains with SGD on one process. A step uses the mean loss of ``micro_batches`` micro-batches."""
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=learning_rate)
    reference = Reference([], [], [])
    for step in range(steps):
        total = 0.0
        for index in range(micro_batches):
            hidden, labels = micro_batch(step, index)
            for layer in model.layers:
                hidden = layer(hidden)
            loss = loss_function(hidden, labels) / micro_batches
            loss.backward()
            total += loss.item()
        reference.losses.append(total)
        reference.gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        optimizer.step()
        optimizer.zero_grad()
        reference.parameters.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    return reference
