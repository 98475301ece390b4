"""With ``reproducible``, a run with dropout is the same to the bit in every layout with equally many data-parallel
ranks."""

import random
from hashlib import sha256
from typing import NamedTuple

import deepspeed
import numpy
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

import ds_lgamp
from ds_lgamp.config import ConfigError
from ds_lgamp.runtime.recompute import hashed_seed
from testing.deepspeed_rank import prepare_rank, quiet
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import seed
from tests.runtime.assembly import gathered
from tests.slow import chosen, slow_except

WIDTH, INNER, VOCABULARY = 13, 29, 11
"""Odd numbers, which do not fill a processor's vectors."""
MICRO_BATCHES, STEPS, SAVED, LIMIT = 4, 3, 2, 0.05


class Layout(NamedTuple):
    pipeline_ranks: int
    stage: int
    block: dict


LAYOUTS = {
    "layered": Layout(1, 0, {}),
    "one chunk": Layout(1, 1, {"chunks_per_rank": 1, "recompute": "none"}),
    "one resident": Layout(1, 2, {"layers_per_chunk": 1, "resident_chunks": 1}),
    "two resident": Layout(1, 3, {"layers_per_chunk": 3}),
    "all resident": Layout(1, 3, {"resident_chunks": 12, "recompute": "none"}),
    "groups": Layout(1, 1, {"micro_batch_group": 3}),
    "1f1b of one rank": Layout(1, 2, {"schedule": "1f1b"}),
    "1f1b": Layout(2, 0, {"schedule": "1f1b"}),
    "gpipe": Layout(2, 1, {"schedule": "gpipe", "recompute": "none"}),
    "interleaved": Layout(2, 3, {"schedule": "interleaved_1f1b", "layers_per_chunk": 3, "resident_chunks": 1}),
    "contiguous": Layout(2, 3, {"layers_per_chunk": 2, "placement": "contiguous", "resident_chunks": 6}),
    "modular": Layout(2, 2, {"layers_per_chunk": 1, "resident_chunks": 1, "recompute": "none"}),
    "two chunks": Layout(2, 1, {"chunks_per_rank": 2}),
    "by speed": Layout(2, 3, {"pipeline_rank_speeds": [1, 3]}),
    "modular of four": Layout(4, 3, {"layers_per_chunk": 1}),
    "interleaved of four": Layout(4, 0, {"schedule": "interleaved_1f1b", "layers_per_chunk": 3}),
    "1f1b of four": Layout(4, 2, {"schedule": "1f1b", "recompute": "none"}),
    "contiguous of four": Layout(4, 1, {"chunks_per_rank": 2, "placement": "contiguous", "resident_chunks": 1}),
}


class Embedding(nn.Embedding):
    def __init__(self, index):
        with torch.random.fork_rng():
            torch.manual_seed(index)
            super().__init__(VOCABULARY, WIDTH)


class Block(nn.Module):
    """A block whose weights depend only on ``index``."""

    def __init__(self, index, outputs=WIDTH):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(index)
            self.norm = nn.LayerNorm(WIDTH)
            self.inner, self.outer = nn.Linear(WIDTH, INNER), nn.Linear(INNER, outputs)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden):
        change = self.outer(self.dropout(torch.tanh(self.inner(self.norm(hidden)))))
        return hidden + change if change.shape == hidden.shape else change


class Turn(nn.Module):
    """Returns a view that is not contiguous."""

    def forward(self, hidden):
        return hidden.transpose(0, 1)


class Shift(nn.Module):
    """Returns a view that begins inside a storage."""

    def forward(self, hidden):
        return torch.cat([hidden[:1], hidden])[1:]


class Scale(nn.Module):
    """Draws from the generators of Python and NumPy. The mean and the gradient of the weights add in the order of a
    hidden state's memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        factor = 0.5 + random.random() + 0.1 * numpy.random.rand() if self.training else 1.0
        return (hidden - hidden.mean((0, 1))) * self.weight * factor


def layer_specs():
    return [
        LayerSpec(Embedding, 0),
        LayerSpec(Block, 1),
        LayerSpec(Scale),
        LayerSpec(Turn),
        LayerSpec(Scale),
        LayerSpec(Block, 2),
        LayerSpec(Shift),
        LayerSpec(Block, 3),
        LayerSpec(Turn),
        LayerSpec(Scale),
        LayerSpec(Block, 4),
        LayerSpec(Block, 5, VOCABULARY),
    ]


def loss_function(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def groups_of(parameters):
    """Makes parameter groups. Vectors do not decay."""
    parameters = list(parameters)
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]


def engine_of(layout, layers=None, reproducible=True, settings=None, **options):
    ds_lgamp.install()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": LIMIT,
        "zero_optimization": {"stage": layout.stage},
        "ds_lgamp": {**layout.block, "reproducible": reproducible},
        **(settings or {}),
    }
    # Seeds differently on each rank, because earlier draws of a script must not matter.
    torch.manual_seed(100 * layout.pipeline_ranks + dist.get_rank())
    with quiet():
        module = PipelineModule(
            layers or layer_specs(), num_stages=layout.pipeline_ranks, loss_fn=loss_function, **options
        )
        optimizer = torch.optim.AdamW(groups_of(module.parameters()), lr=0.02)
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def micro_batch(step, data_rank, index):
    generator = torch.Generator().manual_seed(1000 * step + 100 * data_rank + index)
    tokens = torch.randint(0, VOCABULARY, (3, 8), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flip(0)


def batch_of(engine, step=None):
    step = engine.global_steps if step is None else step
    count = engine.lgamp.own_spec.micro_batches if step < 99 else MICRO_BATCHES
    return iter([micro_batch(step, engine.grid.data_parallel_id, index) for index in range(count)])


def train(engine, steps):
    """Trains. Returns loss and norm of every step."""
    results = []
    for _ in range(steps):
        loss = engine.train_batch(batch_of(engine)).item()
        results.append((loss, float(engine.get_global_grad_norm())))
    return results


class Run(NamedTuple):
    steps: list
    """Loss and norm of every step."""
    evaluation: float
    parameters: dict
    """Digests of the bits of this rank's parameters."""


