"""With recompute "auto", a rank recomputes only what it must to stay within a budget, and a step stays the same."""

import gc
import os
import random
import re
import sys
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.pipe import LayerSpec, PipelineModule

from ds_lgamp.config import ConfigError, read_block
from ds_lgamp.cost.budget import Decision
from ds_lgamp.fields import parse_quantity
from ds_lgamp.integrations.deepspeed.engine import budget as budgets
from ds_lgamp.integrations.deepspeed.explain.activations import measure_activations
from ds_lgamp.integrations.program_spec import budget_of
from ds_lgamp.integrations.user_script import failures_end_the_process
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.schedule.actions import Kind
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks, started_ranks
from tests.integrations.deepspeed.engine.test_offload_activations import keep_the_host_apart
from tests.integrations.deepspeed.engine.test_recompute import (
    ATTENDING,
    ATTENTION,
    Attention,
    engine,
    gradients_and_peak_of,
    gradients_of,
    mean_square,
    micro_batch,
)
from tests.integrations.deepspeed.linear import engine_of
from tests.integrations.deepspeed.plain.training import train_all_on_rank
from tests.runtime.assembly import gathered
from tests.slow import slow_except

BUDGETS = ("1.2 MB", "2 MB", "4 MB", "6 MB", "20 MB")
SCALARS = 8
"""Bytes of numbers that fake tensors save and real ones do not."""
STATE_BYTES = 5056
"""A state of torch's generator. The formula takes one for every stored input; equal ones are in fact one."""


def auto(kinds, pipeline_ranks, budget, **block):
    return engine(kinds, pipeline_ranks, recompute="auto", recompute_memory=budget, **block)


def recomputed(trained):
    """Returns how many forwards the next step recomputes on this rank."""
    return sum(action.kind is Kind.BACKWARD and action.recomputed for action in program_of(trained))


def program_of(trained):
    return trained.lgamp.program(trained.lgamp.own_spec)


def steps_within(budgets, pipeline_ranks):
    """Returns gradients and peak of a step with everything recomputed, and by budget also what it recomputes and what
    the formula says."""
    prepare_rank()
    full = engine(ATTENTION, pipeline_ranks)
    found = {"full": [gradients_and_peak_of(full) for _ in range(2)][1]}
    del full
    for budget in budgets:
        trained = auto(ATTENTION, pipeline_ranks, budget)
        first = recomputed(trained)
        gradients_of(trained)
        told, _ = trained.lgamp.budget._follow(program_of(trained))
        found[budget] = (*gradients_and_peak_of(trained), first, recomputed(trained), told.peak - told.weights)
        del trained
        gc.collect()
    return found


@pytest.mark.parametrize("pipeline_ranks", [1, 2])
def test_a_step_stays_within_any_budget_and_equal_to_the_bit(pipeline_ranks):
    for rank, found in enumerate(run_on_ranks(pipeline_ranks, steps_within, BUDGETS, pipeline_ranks)):
        expected, of_full = found.pop("full")
        again = [len(found) and found[budget][3] for budget in BUDGETS]
        assert all(more >= less for more, less in pairwise(again)) and again[0] > again[-1] == 0, again
        for budget, (gradients, peak, first, now, told) in found.items():
            assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items()), budget
            assert first == found[BUDGETS[0]][2] >= now, "the first batch recomputes everything"
            assert max(peak, told) <= parse_quantity("budget", budget, "bytes"), budget
            assert abs(peak - told) <= 0.01 * told + STATE_BYTES * first, (rank, budget, peak, told)
        assert found[BUDGETS[0]][1] < 1.2 * of_full < found[BUDGETS[-1]][1]


def too_little():
    """Returns what a rank says if its budget does not even hold what is recomputed."""
    prepare_rank()
    trained = auto(ATTENTION, 2, "500 kB")
    with pytest.raises(ConfigError) as refusal:
        gradients_of(trained)
    return str(refusal.value)


def test_a_budget_that_no_recomputation_meets_is_refused_on_all_ranks_with_the_number_that_would():
    first, second = run_on_ranks(2, too_little)
    assert first == second
    assert "which may take 500 kB of memory, but rank 0 needs 1.01 MB although it recomputes everything" in first


def test_a_cpu_needs_a_number_and_other_modes_take_none():
    with pytest.raises(ConfigError, match="a CPU has no memory of its own to fill; set ds_lgamp.recompute_memory"):
        run_budget_of({"recompute": "auto"})
    assert run_budget_of({"recompute": "auto", "recompute_memory": "60 GB"}) == 60 * 10**9
    with pytest.raises(ConfigError, match="recompute_memory is '60 GB', but recompute is 'full'; use 'auto'"):
        run_budget_of({"recompute_memory": "60 GB"})
    assert run_budget_of({}) is None


