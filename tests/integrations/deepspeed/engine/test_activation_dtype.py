"""With ``activation_dtype``, a pipeline trains as one process that rounds by hand where its ranks meet."""

from collections import Counter
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.cost.traffic import narrow_bytes
from ds_lgamp.runtime.measure import CollectiveCounter
from testing import simnccl
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import BASE_SEED, build_layers, scaled_weights, seed
from tests.runtime.assembly import gathered
from tests.runtime.test_equivalence import relative
from tests.slow import slow_except

SAMPLES, LENGTH, WIDTH, WORDS = 4, 10, 33, 11
HIDDEN = SAMPLES * LENGTH * WIDTH
"""Elements of a hidden state: more than 1,024, and no whole number of blocks."""
MICRO_BATCHES, STEPS, BLOCKS = 4, 3, 6
Numbers = tuple[list[float], list[dict[str, torch.Tensor]], float]
"""Losses and gradients by step, and the loss of an evaluation."""
FROZEN = ("0.", "1.")
"""Prefixes of the parameters of the first chunk."""


class Begin(nn.Module):
    """Starts what travels: a hidden state, a table of positions, a mask, a bias that trains with a mask in it, a sum,
    and token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.bias = nn.Parameter(torch.randn(16, LENGTH, LENGTH) * 0.3)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        lowest = torch.finfo(torch.float32).min
        later = torch.full((LENGTH, LENGTH), lowest).triu(1)
        # No key is left in the last row: all scores are the lowest number, and none may become infinite.
        mask = torch.where(torch.arange(LENGTH)[:, None] == LENGTH - 1, lowest, later).expand(16, -1, -1)
        table = torch.linspace(0, 1, HIDDEN).view(SAMPLES, LENGTH, WIDTH)
        total = self.bias.sum()
        return self.words(tokens), table, mask.contiguous(), self.bias.clamp(max=1.0) + later, total, tokens


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, table, mask, bias, total, tokens = inputs
        queries = self.norm(hidden) + table
        scores = queries @ queries.transpose(1, 2)
        seen = torch.softmax(scores + bias[:SAMPLES], -1) + torch.softmax(mask[:SAMPLES], -1)
        hidden = hidden + torch.tanh(self.inner(seen @ queries))
        return hidden, table, mask, bias, total + hidden.square().mean() * 1e-3, tokens


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(inputs[0]), inputs[4]


def loss_function(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0].flatten(0, 1), labels.flatten()) + 1e-3 * outputs[1]


SPECS = [LayerSpec(Begin), *(LayerSpec(Block) for _ in range(BLOCKS)), LayerSpec(End)]


def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens, labels = torch.randint(0, WORDS, (2, SAMPLES, LENGTH), generator=generator)
    return tokens, labels


def rounded(tensor: torch.Tensor, narrow: str) -> torch.Tensor:
    """Rounds by hand, one block after another."""
    if narrow == "bf16":
        return tensor.bfloat16().float()
    blocks = []
    for block in tensor.flatten().split(128):
        scale = block.abs().max() / 448
        blocks.append((block / scale if scale > 0 else block).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(blocks).view_as(tensor)


class Cut(torch.autograd.Function):
    """Two pipeline ranks meet here."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, narrow: str) -> torch.Tensor:
        context.narrow = narrow
        return rounded(hidden, narrow)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rounded(gradient, context.narrow), None


def reference(narrow: str | None, cuts: list[int], data_ranks: int, freezes: bool) -> Numbers:
    """Trains in one process that rounds hidden states before the layers ``cuts``. Returns losses, gradients by step,
    and the loss of an evaluation, which rounds nothing."""
    layers, parameters = build_layers(None, SPECS)
    for name in parameters.copy() if freezes else ():
        if name.startswith(FROZEN):
            parameters.pop(name).requires_grad_(False)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)

    def loss_of(step: int, index: int, rounds: bool) -> torch.Tensor:
        inputs, labels = micro_batch(step, index)
        for number, layer in enumerate(layers):
            if rounds and narrow is not None and number in cuts and inputs[0].requires_grad:
                inputs = Cut.apply(inputs[0], narrow), *inputs[1:]
            inputs = layer(inputs)
        return loss_function(inputs, labels)

    losses, gradients, count = [], [], MICRO_BATCHES * data_ranks
    for step in range(STEPS):
        shares, total = [], 0.0
        for rank in range(data_ranks):
            optimizer.zero_grad()
            for index in range(rank * MICRO_BATCHES, (rank + 1) * MICRO_BATCHES):
                loss = loss_of(step, index, True) / count
                loss.backward()
                total += loss.item()
            shares.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        # In the order in which ranks add, since the last bit decides how the next step rounds.
        for name, parameter in parameters.items():
            parameter.grad = sum((share[name] for share in shares[1:]), shares[0][name].clone())
        gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        losses.append(total)
        optimizer.step()
    with torch.no_grad():
        return losses, gradients, sum(loss_of(99, index, False).item() for index in range(count)) / count


def initialize(block: dict, stage: int, freezes: bool, pipeline_ranks: int = 2):
    prepare_rank()
    ds_lgamp.install()
    with quiet():
        module = PipelineModule(
            SPECS, num_stages=pipeline_ranks, loss_fn=loss_function, seed_layers=True, seed_fn=seed, base_seed=BASE_SEED
        )
        scaled_weights(module.named_parameters())
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (freezes and name.startswith(FROZEN)))
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "ds_lgamp": block,
        }
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        return deepspeed.initialize(model=module, config=config, optimizer=optimizer)[0]


