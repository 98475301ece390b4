"""Inputs of chunks on the host: bytes over the bus. tests/runtime/test_equivalence.py compares their gradients."""

import torch

from ds_lgamp.partition.bus import Bus
from ds_lgamp.runtime.batch import BatchState
from ds_lgamp.runtime.chunk import as_leaves
from ds_lgamp.runtime.graph import StoredInputs
from ds_lgamp.runtime.messages import MessageSpec, allocate
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks
from tests.runtime.assembly import assemble, build_grid
from tests.runtime.models import WIDTH, build_model, micro_batch

SPEC = ProgramSpec((0,) * 4, "layered", 4, 4, 2, stores_inputs=True)


def train():
    """Returns the bytes loaded and stored, what is left of inputs, and how many inputs left."""
    model = build_model(8, False)
    bounds = [0, 2, 4, 6, len(model.layers)]
    assembled = assemble(build_grid(1, 1), SPEC, model, bounds, lambda: None)
    program = build_rank_program(SPEC, 0)
    stored = assembled.executor._stored_inputs
    for step in range(2):
        with assembled.executor.run_batch(BatchState(4, lambda index, step=step: micro_batch(step, index))):
            assembled.executor.run(program)
    leaving = sum(action.kind is Kind.STORE_INPUT for action in program)
    return stored._bus.bytes_loaded, stored._bus.bytes_stored, bool(stored._under_way or stored._away), leaving


def test_every_input_crosses_the_bus_once_each_way_in_a_step():
    ((loaded, stored, left, leaving),) = run_on_ranks(1, train)
    tokens = micro_batch(0, 0)[0].numel()
    # Chunks behind the mask also get the view of a parameter.
    one = tokens * WIDTH * torch.float32.itemsize
    assert loaded == stored and not left
    assert 2 * leaving * one <= stored <= 2 * leaving * (one + torch.float32.itemsize)


def test_a_mask_that_came_in_the_same_message_does_not_keep_the_message():
    given = (torch.randn(4, WIDTH), torch.arange(4) > 1)
    _, members = allocate(MessageSpec.of(given), torch.device("cpu"))
    for member, tensor in zip(members, given):
        member.copy_(tensor)
    hidden, mask = beginning = as_leaves(tuple(members))
    message = members[0].untyped_storage().data_ptr()
    stored = StoredInputs(Bus(torch.device("cpu")))
    stored.store(0, 0, beginning)
    stored.wait_store(0, 0)
    assert message not in (hidden.untyped_storage().data_ptr(), mask.untyped_storage().data_ptr())
    stored.load(0, 0)
    stored.wait_load(0, 0)
    assert torch.equal(hidden, given[0]) and torch.equal(mask, given[1])


def test_shorter_inputs_use_the_memory_of_longer_ones_again():
    stored, sizes = StoredInputs(bus := Bus(torch.device("cpu"))), []
    for length in (100, 70, 20, 99, 1):
        given = torch.randn(length, WIDTH)
        (hidden,) = beginning = as_leaves((given,))
        stored.store(0, 0, beginning)
        stored.wait_store(0, 0)
        stored.load(0, 0)
        stored.wait_load(0, 0)
        assert torch.equal(hidden, given)
        sizes.append(bus.room.bytes)
    assert len(set(sizes)) == 1
