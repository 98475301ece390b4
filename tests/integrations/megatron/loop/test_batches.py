"""A ``forward_backward_func`` does all that Megatron-core's loop, its users and its own extensions ask of it."""

import gc
import weakref
from argparse import Namespace
from collections import Counter
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_lgamp.integrations.megatron.loop.batch import Batch
from ds_lgamp.integrations.megatron.loop.forward_backward import DistributedData
from ds_lgamp.runtime.batch import ActionError
from ds_lgamp.runtime.executor import Executor
from ds_lgamp.schedule.spec import SENDS_IN_FLIGHT
from ds_lgamp.watch.this_rank import this_rank
from testing.ranks import run_on_ranks
from tests.integrations.megatron.core_models import SEQUENCE
from tests.integrations.megatron.training_loop import SEQUENCES, Place, Training, prepare_process

MICRO_BATCHES, CHUNKS = 4, 4
"""Micro-batches per batch, and chunks of each of two ranks."""


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(2, ask_everything, before_init=prepare_process)


def ask_everything():
    """Asks this rank all questions. Returns the answers by question."""
    training = Training(Place(2, CHUNKS, "layered", tied=False))
    return {question.__name__: question(training) for question in QUESTIONS}


def gradient_norm(training):
    """Returns the squared norm of this rank's gradients in one batch."""
    for model in training.models:
        model.zero_grad_buffer()
    training.run_batch(0)
    return sum(float(parameter.main_grad.norm() ** 2) for model in training.models for parameter in model.parameters())


def norms_of_scaled_gradients(training):
    stock = training.config.grad_scale_func
    training.config.grad_scale_func = lambda loss: loss * torch.tensor([8.0])
    scaled = gradient_norm(training)
    training.config.grad_scale_func = stock
    return gradient_norm(training), scaled


def losses_of_training_and_evaluation(training):
    loss = training.run_batch(0)
    with torch.no_grad():
        return loss, training.run_batch(0, forward_only=True)


