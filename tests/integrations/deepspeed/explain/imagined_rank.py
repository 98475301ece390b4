"""A pipeline rank with all kinds of parameters: what its partition is made of, and its sizes as formulas take them.

It is rank 0 of 2, and has chunks 0, 2, 4 and 6. The first and the last share a tied module.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_lgamp.cost.units import ElementBytes, UnitSize, aligned
from ds_lgamp.partition.policy import UnitParameter, ZeroPolicy
from ds_lgamp.partition.zero_partition import TiedParameters, ZeroPartition, build_partition
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.spec import ProgramSpec

CASES = {
    "layered": ("layered", 4, 4, 2, "step"),
    "one resident chunk": ("layered", 4, 4, 1, "step"),
    "groups": ("layered", 4, 2, 2, "step"),
    "more buffers than chunks": ("layered", 2, 2, 9, "step"),
    "interleaved": ("interleaved_1f1b", 4, 4, 2, "step"),
    "updates behind reductions": ("layered", 4, 2, 2, "reduction"),
    "updates in the next step": ("layered", 4, 2, 2, "next_step"),
}
"""Schedule, micro-batches, micro-batch group, resident chunks, and when the optimizer updates a chunk."""
_CHUNKS = {
    0: ([(7, 3), (5,)], [(5, 5)]),
    2: ([(4, 4)], []),
    4: ([(9, 2), (3,), (1,)], [(1, 3), (8,)]),
    6: ([], [(6, 6)]),
}
"""The shapes of each chunk's parameters: those that train, and frozen ones."""
_EXPERTS = {0: ([(3, 4, 9)], []), 4: ([(3, 40), (7,)], [(5, 9)])}
"""As ``_CHUNKS``: experts, if ranks divide them."""
_TIED = [(11, 2)], [(2, 5)]


@pytest.fixture
def imagined_group():
    """Makes groups of any size in this one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield lambda ranks: dist.new_group(list(range(ranks)))
    dist.destroy_process_group()


def spec_of(case, zero_stage: int, **others) -> ProgramSpec:
    """Returns the program of one of the ``CASES``, without its updates."""
    schedule, micro_batches, group, resident, _ = case
    return ProgramSpec(place_chunks("modular", 8, 2), schedule, micro_batches, group, zero_stage, resident, **others)


def partition_of(policy: ZeroPolicy, dtype: torch.dtype, tie_group, sharing=None) -> ZeroPartition:
    """Returns the partition of the rank as it is between steps. Only the ranks in ``sharing`` have its experts."""
    chunks = {chunk: _parameters(chunk, *shapes, dtype) for chunk, shapes in _CHUNKS.items()}
    for chunk, shapes in _EXPERTS.items() if sharing is not None else ():
        chunks[chunk] += [entry._replace(sharing=sharing) for entry in _parameters(f"e{chunk}", *shapes, dtype)]
    partition = build_partition(
        chunks,
        [TiedParameters("embedding", _parameters("tied", *_TIED, dtype), [0, 6], tie_group)],
        policy,
        torch.device("cpu"),
    )
    partition.release_all()
    return partition


def element_of(dtype, gradient_dtype, communication_dtype, copies_weights=True) -> ElementBytes:
    """Returns the bytes of an element. None stands for the data type of the weights."""
    return ElementBytes(
        dtype.itemsize,
        (gradient_dtype or dtype).itemsize,
        communication=None if communication_dtype is None else communication_dtype.itemsize,
        copies_weights=copies_weights,
    )


def _parameters(name, shapes, frozen_shapes, dtype):
    """Makes a unit's parameters. No optimizer owns the last trainable one."""
    tensors = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    training = [
        UnitParameter(f"{name}.{index}", tensor, 0 if index + 1 < len(shapes) or len(shapes) == 1 else None)
        for index, tensor in enumerate(tensors)
    ]
    tensors = [torch.nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False) for shape in frozen_shapes]
    frozen = [UnitParameter(f"{name}.frozen.{index}", tensor, None) for index, tensor in enumerate(tensors)]
    return [*frozen[:1], *training, *frozen[1:]]


def _numbers(shapes):
    return _numel(shapes), _numel(shapes[:-1]) if len(shapes) > 1 else _numel(shapes)


def _numel(shapes):
    """Returns the number of elements in a unit's storage."""
    return sum(aligned(torch.Size(shape).numel()) for shape in shapes)


SIZES = [
    *(UnitSize(*_numbers(training), (chunk,)) for chunk, (training, _) in _CHUNKS.items() if training),
    *(UnitSize(_numel(frozen), 0, (chunk,), frozen=True) for chunk, (_, frozen) in _CHUNKS.items() if frozen),
    UnitSize(*_numbers(_TIED[0]), (0, 6), tied=True, copies=2),
    UnitSize(_numel(_TIED[1]), 0, (0, 6), tied=True, frozen=True),
]
"""Of the units of the rank."""


def sizes_of_experts(expert_ranks: int) -> list[UnitSize]:
    """Returns the sizes of the units of experts that so many ranks divide."""
    return [
        UnitSize(
            *(_numbers(shapes) if trains else (_numel(shapes), 0)),
            (chunk,),
            frozen=not trains,
            expert_ranks=expert_ranks,
        )
        for chunk, both in _EXPERTS.items()
        for trains, shapes in zip((True, False), both)
        if shapes
    ]
