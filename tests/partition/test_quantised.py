"""Weights and gradients travel rounded, as by hand, to the bit, on real ranks."""

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.cost.units import Travel, packed_bytes
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.quantised import as_stored, pack, unpack
from ds_lgamp.partition.unit import Unit
from ds_lgamp.runtime.measure import CollectiveCounter
from testing.ranks import run_on_ranks
from tests.partition.rounding import LARGEST, rounded

SHAPES = {"matrix": (7, 11), "vector": (33,), "scalar": (1,), "zeros": (40,)}
"""With odd numbers of elements, so that parameters end inside a block and parts hold several of them."""
DTYPES = (torch.float32, torch.bfloat16)


def values(seed, dtype=torch.float32):
    """Returns values of every parameter, of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    scales = {"matrix": 0.02, "vector": 30.0, "scalar": 1e-5, "zeros": 0.0}
    return {name: (value * scales[name]).to(dtype) for name, value in made.items()}


def unit_of(stage, travel, dtype=torch.float32, trains=True, gradient_dtype=None):
    parameters = [
        UnitParameter(name, torch.nn.Parameter(value, requires_grad=trains), 0)
        for name, value in values(0, dtype).items()
    ]
    policy = ZeroPolicy(dist.group.WORLD, stage, gradient_dtype=gradient_dtype, travel=travel)
    unit = Unit("chunk 0", parameters, policy)
    unit.storage.release()
    return unit


def parameters_of(unit, who, exact=False):
    with CollectiveCounter() as counter:
        unit.storage.hold(who, exact)
        unit.storage.finish_gather()
    found = {entry.name: entry.parameter.detach().clone() for entry in unit.storage.parameters}
    unit.storage.drop(who)
    return found, [sent for _, sent in counter.log]


def weights_are_rounded_for_compute():
    for dtype in DTYPES:
        for trains, travel in ((True, Travel(weights=8)), (False, Travel(frozen=8)), (True, Travel(frozen=8))):
            unit, bits = unit_of(3, travel, dtype, trains), 8 if trains == (travel.weights is not None) else None
            part, others = unit.storage.shard.numel(), dist.get_world_size() - 1
            found, sent = parameters_of(unit, "chunk")
            for name, value in values(0, dtype).items():
                assert torch.equal(found[name], rounded(value, bits)), (dtype, trains, name)
            assert sent == [others * (packed_bytes(part, bits) if bits else part * dtype.itemsize)]
            found, sent = parameters_of(unit, "block", exact=True)
            assert all(torch.equal(found[name], value) for name, value in values(0, dtype).items())
            assert sent == [others * part * dtype.itemsize]


def gradients_are_rounded_once():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for stage in (1, 2, 3):
            for bits in (8, 4):
                unit = unit_of(stage, Travel(gradients=bits), dtype, gradient_dtype=torch.float32)
                unit.storage.hold("chunk")
                unit.storage.finish_gather()
                unit.reduction.begin_accumulation()
                for entry in unit.storage.parameters:
                    entry.parameter.grad += values(1 + rank)[entry.name]
                with CollectiveCounter() as counter:
                    unit.reduction.start()
                    unit.reduction.finish()
                assert counter.log == [("all_to_all", (ranks - 1) * packed_bytes(unit.storage.shard.numel(), bits))]
                expected = torch.zeros(unit.storage.shard.numel() * ranks)
                for entry, offset in zip(unit.storage.parameters, unit.storage.offsets):
                    for other in range(ranks):
                        gradient = rounded(values(1 + other)[entry.name], bits).reshape(-1)
                        expected[offset : offset + gradient.numel()] += gradient
                own = expected.view(ranks, -1)[rank]
                assert torch.equal(unit.reduction.shard_gradient, own), (dtype, stage, bits)
                assert unit.reduction.shard_gradient.dtype == torch.float32


@pytest.mark.parametrize("ranks", (2, 4))
def test_compute_gets_rounded_weights_and_everybody_else_exact_ones(ranks):
    run_on_ranks(ranks, weights_are_rounded_for_compute)


@pytest.mark.parametrize("ranks", (2, 4))
def test_each_rank_rounds_its_gradient_once_and_fp32_sums_them(ranks):
    run_on_ranks(ranks, gradients_are_rounded_once)


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("parts", (1, 3, 20))
def test_what_is_unpacked_is_rounded_and_rounds_to_itself(parts, bits):
    given = torch.randn(parts, 96) * torch.logspace(-30, 30, parts)[:, None]
    packed, found = torch.empty(parts, packed_bytes(96, bits), dtype=torch.uint8), torch.empty(parts, 96)
    for _ in range(2):
        pack(given, bits, packed)
        unpack(packed, bits, found)
        assert torch.equal(found, rounded(given, bits))
        given = found.clone()


@pytest.mark.parametrize("bad", (torch.inf, -torch.inf, torch.nan))
@pytest.mark.parametrize("bits", (8, 4))
def test_what_is_not_finite_stays_so_and_touches_its_block_alone(bits, bad):
    given = torch.full((1, 96), 0.5) * LARGEST[bits]
    given[0, 40] = bad
    packed, found = torch.empty(1, packed_bytes(96, bits), dtype=torch.uint8), torch.empty(1, 96)
    pack(given, bits, packed)
    unpack(packed, bits, found)
    assert not found[0, 40].isfinite() and torch.equal(found[0, :32], given[0, :32])
    assert torch.equal(found[0, 64:], given[0, 64:])


def test_layers_in_torchscript_are_no_quantised_ones():
    layer = torch.jit.script(torch.nn.Linear(2, 2))
    as_stored(layer)
    assert layer.weight.dtype == torch.float32
