"""Layers move to the ranks of their chunks in the pipeline's group, in batches: under NCCL a message alone would open a
communicator for two ranks that stays."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from ds_lgamp.config import ConfigError
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import ONE_LAYER_PER_CHUNK, build, engine_of


class Counting(nn.Module):
    """Has tensors that differ in every layer: a weight, and buffers, two of dtypes that NCCL does not carry, one empty,
    one transposed."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 6), float(number)))
        self.register_buffer("steps", torch.tensor([number, -number], dtype=torch.int16))
        self.register_buffer("on", torch.tensor(number % 2 == 0))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("columns", torch.full((3, 2), float(number)).t())

    def forward(self, inputs):
        return inputs @ self.weight


def move(stage):
    """Returns the groups of all batches and this rank's layers after they moved."""
    prepare_rank()
    batched, batch, alone = [], dist.batch_isend_irecv, []

    def recording(operations):
        batched.extend(dist.get_process_group_ranks(operation.group) for operation in operations)
        return batch(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", recording)
        for name in ("send", "recv"):
            patch.setattr(dist, name, lambda *_, name=name, **__: alone.append(name))
        module = build([LayerSpec(Counting, number) for number in range(4)])
        for part in module.modules():
            if isinstance(part, Counting):
                part.columns += 1
        engine = engine_of(module, ONE_LAYER_PER_CHUNK, stage)
    with engine.module.full_parameters():
        layers = {name: value.clone() for name, value in engine.module.state_dict().items()}
    pipeline = dist.get_process_group_ranks(engine.grid.get_pipe_parallel_group())
    return batched, pipeline, alone, layers


def change_dropout():
    """Changes layers after they were built, and moves them. Returns the rates by layer, and the refusal of a hook."""
    prepare_rank()
    module = build([LayerSpec(Dropping) for _ in range(4)])
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    engine = engine_of(module, ONE_LAYER_PER_CHUNK, 1)
    rates = {name: part.p for name, part in engine.module.named_modules() if isinstance(part, nn.Dropout)}
    hooked = build([LayerSpec(Dropping) for _ in range(4)])
    for part in hooked.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError) as error:
        engine_of(hooked, ONE_LAYER_PER_CHUNK, 1)
    return rates, str(error.value)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs):
        return self.dropout(self.inner(inputs))


def test_a_layer_keeps_what_was_changed_in_it_and_hooks_are_refused():
    for rank, (rates, refusal) in enumerate(run_on_ranks(2, change_dropout)):
        assert rates == {f"{rank}.dropout": 0.0, f"{rank + 2}.dropout": 0.0}
        assert "has hooks or a forward that its specification does not build" in refusal


def sizes_of_given_modules():
    """Returns the elements of the weights of modules that the user has built and listed as layers."""
    prepare_rank()
    layers = [nn.Linear(6, 6) for _ in range(4)]
    engine_of(build(layers), ONE_LAYER_PER_CHUNK, 1)
    return [layer.weight.numel() for layer in layers]


def test_a_module_that_has_moved_away_keeps_no_memory():
    """Layers 0 and 1 were those of rank 0. Chunks are on ranks 0, 1, 0 and 1."""
    assert run_on_ranks(2, sizes_of_given_modules) == [[36, 0, 36, 36], [36, 36, 0, 36]]


class Scaled(nn.Linear):
    """Scales by a number of a buffer of all layers, of which it has a view."""

    def __init__(self, base, number):
        super().__init__(6, 6)
        self.register_buffer("scale", base[number : number + 1])
        self.register_buffer("row", base[None, :2].expand(3, 2))
        self.register_buffer("column", base[:2, None].t())


def views_after_a_move():
    """Returns the buffers of this rank's layers after a change of what they are views of."""
    prepare_rank()
    base = torch.arange(4.0)
    engine = engine_of(build([Scaled(base, number) for number in range(4)]), ONE_LAYER_PER_CHUNK, 1)
    base.add_(10)
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}


def test_buffers_of_a_module_that_has_moved_are_views_as_before():
    for rank, buffers in enumerate(run_on_ranks(2, views_after_a_move)):
        for number in (rank, rank + 2):
            assert buffers[f"{number}.scale"] == [10.0 + number]
            assert buffers[f"{number}.row"] == [[10.0, 11.0]] * 3
            assert buffers[f"{number}.column"] == [[10.0, 11.0]]


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(4, move, 1)


def test_every_layer_arrives_with_all_its_values(ranks):
    for rank, (*_, layers) in enumerate(ranks):
        for number in (0, 2) if rank < 2 else (1, 3):
            assert torch.equal(layers[f"{number}.weight"], torch.full((6, 6), float(number)))
            assert layers[f"{number}.steps"].tolist() == [number, -number]
            assert layers[f"{number}.on"].item() == (number % 2 == 0)
            assert layers[f"{number}.nothing"].shape == (0, 3)
            assert torch.equal(layers[f"{number}.columns"], torch.full((2, 3), number + 1.0))


def test_messages_travel_in_batches_of_the_pipelines_group(ranks):
    for batched, pipeline, alone, _ in ranks:
        # Layer 1 goes down and layer 2 up, each with four tensors that are not empty.
        assert batched == [pipeline] * 8
        assert len(pipeline) == 2 and not alone