@torch.no_grad()
def losses_of_short_sequences_between_long_ones(training):
    def shortened(batches):
        return (tokens[:, : SEQUENCE // 2 + 1] for tokens in batches)

    call = training.call(0)
    shorter = {"data_iterator": list(map(shortened, call["data_iterator"])), "seq_length": SEQUENCE // 2}
    before = training.run_batch(0, forward_only=True)
    between = training.mean_of(training.forward_backward(**call | shorter, forward_only=True))
    return before, between, training.run_batch(0, forward_only=True)


@torch.no_grad()
def outputs_without_a_loss(training):
    def forward_step(iterator, model):
        output, _ = training.forward_step(iterator, model, [])
        return output, None

    call = training.call(0) | {"forward_step_func": forward_step}
    return [tuple(output.shape) for output in training.forward_backward(**call, forward_only=True)]


@torch.no_grad()
def data_that_is_no_loss(training):
    return [tuple(shape) for shape in training.forward_backward(**collecting(training), forward_only=True)]


@torch.no_grad()
def outputs_alive_after_their_data_were_collected(training):
    outputs, alive = [], []

    def forward_step(iterator, model):
        alive.append(sum(not storage.expired() for storage in outputs))
        output, loss = training.forward_step(iterator, model, [])
        if model is training.models[-1]:
            outputs.append(StorageWeakRef(output.untyped_storage()))
        return output, loss

    training.forward_backward(**collecting(training) | {"forward_step_func": forward_step}, forward_only=True)
    return max(alive)


def collecting(training):
    return training.call(0) | {"collect_non_loss_data": True}


def batches_and_executors_alive(training):
    """A batch frees its memory without the garbage collector, and reuses the executor of earlier batches."""
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            training.run_batch(0, forward_only=True)
        training.run_batch(0)
        return [sum(type(found) is kind for found in gc.get_objects()) for kind in (Batch, Executor)]
    finally:
        gc.enable()


def calls_that_finalize(training):
    calls = []

    def finalize(models, tokens, pg_collection, force_all_reduce):
        # Releases from 0.18 on sum tokens of experts over the last of these groups.
        sizes = pg_collection.pp.size(), pg_collection.tp_dp_cp.size()
        calls.append((models == training.models, tokens, *sizes, force_all_reduce))

    stock, training.config.finalize_model_grads_func = training.config.finalize_model_grads_func, finalize
    training.run_batch(0, force_all_reduce=True)
    training.config.finalize_model_grads_func = stock
    return calls


def first_micro_batches(training):
    """Returns how often a chunk hears that a micro-batch is the first: in training, and in two steps of evaluation."""
    told = Counter()
    for number, model in enumerate(training.models):
        model.set_is_first_microbatch = partial(told.update, [number])
    counts = []
    for options in (
        {},
        {"forward_only": True, "first_val_step": True},
        {"forward_only": True, "first_val_step": False},
    ):
        told.clear()
        with torch.set_grad_enabled(not options):
            training.run_batch(0, **options)
        counts.append([told[number] for number in range(CHUNKS)])
    for model in training.models:
        del model.set_is_first_microbatch
    return counts


class Timers(Counter):
    """Counts how often each timer was started and stopped."""

    def __call__(self, name, log_level=None):
        self.name = name
        return self

    def start(self, barrier=False):
        self[self.name, "start"] += 1

    def stop(self):
        self[self.name, "stop"] += 1


def timers(training):
    training.config.timers = counted = Timers()
    training.run_batch(0)
    training.config.timers = None
    names = {name for name, _ in counted}
    assert all(counted[name, "start"] == counted[name, "stop"] for name in names)
    return {name: counted[name, "start"] for name in names}


def sent_outputs_alive(training):
    """Returns how many outputs the rank sent, and how many are alive when its first backward pass begins."""
    outputs, alive = [], []

    def forward_step(iterator, model):
        output, loss = training.forward_step(iterator, model, [])
        if output.dim() == 3:  # not the loss
            outputs.append(StorageWeakRef(output.untyped_storage()))
            output.register_hook(lambda _: alive.append(sum(not storage.expired() for storage in outputs)))
        return output, loss

    training.forward_backward(**training.call(0) | {"forward_step_func": forward_step})
    return len(outputs), alive[0]


def backward_passes_that_synchronise(training):
    """Returns every backward pass and whether it ran inside the ``no_sync_func``. One function serves all chunks."""
    inside, passes = [0], []

    @contextmanager
    def no_sync():
        inside[0] += 1
        yield
        inside[0] -= 1

    def forward_step(iterator, model):
        output, loss = training.forward_step(iterator, model, [])
        chunk = training.models.index(model)
        output.register_hook(lambda _: passes.append((chunk, inside[0])))
        return output, loss

    training.config.no_sync_func = no_sync
    training.forward_backward(**training.call(0) | {"forward_step_func": forward_step})
    training.config.no_sync_func = None
    assert inside == [0]
    return passes


def chunks_that_a_grad_sync_func_reduces(training):
    """Returns the chunks that are reduced in a batch without a ``no_sync_func``, and in one with it."""
    reduced, counts = [], []
    training.config.grad_sync_func = [partial(lambda own, _: reduced.append(own), own) for own in range(CHUNKS)]
    for no_sync in (None, nullcontext):
        training.config.no_sync_func = no_sync
        training.run_batch(0)
        counts.append(list(reduced))
        reduced.clear()
    training.config.grad_sync_func = training.config.no_sync_func = None
    return counts


def norms_with_the_heads_gradient_deferred(training):
    """Megatron-core may defer the gradient of the output layer's weight to the end of a batch."""
    from megatron.core.pipeline_parallel import schedules

    def drain(config, inputs, gradients, weight, tp_group):
        assert len(inputs) == len(gradients) == MICRO_BATCHES
        for hidden, gradient in zip(inputs, gradients):
            weight.main_grad += gradient.flatten(end_dim=1).T @ hidden.flatten(end_dim=1)

    at_once = gradient_norm(training)
    last = training.models[-1].module
    if last.post_process:
        # A model that was built with the setting has these attributes. Its other layers would need Transformer Engine.
        deferring = copy(training.config)
        deferring.defer_embedding_wgrad_compute = True
        last.output_layer.gradient_accumulation_fusion = True
        training.models[0].config = last.output_layer.config = deferring
        last.embedding_activation_buffer = last.output_layer.embedding_activation_buffer = []
        last.grad_output_buffer = last.output_layer.grad_output_buffer = []
    # Replaces the kernel that sums, because it needs CUDA.
    stock, schedules.drain_embedding_wgrad_compute = schedules.drain_embedding_wgrad_compute, drain
    deferred = gradient_norm(training)
    schedules.drain_embedding_wgrad_compute = stock
    return at_once, deferred


def odd_evaluation_and_what_follows_a_failure(_training):
    """Comes last, because another model replaces the first."""

    def fail(iterator, model):
        raise ArithmeticError("trouble")

    training = Training(Place(2, 2, "interleaved_1f1b"))
    call = training.call(0) | {"num_microbatches": 3}
    with torch.no_grad():
        reports = training.forward_backward(**call, forward_only=True)
    failures: list[str] = []
    if dist.get_rank() == 1:
        # The first action of rank 1 would wait for a message that never comes.
        return len(reports), failures, this_rank.whereabouts.batch
    for _ in range(2):
        with pytest.raises(ActionError) as failure:
            training.forward_backward(**training.call(0) | {"forward_step_func": fail})
        failures.append(str(failure.value))
    return len(reports), failures, this_rank.whereabouts.batch


QUESTIONS = [
    norms_of_scaled_gradients,
    losses_of_training_and_evaluation,
    losses_of_short_sequences_between_long_ones,
    outputs_without_a_loss,
    data_that_is_no_loss,
    outputs_alive_after_their_data_were_collected,
    batches_and_executors_alive,
    calls_that_finalize,
    first_micro_batches,
    timers,
    sent_outputs_alive,
    backward_passes_that_synchronise,
    chunks_that_a_grad_sync_func_reduces,
    norms_with_the_heads_gradient_deferred,
    odd_evaluation_and_what_follows_a_failure,
]


def test_gradients_are_those_of_the_scaled_loss(ranks):
    for found in ranks:
        plain, scaled = found["norms_of_scaled_gradients"]
        assert scaled == pytest.approx(64 * plain, rel=1e-5)


def test_evaluation_has_the_losses_of_training(ranks):
    for found in ranks:
        loss, evaluated = found["losses_of_training_and_evaluation"]
        assert evaluated == loss


def test_sequences_may_have_another_length_in_another_batch(ranks):
    for found in ranks:
        before, between, after = found["losses_of_short_sequences_between_long_ones"]
        assert before == after != between


@pytest.mark.parametrize("question", ["outputs_without_a_loss", "data_that_is_no_loss"])
def test_the_last_rank_returns_what_the_loss_function_makes_of_each_micro_batch(ranks, question):
    first, last = ranks
    assert first[question] == []
    assert last[question] == [(SEQUENCES, SEQUENCE)] * MICRO_BATCHES


def test_of_evaluation_the_last_rank_keeps_what_was_collected(ranks):
    assert ranks[1]["outputs_alive_after_their_data_were_collected"] == 0


def test_nothing_of_a_batch_waits_for_the_garbage_collector(ranks):
    for found in ranks:
        assert found["batches_and_executors_alive"] == [0, 1]


def test_gradients_are_finalized_once_a_batch(ranks):
    for found in ranks:
        assert found["calls_that_finalize"] == [(True, None, 2, 1, True)]


def test_a_chunk_hears_of_its_first_micro_batch_and_in_evaluation_only_in_the_first_step(ranks):
    for found in ranks:
        assert found["first_micro_batches"] == [[1] * CHUNKS, [1] * CHUNKS, [0] * CHUNKS]


def test_timers_measure_passes_and_receives(ranks):
    passes, ends = CHUNKS * MICRO_BATCHES, (CHUNKS - 1) * MICRO_BATCHES
    for rank, found in enumerate(ranks):
        expected = {
            "forward-backward": 1,
            "forward-compute": passes,
            "backward-compute": passes,
            "forward-recv": passes if rank else ends,
            "backward-recv": ends if rank else passes,
        }
        assert expected.items() <= found["timers"].items()


def test_outputs_that_were_sent_are_deallocated(ranks):
    for found in ranks:
        outputs, alive = found["sent_outputs_alive"]
        assert outputs >= (CHUNKS - 1) * MICRO_BATCHES
        assert alive <= SENDS_IN_FLIGHT


def test_evaluation_takes_any_number_of_micro_batches_whatever_the_schedule(ranks):
    assert [found["odd_evaluation_and_what_follows_a_failure"][0] for found in ranks] == [0, 3]


def test_no_batch_follows_one_that_failed(ranks):
    _, (first, second), number = ranks[0]["odd_evaluation_and_what_follows_a_failure"]
    assert f"rank 0 (pipeline rank 0) failed at F0.0 of batch {number - 1}: ArithmeticError: trouble" in first
    assert second == "an earlier batch failed, and its communication cannot be undone; restart the run"


def test_only_the_last_backward_pass_of_a_chunk_synchronises_gradients(ranks):
    inside_but_last = [1] * (MICRO_BATCHES - 1) + [0]
    expected = [(chunk, inside) for chunk in reversed(range(CHUNKS)) for inside in inside_but_last]
    for found in ranks:
        assert found["backward_passes_that_synchronise"] == expected


def test_a_grad_sync_func_reduces_each_chunk_once_where_no_hook_does(ranks):
    for found in ranks:
        assert found["chunks_that_a_grad_sync_func_reduces"] == [list(reversed(range(CHUNKS))), []]


def test_a_deferred_gradient_of_the_output_layer_is_finished_before_gradients_are_finalized(ranks):
    for found in ranks:
        at_once, deferred = found["norms_with_the_heads_gradient_deferred"]
        assert deferred == pytest.approx(at_once, rel=1e-5)


def test_between_batches_no_model_is_kept_alive():
    models, data = [torch.nn.Linear(2, 2)], DistributedData()
    alive = weakref.ref(models[0])
    syncs = {"param_sync_func": models[0].forward, "no_sync_func": nullcontext, "grad_sync_func": None}
    data.begin(Namespace(chunks=[0], models=models, backward_passes=1, config=Namespace(**syncs)))
    del models, syncs
    gc.collect()
    assert alive() is not None
    data.end()
    data.forget()
    gc.collect()
    assert alive() is None