def digests(engine):
    tensors = gathered(engine.optimizer.partition, lambda unit: unit.storage.shard)
    return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def end_of(engine, steps):
    return Run(steps, engine.eval_batch(batch_of(engine, 99)).item(), digests(engine))


def run(layout):
    engine = engine_of(layout)
    return end_of(engine, train(engine, STEPS))


def resumed(layout, folder):
    """Returns a run that a second engine completes."""
    first = engine_of(layout)
    steps = train(first, SAVED)
    first.eval_batch(batch_of(first, 99))
    first.save_checkpoint(folder)
    second = engine_of(layout)
    second.load_checkpoint(folder)
    return end_of(second, steps + train(second, STEPS - SAVED))


def run_all(folder, wanted):
    """Runs every layout whose pipeline ranks divide the processes, if the number of data-parallel ranks is ``wanted``.
    Returns the runs by data-parallel ranks and name."""
    prepare_rank()
    runs, processes = {}, dist.get_world_size()
    for name, layout in LAYOUTS.items():
        data_ranks, rest = divmod(processes, layout.pipeline_ranks)
        if rest == 0 and data_ranks in wanted:
            runs[data_ranks, name] = run(layout)
    if processes == 4 and 2 in wanted:
        layout = LAYOUTS["interleaved"]
        runs[2, "resumed"] = resumed(layout, folder)
    return runs, drawn_numbers() if processes == 2 else None


def merged(on_ranks):
    """Merges the runs of all ranks. They agree on losses and norms, and together have every parameter."""
    parameters: dict = {}
    for other in on_ranks:
        assert other[:2] == on_ranks[0][:2]
        for name, digest in other.parameters.items():
            assert parameters.setdefault(name, digest) == digest, name
    return on_ranks[0]._replace(parameters=parameters)