def run_budget_of(block):
    settings = read_block({"ds_lgamp": block})
    assert settings is not None
    return budget_of(settings, "cpu")


def keep_at_random(draw, limit, build, follow, size):
    """Stands for the decision. Returns any pairs of the rank, and any of those whose layers can recompute a part."""
    pairs = {action[1:3] for action in build(Decision()) if action.kind is Kind.BACKWARD and action.recomputed}
    kept = [pair for pair in sorted(pairs) if draw.random() < 0.5]
    offered = [pair for pair in kept if size.chunks[pair[0]].selective is not None]
    return Decision(frozenset(kept), frozenset(pair for pair in offered if draw.random() < 0.5))


ENGINES = [
    {"micro_batch_group": 2, "resident_chunks": 1},
    {"schedule": "1f1b", "layers_per_chunk": None},
    {"offload_activations": "cpu"},
    {"overlap_update": True, "defer_gathers": True},
]


def train_at_random(pipeline_ranks, kinds):
    """Trains engines that keep random pairs, others in every step. Returns whether gradients are those of engines that
    recompute everything, and how many pairs were kept, and kept in part."""
    prepare_rank()
    outcomes, pairs, in_part = [], 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "kept_within", partial(keep_at_random, random.Random(3)))
        keep_the_host_apart(patch)
        for block in ENGINES:
            full, kept = (make(kinds, pipeline_ranks, **block) for make in (engine, partial(auto, budget="1 GB")))
            for _ in range(3):
                expected, found = gradients_of(full), gradients_of(kept)
                kept.lgamp.budget._meter.has_grown = True
                outcomes.append(all(torch.equal(found[name], each) for name, each in expected.items()))
            pairs, in_part = pairs + len(kept.lgamp.own_spec.kept), in_part + len(kept.lgamp.own_spec.selective)
    return outcomes, pairs, in_part


@pytest.mark.parametrize(
    ("pipeline_ranks", "kinds"),
    slow_except([(2, ATTENDING)], [*product((1, 2), (ATTENTION, ATTENDING))], several=True),
)
def test_random_decisions_of_ranks_change_no_bit(pipeline_ranks, kinds):
    """Two data-parallel ranks decide alike here, and pipeline ranks for themselves. Layers draw."""
    for outcomes, pairs, in_part in run_on_ranks(2 * pipeline_ranks, train_at_random, pipeline_ranks, kinds):
        assert outcomes == [True] * 3 * len(ENGINES)
        assert pairs > len(ENGINES) and (in_part > 0) == (kinds is ATTENDING)


def run_out_of_memory(number):
    """Returns what a rank says if an allocation fails in a backward after so many batches."""
    prepare_rank()
    trained = auto(ATTENTION, 1, "6 MB")
    for _ in range(number):
        gradients_of(trained)
    return sentence_at(trained, Kind.BACKWARD, 0)


def sentence_at(trained, kind, chunk):
    """Returns what a rank says if an allocation fails in the first such action from this chunk on."""
    stock = Executor.execute.__globals__["_EXECUTE"][kind]

    def fail(executor, action):
        if action.chunk >= chunk:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        stock(executor, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Executor.execute.__globals__["_EXECUTE"], kind, fail)
        with pytest.raises(ActionError) as refusal:
            gradients_of(trained)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (0, "nothing was kept yet: use smaller micro-batches, a smaller micro_batch_group, or more ranks"),
        (1, "autograd kept what it saved of 7 forwards; set recompute_memory to '5.19 MB'"),
    ],
)
def test_a_device_without_memory_says_what_would_fit(number, advice):
    (sentence,) = run_on_ranks(1, run_out_of_memory, number)
    assert "OutOfMemoryError: CUDA out of memory" in sentence
    assert sentence.endswith(f"with ds_lgamp.recompute 'auto', {advice}")


def train_with_what_fits():
    """Returns, for allocations that fail before a chunk, the budget that the error names, and the peak within it."""
    prepare_rank()
    found = []
    for chunk in (1, 5):
        trained = auto(ATTENTION, 1, "6 MB")
        gradients_of(trained)
        named = sentence_at(trained, Kind.FORWARD, chunk).partition("set recompute_memory to ")[2].strip("'")
        trained = auto(ATTENTION, 1, named)
        gradients_of(trained)
        found.append((parse_quantity("budget", named, "bytes"), gradients_and_peak_of(trained)[1], recomputed(trained)))
        del trained
        gc.collect()
    return found


def test_what_fits_is_no_more_than_what_had_fitted_and_trains():
    """Nothing less than what recomputing everything takes, though, which would be refused."""
    ((early, late),) = run_on_ranks(1, train_with_what_fits)
    for budget, peak, _ in (early, late):
        assert peak <= budget
    assert early[0] < late[0] < 5.4e6 and early[2] > late[2] > 0, (early, late)


