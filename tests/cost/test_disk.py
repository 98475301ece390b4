"""What offloading to a disk takes there, leaves on the host and moves, calculated by hand."""

import pytest

from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.cost.memory import rank_memory
from ds_lgamp.cost.offload import DiskUse, OnDisk, disk_use, host_beside_disk
from ds_lgamp.cost.units import ElementBytes, Sharding, UnitSize
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import DISK_BLOCK, PIECE, PIECES, Offload, ProgramSpec

BF16, FP32 = ElementBytes(weights=2, gradients=2, optimizer=8, update=0), ElementBytes(optimizer=8)
PART = DISK_BLOCK
"""Elements of a part: every byte of an element makes one block."""
UNITS = [UnitSize(2 * PART, 2 * PART, (chunk,)) for chunk in range(3)]
EVERYTHING = Offload(parameters=True)
LOADS = 3 * 2 - 2
"""Of three chunks, two of which stay for their backward."""
SIDE = PIECES * PIECE
"""The pieces of one direction."""


def program(offload=EVERYTHING, stores_inputs=False):
    spec = ProgramSpec(
        (0,) * 3, "layered", 2, 2, 3, 2, updates="next_step", offload=offload, stores_inputs=stores_inputs
    )
    return build_rank_program(spec, 0)


def use(on_disk, size, units=UNITS, offload=EVERYTHING):
    return disk_use(program(offload), units, offload, on_disk, Sharding(3, 2), size)


@pytest.mark.parametrize(
    ("on_disk", "size", "held", "read", "written", "sides"),
    [
        # Gradient, master weights and two moments; then the weights.
        (OnDisk(optimizer=True), BF16, 16, 16, 16, 1),
        (OnDisk(optimizer=True), FP32, 12, 12, 12, 1),
        (OnDisk(parameters=True), BF16, 2, 0, 2, 1),
        (OnDisk(parameters=True), FP32, 4, 4, 4, 1),
        (OnDisk(optimizer=True, parameters=True), BF16, 18, 16, 18, 2),
        (OnDisk(optimizer=True, parameters=True), FP32, 16, 16, 16, 2),
    ],
)
def test_each_kind_of_state_takes_its_bytes(on_disk, size, held, read, written, sides):
    loaded = LOADS * size.weights * PART * on_disk.parameters
    assert use(on_disk, size) == DiskUse(
        3 * held * PART, 3 * read * PART + loaded, 3 * written * PART, 2 * held * PART + sides * SIDE
    )


def test_each_tensor_takes_whole_blocks():
    told = use(OnDisk(optimizer=True, parameters=True), BF16, [UnitSize(2, 2, (0,))])
    assert told.held == 5 * DISK_BLOCK, "gradient, master weights, two moments and weights"


def test_a_frozen_unit_is_read_and_never_written():
    told = use(OnDisk(True, True), BF16, [UnitSize(2 * PART, 0, (0,), frozen=True)])
    # Chunk 0 stays from its backward to the next step's forward, so it is loaded for the forward and the backward.
    assert told == DiskUse(2 * PART, 2 * 2 * PART, 0, 2 * SIDE)


def test_the_largest_unit_makes_the_buffers():
    sizes = [UNITS[0], UnitSize(8 * PART, 8 * PART, (1,))]
    assert use(OnDisk(optimizer=True), BF16, sizes).buffers == 2 * 4 * 16 * PART + SIDE


def test_inputs_go_there_and_back():
    actions = program(None, stores_inputs=True)
    activations = ActivationBytes(0, 0, [ChunkBytes(DISK_BLOCK + 1, 0, 0)] * 3)
    told = disk_use(actions, UNITS, None, OnDisk(inputs=True), Sharding(3, 2), BF16, activations)
    moves = sum(action.kind is Kind.STORE_INPUT for action in actions)
    assert moves > 0 and told.written == told.read == moves * 2 * DISK_BLOCK
    assert 0 < told.held <= told.written and told.buffers == 2 * SIDE
    assert disk_use(actions, UNITS, None, OnDisk(inputs=True), Sharding(3, 2), BF16) == DiskUse(0, 0, 0, 2 * SIDE)


def test_a_single_chunk_stores_no_inputs():
    actions = build_rank_program(ProgramSpec((0,), "layered", 2, 2, 3, 2, stores_inputs=True), 0)
    activations = ActivationBytes(0, 0, [ChunkBytes(DISK_BLOCK, 0, 0)])
    told = disk_use(actions, UNITS[:1], None, OnDisk(inputs=True), Sharding(3, 2), BF16, activations)
    assert told == DiskUse(0, 0, 0, 2 * SIDE)


@pytest.mark.parametrize(
    ("on_disk", "size", "left"),
    [
        (OnDisk(), BF16, 2 + 4 + 8 + 4),
        (OnDisk(optimizer=True), BF16, 2),
        (OnDisk(optimizer=True), FP32, 4),
        (OnDisk(parameters=True), BF16, 4 + 8 + 4),
        (OnDisk(parameters=True), FP32, 8 + 4),
        (OnDisk(optimizer=True, parameters=True), BF16, 0),
        (OnDisk(optimizer=True, parameters=True), FP32, 0),
    ],
)
def test_the_host_keeps_the_rest_and_the_buffers(on_disk, size, left):
    host = rank_memory(program(), UNITS, Sharding(3, 2), size, offload=EVERYTHING).host
    assert host_beside_disk(host, on_disk, size, 1000).peak == 3 * PART * left + 1000