def batches(step: int, engine: Any) -> Any:
    first = engine.grid.data_parallel_id * MICRO_BATCHES
    return iter([micro_batch(step, first + index) for index in range(MICRO_BATCHES)])


def cuts_of(engine: Any) -> list[int]:
    """Returns the first layer of every chunk that follows one of another rank."""
    layout = engine.module.layout
    placement = layout.placement
    return [layout.bounds[chunk] for chunk in range(1, len(placement)) if placement[chunk - 1] != placement[chunk]]


def train(block: dict, stage: int, freezes: bool = False) -> tuple[Numbers, list[int], list[tuple[str, int]]]:
    engine = initialize(block, stage, freezes)
    step_optimizer, gradients, losses = engine.optimizer.step, [], []

    def recording_step() -> None:
        gradients.append(gathered(engine.optimizer.partition, lambda unit: unit.reduction.shard_gradient))
        step_optimizer()

    engine.optimizer.step = recording_step
    for step in range(STEPS):
        with CollectiveCounter() as counter:
            losses.append(engine.train_batch(batches(step, engine)).item())
    evaluation = engine.eval_batch(batches(99, engine)).item()
    sent = [entry for entry in counter.log if entry[0] == "send"]
    return (losses, gradients, evaluation), cuts_of(engine), sent


def check_each(cases: list[tuple], data_ranks: int) -> int:
    for number, (block, stage, *freezes) in enumerate(cases):
        if dist.get_backend() == simnccl.NAME:
            simnccl.deliver("random", number)
        (losses, gradients, evaluation), cuts, _ = train(block, stage, *freezes)
        expected = reference(block.get("activation_dtype"), cuts, data_ranks, any(freezes))
        assert losses == pytest.approx(expected[0], rel=1e-6), (block, stage)
        assert evaluation == pytest.approx(expected[2], rel=1e-6), (block, stage)
        for step, own in enumerate(gradients):
            for name, gradient in own.items():
                wanted = expected[1][step][name]
                assert relative(gradient - wanted, wanted) < 1e-6, (block, stage, step, name)
    return len(cases)


def cases_of(narrow: str) -> list[tuple]:
    """Returns blocks and stages, of which the last freezes the first chunk, whose results then travel exactly.

    Data-parallel ranks add in one order in all of them: above stage 1 groups would not, and the last bit of a sum
    decides how the next step rounds."""
    return [
        ({"activation_dtype": narrow}, 1),
        ({"activation_dtype": narrow, "micro_batch_group": 2, "recompute": "none"}, 1),
        ({"activation_dtype": narrow, "schedule": "1f1b"}, 1),
        ({"activation_dtype": narrow, "layers_per_chunk": 2, "placement": "contiguous"}, 3),
        ({"activation_dtype": narrow, "offload_activations": "cpu"}, 3),
        ({"activation_dtype": narrow}, 2, True),
    ]


@pytest.mark.parametrize(
    ("narrow", "data_ranks", "backend"),
    slow_except([("bf16", 1, "gloo")], [*product(("bf16", "fp8"), (1, 2), ("gloo", simnccl.NAME))], several=True),
)
def test_a_pipeline_trains_as_one_process_that_rounds_where_ranks_meet(narrow, data_ranks, backend):
    cases, ranks = cases_of(narrow), 2 * data_ranks
    assert run_on_ranks(ranks, check_each, cases, data_ranks, backend=backend) == [len(cases)] * ranks


def bytes_of_messages(narrow: str) -> list[int]:
    return [size for _, size in train({"activation_dtype": narrow}, 1)[2]]


@pytest.mark.parametrize("narrow", ["bf16", "fp8"])
def test_the_wire_carries_rounded_hidden_states_and_no_gradients_of_constants(narrow):
    """A result has a table, a mask and a bias with one in fp32, a sum, and token ids of 8 bytes, too. Each begins at a
    multiple of 16 bytes. A gradient has neither table nor mask nor ids."""
    hidden, bias = -(-narrow_bytes(HIDDEN, narrow) // 16) * 16, 4 * 16 * LENGTH**2
    result, gradient = hidden + 4 * HIDDEN + 2 * bias + 16 + 8 * SAMPLES * LENGTH, hidden + bias + 16
    first, second = run_on_ranks(2, bytes_of_messages, narrow)
    # Chunk k of six is on rank k mod 2, so that rank 0 sends the results of three and the gradients of two.
    assert Counter(first) == {result: 3 * MICRO_BATCHES, gradient: 2 * MICRO_BATCHES}
    assert Counter(second) == {result: 2 * MICRO_BATCHES, gradient: 3 * MICRO_BATCHES}


def refusal_of_one_rank() -> str:
    with pytest.raises(ConfigError) as error:
        initialize({"activation_dtype": "fp8"}, 1, False, pipeline_ranks=1)
    return str(error.value)


def test_one_pipeline_rank_has_nothing_to_round():
    expected = "ds_lgamp.activation_dtype is 'fp8', but one pipeline rank sends no hidden states; remove it"
    assert run_on_ranks(1, refusal_of_one_rank) == [expected]