def measured_beside_explained():
    """Returns what the first batch has measured and what fake tensors tell, with hidden states that travel rounded."""
    prepare_rank()
    trained = auto(ATTENTION, 2, "1 GB", activation_dtype="bf16")
    gradients_of(trained)
    layers = [Attention() for _ in ATTENTION]
    module = SimpleNamespace(_layer_specs=layers, loss_fn=mean_square)
    spec, bounds = trained.lgamp.program_spec, range(len(layers) + 1)
    data, config = micro_batch(0), trained.lgamp.config
    return trained.lgamp.budget._size, measure_activations(
        module, layers, bounds, data, spec, trained.lgamp.settings, config
    )


def test_the_first_batch_measures_what_fake_tensors_tell():
    """Of a chunk that is kept, the forward counts a little more, because its repetition stops early."""
    for rank, (measured, told) in enumerate(run_on_ranks(2, measured_beside_explained)):
        assert (measured.inputs, measured.labels) == (told.inputs, told.labels)
        own = range(3 * rank, 3 * rank + 3)
        for chunk in own[: len(own) - rank]:
            found, right = measured.chunks[chunk], told.chunks[chunk]
            assert (found.result, found.sent, found.backward) == (right.result, right.sent, right.backward), chunk
            assert found.kept.backward == right.kept.backward
            assert abs(found.kept.saved - right.kept.saved) <= SCALARS, chunk
            assert found.forward == right.forward
            assert -SCALARS <= found.kept.forward - right.kept.forward <= right.result, chunk


def one_of_two_runs_out(folder):
    """Fails on the second pipeline rank alone. Both write what they say to a file."""
    rank = dist.get_rank()
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    prepare_rank()
    trained = auto(ATTENTION, 2, "4 MB")
    gradients_of(trained)

    def fail(executor, action):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.MonkeyPatch.context() as patch, failures_end_the_process():
        if rank == 1:
            patch.setitem(Executor.execute.__globals__["_EXECUTE"], Kind.BACKWARD, fail)
        gradients_of(trained)


def test_if_one_rank_runs_out_of_memory_all_end_and_name_it(tmp_path):
    with started_ranks(2, one_of_two_runs_out, tmp_path) as (ranks, _):
        for rank in ranks:
            rank.join(120)
        said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
        assert [rank.exitcode for rank in ranks] == [1, 1], said
    assert re.search(r"autograd kept what it saved of \d forwards; set recompute_memory to '3\.\d+ MB'", said[1]), said[
        1
    ]
    assert "rank 1" in said[0], said[0]


def longer_and_more():
    """Trains with longer samples after shorter ones, and with more and fewer micro-batches. Returns, for every batch,
    whether the gradients are those of an engine that recomputes everything, what chunk 1 keeps in bytes if it is kept,
    and how many forwards are recomputed."""
    prepare_rank()
    outcomes = []
    engines = [engine(ATTENTION, 1), auto(ATTENTION, 1, "9 MB")]
    for each in engines:
        each.reset_activation_shape()
        each.module.dynamic_shape = True
    for tokens, micro_batches in ((40, 3), (40, 3), (90, 3), (60, 3), (160, 3), (160, 3), (40, 5), (40, 2)):
        found = [gradients_with(each, tokens, micro_batches) for each in engines]
        assert found[0].keys() == found[1].keys()
        equal = all(torch.equal(found[1][name], each) for name, each in found[0].items())
        kept = engines[1].lgamp.budget._meter.chunks[1].kept.saved
        outcomes.append((equal, kept, recomputed(engines[1])))
    return outcomes


def gradients_with(trained, tokens, micro_batches):
    found, step = {}, trained.optimizer.step

    def recording_step():
        found.update(gathered(trained.optimizer.partition, lambda unit: unit.reduction.shard_gradient))
        step()

    trained.optimizer.step = recording_step
    trained.set_train_batch_size(2 * micro_batches)
    trained.reset_activation_shape()
    batch = [tuple(part[:, :tokens] for part in micro_batch(index)) for index in range(micro_batches)]
    trained.train_batch(iter(batch))
    trained.optimizer.step = step
    return found


def test_longer_inputs_are_recomputed_and_measured_and_other_numbers_of_micro_batches_decided_anew():
    (outcomes,) = run_on_ranks(1, longer_and_more)
    equal, kept, again = zip(*outcomes)
    assert all(equal)
    assert kept[0] == kept[1] < kept[2] == kept[3] < kept[4] == kept[5] == kept[6] == kept[7]
    assert again[0] == 0, "short samples all fit"
    assert again[5] > 0, "of long ones some do not"
    assert again[6] > again[5] > again[7], "more micro-batches of the largest size leave less room"