@pytest.fixture(scope="module")
def spawned(request, tmp_path_factory):
    """Returns the results of the ranks by number of processes."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    # One data-parallel rank is what the other tests need.
    wanted = {1} | chosen(request, "data_ranks")
    processes = {1, 2, 4} | ({8} if 2 in wanted else set()) | ({3} if 3 in wanted else set())
    return {count: run_on_ranks(count, run_all, folder, wanted) for count in sorted(processes)}


@pytest.mark.parametrize("data_ranks", slow_except([1, 3], [1, 2, 3]))
def test_a_run_is_the_same_to_the_bit_in_every_layout(spawned, data_ranks):
    """With three data-parallel ranks the order of addition matters."""
    runs = {
        key[1]: merged([rank[0][key] for rank in on_ranks])
        for on_ranks in spawned.values()
        for key in on_ranks[0][0]
        if key[0] == data_ranks
    }
    expected = [*LAYOUTS] if data_ranks < 3 else [name for name in LAYOUTS if LAYOUTS[name].pipeline_ranks == 1]
    assert sorted(runs) == sorted([*expected, "resumed"] if data_ranks == 2 else expected)
    first = runs["layered"]
    assert len(first.parameters) == 1 + 5 * 6 + 3
    assert all(norm > LIMIT for _, norm in first.steps), "a step is not clipped"
    for name, other in runs.items():
        assert other == first, name


def shares():
    """Returns runs of two data-parallel ranks that share 8 micro-batches as 6 and 2."""
    prepare_rank()
    speeds = {"data_rank_speeds": [3, 1]}
    layouts = [Layout(1, 0, {}), Layout(1, 3, {"layers_per_chunk": 2}), Layout(1, 1, {"schedule": "gpipe"})]
    return [run(layout._replace(block={**layout.block, **speeds})) for layout in layouts]


@pytest.mark.slow
def test_runs_with_the_same_unequal_speeds_are_the_same_to_the_bit():
    first, *others = (merged(list(on_ranks)) for on_ranks in zip(*run_on_ranks(2, shares)))
    assert others == [first, first] and len(first.parameters) == 1 + 5 * 6 + 3


def plain_run():
    """Returns losses and norms of a loop over layers in one process. Seeds each layer as the engine does."""
    layers = [spec.build() for spec in layer_specs()]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(groups_of(parameters), lr=0.02)
    results = []
    for step in range(STEPS):
        total = 0.0
        for index in range(MICRO_BATCHES):
            hidden, labels = micro_batch(step, 0, index)
            for number, layer in enumerate(layers):
                seed = hashed_seed(1234, "training", step, number, index, 0)
                torch.manual_seed(seed)
                random.seed(seed)
                numpy.random.seed(seed % 2**32)
                hidden = layer(hidden)
            loss = loss_function(hidden, labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        results.append((total, torch.nn.utils.clip_grad_norm_(parameters, LIMIT).item()))
        optimizer.step()
        optimizer.zero_grad()
    return results


class Drawing(nn.Module):
    """Records its draws. A recomputation draws again."""

    drawn: list = []

    def __init__(self, number):
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(1))

    def forward(self, hidden):
        numbers = torch.rand(2).tolist(), random.random(), numpy.random.rand()
        self.drawn.append((self.number, numbers))
        return hidden * self.weight


def drawn_numbers():
    """Returns the draws of layers, and whether the generators kept their states."""
    layers = [LayerSpec(Embedding, 0), LayerSpec(Drawing, 0), LayerSpec(Drawing, 1), LayerSpec(Block, 1, VOCABULARY)]
    engine = engine_of(Layout(1, 0, {}), layers)
    states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    engine.eval_batch(batch_of(engine))
    for _ in range(2):
        engine.train_batch(batch_of(engine))
    after = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    drawn = Drawing.drawn[:]
    Drawing.drawn.clear()
    engine_of(Layout(1, 0, {"recompute": "none"}), layers, seed_layers=True, seed_fn=seed).train_batch(
        batch_of(engine, 0)
    )
    return drawn, states == after, Drawing.drawn


def test_numbers_differ_between_steps_layers_micro_batches_and_ranks_and_leave_no_trace(spawned):
    on_ranks = [drawn for _, drawn in spawned[2]]
    forwards, repeated = [], []
    for drawn, *_ in on_ranks:
        for _, numbers in drawn:
            (repeated if numbers in forwards else forwards).append(numbers)
    # Two ranks, two layers, two steps and an evaluation. The last chunk, with the second layer, repeats nothing.
    assert len(forwards) == 2 * 2 * 3 * MICRO_BATCHES and len(repeated) == 2 * 2 * MICRO_BATCHES
    for kind in range(3):
        distinct = {str(numbers[kind]) for numbers in forwards}
        assert len(distinct) == len(forwards)
        assert {str(numbers[kind]) for numbers in repeated} < distinct
    assert all(untouched for _, untouched, _ in on_ranks)


def test_the_seeds_a_module_asks_for_have_the_last_word(spawned):
    """Stock DeepSpeed's seeds for torch are the same on all data-parallel ranks. ds_lgamp seeds the generators that the
    module's function leaves alone."""
    (*_, first), (*_, second) = (drawn for _, drawn in spawned[2])
    assert [numbers[0] for *_, numbers in first] == [numbers[0] for *_, numbers in second]
    seed(1234 * 2 + 1)
    assert first[0][1][0] == torch.rand(2).tolist()
    others = [numbers[1:] for drawn in (first, second) for *_, numbers in drawn]
    assert len(set(others)) == 2 * 2 * MICRO_BATCHES


def test_the_run_is_that_of_a_plain_loop(spawned):
    ((runs, _),) = spawned[1]
    for own, expected in zip(runs[1, "layered"].steps, plain_run(), strict=True):
        assert own == pytest.approx(expected, rel=1e-5)


def complaints():
    prepare_rank()
    tied = [TiedLayerSpec("shared", Block, 1), LayerSpec(Block, 2), TiedLayerSpec("shared", Block, 1)]
    with pytest.raises(ConfigError) as refused:
        engine_of(LAYOUTS["layered"], tied)
    engine_of(LAYOUTS["layered"], tied, reproducible=False)
    half_sums = {"zero_optimization": {"stage": 0}, "communication_data_type": "fp16"}
    with pytest.raises(ConfigError) as refused_sums:
        engine_of(LAYOUTS["layered"], settings=half_sums)
    return str(refused.value), str(refused_sums.value)


def test_what_depends_on_the_layout_is_refused():
    ((about_ties, about_sums),) = run_on_ranks(1, complaints)
    assert "ds_lgamp.reproducible is true, but layers 0, 2 share the tied module 'shared'" in about_ties
    assert "at zero_optimization.stage 0 gradients are summed in torch.float16" in about_sums
    assert "set communication_data_type to 'fp32', or use another stage" in about_sums
