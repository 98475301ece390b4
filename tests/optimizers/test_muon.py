"""Muon on shards takes the steps of torch.optim.Muon on whole matrices. Every matrix travels once each way."""

import gc
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.cost.muon import Iteration, Matrix, exchange_bytes, step_memory
from ds_lgamp.optimizers.muon import METHODS, Muon, NewtonSchulz
from ds_lgamp.partition.unit import parts_of
from ds_lgamp.runtime.measure import PeakMemory, live_tensors
from testing.prompt_gloo import prompt_exchanges
from testing.ranks import run_on_ranks
from tests.optimizers.sharded import (
    SHAPES,
    SLICED,
    STEPS,
    Sharded,
    gradients,
    largest_difference,
    places_of_four,
    trained,
    weights,
)

MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2 and name != "0.embedding"]
JOINT = "0.joint"
GROUP_OF = {name: 2 if name == JOINT else int(name not in MATRICES) for name in SHAPES}
OF_MATRICES = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
OF_OTHERS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.05}
VARIANTS = {
    "torch's defaults": {},
    "as large as AdamW's steps": {"adjust_lr_fn": "match_rms_adamw"},
    "without nesterov": {"nesterov": False, "ns_steps": 3},
}


def muon(blocks=1, method="standard", **options):
    matrices = {"params": [], "use_muon": True, "ns_method": method, **OF_MATRICES, **options}
    others = {"params": [], "use_muon": False, **OF_OTHERS, "fused": True}
    return Muon([matrices, others, {**matrices, "params": [], "blocks": blocks}])


def train(optimizer, *place, given=gradients):
    return trained(optimizer, GROUP_OF, *place, given=given)


