"""What scripts do with the engine of a model of transformers, beside training steps. The functions run on ranks and
return what they saw."""

import copy
from inspect import signature
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_lgamp
from ds_lgamp.integrations.deepspeed.model.module import layer_types
from testing.deepspeed_rank import prepare_rank, quiet
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, configuration, initialize
from tests.integrations.split.own_models import LENGTH, VOCABULARY, WIDTH, Attention, cross_entropy
from tests.integrations.transformers.models import make, micro_batch


def prepared(name: str, pipeline_ranks: int, stage: int = 3) -> tuple[Any, Any]:
    """Returns a model and its engine."""
    prepare_rank()
    ds_lgamp.install()
    model = make(name)
    return model, initialize(model, configuration(stage, {"pipeline_ranks": pipeline_ranks}))


def train(engine: Any, *batches: Any) -> list[float]:
    """Trains one step. Returns the losses that the engine told."""
    losses = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def shortened(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {name: value[:, :length] for name, value in batch.items()}


def evaluate_between_steps(name: str, pipeline_ranks: int) -> list[dict[str, torch.Tensor]]:
    """Evaluates before a step and after it. Returns the outputs."""
    _, engine = prepared(name, pipeline_ranks)
    rank, outputs = dist.get_rank(), []
    for moment in range(2):
        engine.eval()
        output = engine(**shortened(micro_batch(7, rank, moment), 10 - rank))
        assert not output.logits.requires_grad
        outputs.append({"loss": output.loss, "logits": output.logits})
        engine.train()
        train(engine, *(micro_batch(0, rank, number) for number in range(MICRO_BATCHES)))
    return outputs


class Featured(nn.Module):
    """Returns features, too, on which its loss depends only through blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Attention(causal=True) for _ in range(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return {"loss": cross_entropy(logits, labels), "logits": logits, "features": features}


def featured() -> Featured:
    torch.manual_seed(0)
    return Featured()


def evaluate_features(pipeline_ranks: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns how many outputs of a training step were there, and those of an evaluation before it."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(featured(), configuration(1, {"pipeline_ranks": pipeline_ranks}, micro_batches=1))
    tokens = micro_batch(0, dist.get_rank(), 0)["input_ids"][:, :LENGTH] % VOCABULARY
    engine.eval()
    with torch.no_grad():
        evaluated = engine(tokens, tokens)
    engine.train()
    trained = engine(tokens, tokens)
    engine.backward(trained["loss"])
    engine.step()
    return sum(isinstance(each, torch.Tensor) for each in trained.values()), evaluated


def train_on_lengths(name: str, pipeline_ranks: int) -> list[list[float]]:
    """Trains on micro-batches whose lengths differ between ranks and steps, and in some steps between micro-batches."""
    _, engine = prepared(name, pipeline_ranks)
    return [train(engine, *length_batches(dist.get_rank(), step)) for step in range(len(LENGTHS))]


LENGTHS = [((10, 10), (10, 10)), ((6, 6), (6, 6)), ((6, 9), (4, 10)), ((10, 10), (10, 10)), ((5, 5), (8, 8))]
"""By step, rank and micro-batch."""


def length_batches(rank: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [shortened(micro_batch(step, rank, number), length) for number, length in enumerate(LENGTHS[step][rank])]


def copy_models() -> tuple[Any, Any]:
    """Copies a model that an engine trains, then trains on. Returns the weights before and after, and those of the copy
    and of one that has loaded what was before, each by what it computes."""
    prepare_rank()
    ds_lgamp.install()
    model = make("GPT-2")
    engine = initialize(model, configuration(1, {}))
    batch = micro_batch(0, 0, 0)

    def computed(model: Any) -> list[float]:
        with torch.no_grad():
            return model.eval()(**batch).logits[0, 0, :4].tolist()

    assert all(name.startswith("module.") for name in [*dict(engine.named_parameters()), *engine.state_dict()])
    before, reference = computed(model), copy.deepcopy(model)
    state = copy.deepcopy(reference.state_dict())
    model.train()
    engine.train()
    applied = []
    for number in range(MICRO_BATCHES):
        engine.backward(engine(**micro_batch(0, dist.get_rank(), number)).loss)
        engine.step()
        applied.append(engine.was_step_applied())
    after, average = computed(model), copy.deepcopy(model)
    average.load_state_dict(state)
    again = computed(model)
    names = list(signature(reference.forward).parameters), list(signature(model.forward).parameters)
    return (before, after, again, applied, names), (computed(reference), computed(average))


def compile_blocks() -> tuple[list[float], list[float], int]:
    """Trains on two pipeline ranks, then with compiled blocks. Returns the losses of both, and the number of graphs."""
    prepare_rank()
    ds_lgamp.install()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    losses = []
    for compiled in (False, True):
        engine = initialize(make("Llama"), configuration(2, {"pipeline_ranks": 2}))
        if compiled:
            engine.compile(backend=counting)
        batches = [micro_batch(0, dist.get_rank(), number) for number in range(MICRO_BATCHES)]
        losses.append([train(engine, *batches)[-1] for _ in range(2)])
    return *losses, len(graphs)


def train_partitioned(name: str, pipeline_ranks: int) -> list[float]:
    """Trains a model that zero.Init has partitioned over all ranks. Returns the sums of its losses by step."""
    prepare_rank()
    ds_lgamp.install()
    config = configuration(3, {"pipeline_ranks": pipeline_ranks})
    whole = make(name)
    with quiet():
        deepspeed.zero.Init(module=whole, config_dict_or_path=config)
    assert all(parameter.numel() == 0 for parameter in whole.parameters())
    engine = initialize(whole, config)
    elsewhere = [parameter for parameter in whole.parameters() if not hasattr(parameter, "ds_id")]
    assert elsewhere and not any(parameter.numel() for parameter in elsewhere)
    rank = dist.get_rank()
    return [sum(train(engine, *(micro_batch(step, rank, number) for number in range(2)))) for step in range(3)]


def blocks_of_chunks(name: str, block: dict[str, Any]) -> list[int]:
    """Returns how many blocks of the model each chunk has."""
    prepare_rank()
    ds_lgamp.install()
    placed = initialize(make(name), configuration(1, block)).placed
    types, bounds = layer_types(placed), placed.layout.bounds
    return [types[start:end].count("Block") for start, end in zip(bounds, bounds[1:])]


def train_variants(name: str, variants: list[dict[str, Any]]) -> list[list[float]]:
    """Trains the model once for every variant of the configuration. Returns the sums of its losses by step."""
    prepare_rank()
    ds_lgamp.install()
    rank, courses = dist.get_rank(), []
    for variant in variants:
        engine = initialize(make(name), {**configuration(2, {"pipeline_ranks": 2}), **variant})
        batches = ([micro_batch(step, rank, number) for number in range(MICRO_BATCHES)] for step in range(3))
        courses.append([sum(train(engine, *batch)) for batch in batches])
    return courses