def longer_calls():
    """Calls an engine with longer samples after shorter ones. Returns, by length, what the first and the second chunk
    keep in bytes."""
    prepare_rank()
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    block = {"pipeline_ranks": 1, "chunks_per_rank": 2, "recompute": "auto", "recompute_memory": "1 GB"}
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "ds_lgamp": block}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    found = []
    for length in (8, 8, 16):
        tokens = torch.randint(64, (2, length))
        loss = trained(input_ids=tokens, labels=tokens).loss
        trained.backward(loss)
        trained.step()
        chunks = trained.lgamp.budget._meter.chunks
        found.append((chunks[0].kept.saved, chunks[1].kept.saved))
    return found


def test_longer_calls_are_measured_on_the_first_chunk_too():
    (found,) = run_on_ranks(1, longer_calls)
    (first, *_), again, longer = found
    assert again[0] == first and longer[0] > 1.8 * first and longer[1] > 1.8 * found[0][1]


def unfreezing():
    """Unfreezes weights above the lowest gain that trains. Returns what chunk 2 keeps in bytes after each batch, and
    how many forwards the next one keeps."""
    prepare_rank()
    layers = [LayerSpec(Scaled) for _ in range(6)]
    module, found = PipelineModule(layers, num_stages=1, loss_fn=mean_square), []
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("gain" in name)
    block = {"layers_per_chunk": 1, "recompute": "auto", "recompute_memory": "3 MB"}
    trained = engine_of(module, block, micro_batches=4, train_micro_batch_size_per_gpu=2)
    for number in range(4):
        if number == 2:
            module.requires_grad_(True)
        trained.train_batch(iter([(torch.randn(2, 100, 64), torch.randn(2, 100, 64)) for _ in range(4)]))
        own = trained.lgamp
        found.append((own.budget._meter.chunks[2].kept.saved, len(own.own_spec.kept)))
    return found


class Scaled(torch.nn.Module):
    """A layer whose weights need more saved tensors than its gain."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(64))

    def forward(self, hidden):
        return hidden + self.outer(torch.relu(self.inner(hidden))) * self.gain


def test_after_a_thaw_all_is_measured_and_decided_anew():
    (found,) = run_on_ranks(1, unfreezing)
    (frozen, many), again, (thawed, fewer), after = found
    assert again == (frozen, many) and after == (thawed, fewer)
    assert thawed > frozen and fewer < many


def complaints():
    """Returns what refuses modules whose layers exchange data, or are compiled."""
    prepare_rank()
    trained = engine(ATTENTION, 1)
    found = [budgets.why_not_alone(trained.module, trained.module)]
    trained.module.forward_funcs[1].norm = torch.nn.SyncBatchNorm(4)
    found.append(budgets.why_not_alone(trained.module, trained.module))
    del trained.module.forward_funcs[1].norm
    trained.module.forward_funcs[1].compile(backend="eager")
    return [*found, budgets.why_not_alone(trained.module, trained.module)]


def test_ranks_decide_alone_only_where_no_layer_needs_others_and_all_can_be_measured():
    ((none, shared, compiled),) = run_on_ranks(1, complaints)
    assert none is None
    assert shared == (
        "ds_lgamp.recompute is 'auto', but ranks share a SyncBatchNorm and must recompute alike; use 'full' or 'none'"
    )
    assert "a layer is compiled, which cannot be measured" in compiled


def test_scripts_that_call_the_engine_train_to_the_same_bits():
    """``engine(batch)`` with the loss and with all outputs, on one pipeline rank and on two. The decision is random."""
    names = product(("loss", "all"), (1, 2))
    blocks = [{"pipeline_ranks": ranks, "chunks_per_rank": 2, "outputs": outputs} for outputs, ranks in names]
    for courses, kept in run_on_ranks(2, courses_at_random, blocks):
        assert all(number > 0 for number in kept), kept
        for expected, found in zip(courses[::2], courses[1::2]):
            assert found.losses == expected.losses
            for step, gradients in enumerate(found.gradients):
                assert all(torch.equal(each, expected.gradients[step][name]) for name, each in gradients.items())


def courses_at_random(blocks):
    """Returns for every block the course of a training that recomputes everything and of one that keeps random pairs,
    and how many pairs each of the latter kept."""
    kept, draw = [], random.Random(11)

    def decide(*arguments):
        kept.append(keep_at_random(draw, *arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "kept_within", decide)
        within = {"recompute": "auto", "recompute_memory": "1 GB"}
        both = [{**block, **more} for block in blocks for more in ({}, within)]
        courses = train_all_on_rank([("GPT-2 with dropout", 1, block) for block in both])
    return courses, [len(decision.kept) for decision in kept]