@cache
def reference(blocks=1, given=gradients, **options):
    """Trains whole tensors with torch's optimizers. A joint matrix is ``blocks`` matrices for them."""
    whole = {name: Parameter(tensor) for name, tensor in weights().items()}
    parts = {name: [Parameter(part.detach().clone()) for part in whole[name].chunk(blocks)] for name in [JOINT]}
    matrices = [whole[name] for name in MATRICES if name != JOINT] + parts[JOINT]
    optimizers = [
        torch.optim.Muon(matrices, **OF_MATRICES, **options),
        torch.optim.AdamW([whole[name] for name in SHAPES if name not in MATRICES], **OF_OTHERS, foreach=False),
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for name, gradient in given(step).items():
            whole[name].grad = gradient
            for part, own in zip(parts.get(name, ()), gradient.chunk(blocks)):
                part.grad = own.clone()
        for optimizer in optimizers:
            optimizer.step()
    whole[JOINT] = torch.cat(parts[JOINT])
    return {name: tensor.detach() for name, tensor in whole.items()}


def run_all(stages):
    """Returns the largest difference from torch's weights and the collectives of a step, by stage and variant."""
    results = {}
    for stage in stages:
        for variant, options in VARIANTS.items() if stage == 3 else [("torch's defaults", {})]:
            sharded, own, log = train(muon(**options), stage, dist.group.WORLD)
            results[stage, variant] = largest_difference(sharded, own, reference(**options)), log
    sharded, own, _ = train(muon(blocks=3), stages[-1], dist.group.WORLD)
    results["three blocks"] = largest_difference(sharded, own, reference(blocks=3)), None
    results["gram"] = gram_on_shards_and_whole(stages[-1]), None
    return results


def gram_on_shards_and_whole(stage):
    """Returns the largest difference between shards and whole tensors, both of the gram method."""
    sharded, own, _ = train(muon(method="gram"), stage, dist.group.WORLD)
    return largest_difference(sharded, own, train(muon(method="gram"), 0, dist.group.WORLD)[1])


def matrices_of(sharded, blocks=1):
    """Returns the matrices of every unit, as ``cost`` knows them, in the order of the optimizer's groups."""
    units = [[part for part in parts_of(unit) if part.name in MATRICES] for unit in sharded.partition.units]
    return [
        [
            Matrix(*part.shape, part.in_flat.start, part.unit.storage.end, blocks if part.name == JOINT else 1)
            for part in sorted(parts, key=lambda part: GROUP_OF[part.name])
        ]
        for parts in units
    ]


def predicted(sharded, stage):
    """Returns the bytes that each rank sends, by the formula of ``cost``."""
    # The joint matrix, which is the last of the first unit, has a group of its own.
    first, second = matrices_of(sharded)
    return exchange_bytes([*first[:-1], *second, first[-1]], stage, dist.get_world_size())


def run_all_and_count(stages):
    results = run_all(stages)
    sharded = Sharded(muon(), GROUP_OF, 3, dist.group.WORLD)
    return results, {stage: predicted(sharded, stage)[dist.get_rank()] for stage in stages}


ITERATIONS = {
    "standard": Iteration("standard", leaving=2, returning=2),
    "gram": Iteration("gram"),
    "no nesterov": Iteration("gram", nesterov=False),
    "four steps": Iteration("gram", steps=4),
    "one step": Iteration("gram", steps=1),
}


def memory_of_steps(stage, iteration, blocks):
    """Returns the most bytes that a step takes beside what lives before it on any rank, and what the formula says."""
    options = {"ns_steps": iteration.steps, "nesterov": iteration.nesterov, "blocks": blocks}
    matrices = {"params": [], "use_muon": True, "ns_method": iteration.method, **OF_MATRICES, **options}
    others = {"params": [], "use_muon": False, **OF_OTHERS, "fused": True}
    shapes = {name: int(name not in MATRICES) for name in SHAPES}
    sharded = Sharded(Muon([matrices, others]), shapes, stage, dist.group.WORLD)
    with prompt_exchanges():
        sharded.step(gradients(0))
        gc.collect()
        with PeakMemory(live_tensors()) as memory:
            before = memory.live()
            sharded.optimizer.step()
    on_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(on_ranks, memory.peak - before)
    units = [[matrix._replace(blocks=blocks) for matrix in unit] for unit in matrices_of(sharded)]
    return max(on_ranks), step_memory(units, stage, dist.get_world_size(), iteration)


def measure_memory():
    cases = [(stage, name, 1) for stage in (0, 3) for name in ITERATIONS] + [(1, "standard", 8)]
    return {(stage, name, blocks): memory_of_steps(stage, ITERATIONS[name], blocks) for stage, name, blocks in cases}


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_takes_the_memory_that_the_formula_says(ranks):
    for case, (taken, told) in run_on_ranks(ranks, measure_memory)[0].items():
        assert taken == told, case


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_shards_step_as_whole_matrices_do(ranks):
    for results, sent in run_on_ranks(ranks, run_all_and_count, (0, 1, 3)):
        for case, (difference, log) in results.items():
            assert difference < 1e-6, case
            if log is not None and ranks > 1:
                kinds = ["all_to_all"] * 2 if case[0] > 0 else ["all_gather"]
                assert [kind for kind, _ in log] == kinds, "there and back, or results alone"
                assert sum(amount for _, amount in log) == sent[case[0]], case
            elif log is not None:
                assert log == []


def run_sliced():
    results = {}
    for place, where in places_of_four().items():
        sharded, own, log = train(muon(), *where)
        results[place] = largest_difference(sharded, own, reference()), [kind for kind, _ in log]
    return results


@pytest.fixture(scope="module")
def four_ranks():
    return run_on_ranks(4, run_sliced)


def test_slices_are_made_orthogonal_together(four_ranks):
    assert {name for name in SLICED if name in MATRICES} == {"0.tall", "0.joint", "1.wide"}
    for results in four_ranks:
        of_slices = ["all_to_all", "all_to_all"]
        assert results[0][0] < 1e-6 and results[0][1] == [*of_slices, "all_gather"]
        assert results[2][0] < 1e-6 and results[2][1] == ["all_to_all", *of_slices, "all_to_all"]


@pytest.mark.parametrize("replicated", [False, True])
def test_shards_of_two_nodes_are_put_together_in_their_order(four_ranks, replicated):
    for results in four_ranks:
        difference, kinds = results["nodes", replicated]
        assert difference < 1e-6 and kinds == ["all_to_all", "all_to_all"]


def test_what_is_frozen_need_be_no_matrix():
    convolution = Parameter(torch.zeros(2, 3, 4, 4), requires_grad=False)
    assert Muon([{"params": [Parameter(torch.eye(4)), convolution], "use_muon": True}])
    with pytest.raises(ValueError, match="holds a parameter of shape"):
        Muon([{"params": [convolution.requires_grad_()], "use_muon": True}])


SIZES = [(16, 40), (40, 16), (24, 24), (1, 8)]


def matrix(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_the_standard_method_is_torchs_to_the_bit(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    own = NewtonSchulz()(matrix(shape))
    assert torch.equal(own, _zeropower_via_newtonschulz(matrix(shape), NewtonSchulz().coefficients, 5, 1e-7))


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_the_gram_method_is_deepspeeds(shape):
    from deepspeed.runtime.zero.muon import original_muon

    deepspeeds = original_muon.zeropower_via_gram_newtonschulz
    expected = getattr(deepspeeds, "_torchdynamo_orig_callable", deepspeeds)(matrix(shape), 5).float()
    torch.testing.assert_close(NewtonSchulz("gram")(matrix(shape)).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_singular_values_become_about_one(method, shape):
    values = torch.linalg.svdvals(NewtonSchulz(method)(matrix(shape)).float())
    assert 0.6 < values.min() and values.max() < 1.3


@pytest.mark.parametrize("method", METHODS)
def test_the_type_that_travels_loses_nothing(method):
    iteration = NewtonSchulz(method)
    for shape in SIZES:
        sent = matrix(shape).to(iteration.input_dtype)
        result = iteration(sent)
        assert torch.equal(result, iteration(matrix(shape)))
        assert result.dtype == iteration.output_dtype(sent.device)


def test_zero_stays_zero():
    for method in METHODS:
        assert not NewtonSchulz(method)(torch.zeros(4, 6)).any()
