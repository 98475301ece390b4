"""Sizes of units, of their elements, and of the parts that data-parallel ranks hold, on the device or on the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ds_lgamp.schedule.spec import BLOCK_ON_DEVICE, RANDOM_NUMBERS, STATE_BLOCK, Hierarchy, Offload

ALIGNMENT = 32
"""Every parameter begins at a multiple of so many elements, and every rank's part of a unit's storage ends at one. The
gaps hold zeros. An element then has the same place in the vectors a kernel works with, wherever parts are cut. This
keeps rounding the same: a CPU with 512-bit vectors takes two vectors of 16 fp32 at once and the remaining elements one
by one, which may round differently.

A matrix also begins at a multiple of 64 bytes, which MKL asks for where results must be reproducible (Intel, "Getting
Started with Conditional Numerical Reproducibility"). GPU kernels load 16 bytes at once."""


def aligned(elements: int, alignment: int = ALIGNMENT) -> int:
    """Rounds ``elements`` up to a multiple of the alignment."""
    return -(-elements // alignment) * alignment


def offsets(sizes: Iterable[int], alignment: int = ALIGNMENT) -> list[int]:
    """Returns where each parameter begins, and where the padding of the last one ends, in elements.

    Args:
        sizes: elements of each parameter, in storage order.
    """
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + aligned(size, alignment))
    return starts


def part_size(end: int, ranks: int, alignment: int = ALIGNMENT) -> int:
    """Returns the elements of one part if ``ranks`` equal parts hold a storage of ``end`` elements."""
    return aligned(-(-end // ranks), alignment)


_MASTER_BYTES, _RANDOM_BYTES, _SCALE_BYTES = 4, 4, 2


def packed_bytes(elements: int, bits: int) -> int:
    """Returns the bytes of ``elements``, whole blocks of :data:`ALIGNMENT`, that travel as whole numbers of ``bits``
    with a scale for each block."""
    return elements * bits // 8 + elements // ALIGNMENT * _SCALE_BYTES


class Travel(NamedTuple):
    """In how many bits elements travel, as whole numbers with scales; None as they are."""

    weights: int | None = None
    """Weights that train, at stage 3."""
    frozen: int | None = None
    """Weights that do not train, at stage 3, where ranks share them."""
    gradients: int | None = None
    """Gradients, from stage 1 on."""


class Sharding(NamedTuple):
    """How the data-parallel ranks of a pipeline rank share its state, and how they sum gradients."""

    zero_stage: int
    data_ranks: int
    hierarchy: Hierarchy | None = None
    """Hierarchical shards, as in the program."""
    all_to_all: bool = False
    """Whether an all-to-all replaces the reduce-scatter, as on gloo."""
    in_rank_order: bool = False
    """Whether gradients add up in rank order at stage 0 and between nodes, too; requires ``all_to_all``."""

    @property
    def partitioned(self) -> bool:
        """Whether ranks hold parts."""
        return self.zero_stage > 0 and self.data_ranks > 1

    @property
    def sharers(self) -> int:
        """How many ranks share the weights of a unit at stage 3."""
        return self.data_ranks if self.hierarchy is None else self.hierarchy.node_ranks


@dataclass(frozen=True)
class UnitSize:
    """The size of a unit: the trainable or the frozen parameters of one chunk, or of one tied module on one rank.
    Experts that ranks divide are units of their own."""

    parameters: int
    """Elements that its parameters take in its storage, each rounded up by :func:`aligned`."""
    trainable: int
    """How many of these elements the optimizer owns."""
    chunks: tuple[int, ...]
    """The chunks of the rank that use the unit; one unless the module is tied."""
    tied: bool = False
    copies: int = 1
    """How many pipeline ranks hold the tied module and sum their gradients."""
    frozen: bool = False
    """Whether no parameter has a gradient."""
    expert_ranks: int = 1
    """How many data-parallel ranks divide its experts, and have other experts each; 1 for units that all data-parallel
    ranks have."""
    whole_on: Literal["device", "host"] | None = None
    """Where every rank keeps the whole unit between uses, at any stage; None if ranks share it as others."""
    home_shared_by: int = 1
    """How many ranks of a machine share the memory on the host in which it is whole."""
    packed: int | None = None
    """Bytes of an element of packed weights, which no cast changes; None if weights have the type of the run."""
    alignment: int = ALIGNMENT
    """That of its parameters and parts."""
    in_32_bits: int = 0
    """How many of ``trainable`` keep their state in 32 bits, if the optimizer has state of 8 bits."""

    def shared(self, sharding: Sharding) -> Sharding:
        """Returns how the ranks that have the unit share it: of W data-parallel ranks, E of which divide experts, W /
        E."""
        return sharding._replace(data_ranks=sharding.data_ranks // self.expert_ranks)

    def is_gathered(self, sharding: Sharding) -> bool:
        """Whether other ranks have a part of its weights, so that the host may keep what a gather brings."""
        return self.whole_on is None and self.shared(sharding).partitioned

    def parts(self, sharding: Sharding) -> int:
        """Returns how many equal parts the unit is cut into."""
        hierarchy = sharding.hierarchy
        if self.whole_on is not None:
            return 1
        if hierarchy is not None and (hierarchy.replicated or self.frozen):
            return hierarchy.node_ranks
        return self.shared(sharding).data_ranks if sharding.zero_stage > 0 else 1

    def part(self, sharding: Sharding) -> int:
        """Returns the elements of one part, including padding."""
        ranks = self.shared(sharding).data_ranks
        return part_size(self.parameters, ranks, self.alignment) * (ranks // self.parts(sharding))

    def kept(self, sharding: Sharding) -> int:
        """Returns the elements whose weights a rank keeps on the device between steps."""
        if self.whole_on is not None:
            return self.part(sharding) if self.whole_on == "device" else 0
        shared = self.shared(sharding)
        whole = part_size(self.parameters, shared.data_ranks, self.alignment) * shared.data_ranks
        return whole // (shared.sharers if sharding.zero_stage == 3 else 1)


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element."""

    weights: int = 4
    gradients: int = 4
    """Gradients while they accumulate."""
    optimizer: int | None = 0
    """Optimizer state, without master weights; None if unknown. Of state of 8 bits, what it takes in 32 bits."""
    update: int | None = 0
    """Temporary memory of the optimizer, per element it updates at once; None if unknown."""
    updates_together: bool = False
    """Whether the optimizer updates all elements at once (torch's ``foreach``) or one unit after another."""
    communication: int | None = None
    """Gradients while they travel, if they travel in another type; None if they travel as they accumulate."""
    travel: Travel = Travel()
    """What travels rounded, in place of the other types."""
    copies_weights: bool = True
    """Whether the optimizer updates fp32 copies of half-precision weights, and not these themselves."""
    update_block: int | None = None
    """The most elements that an optimizer on the device updates at once, if it rounds by chance; one on the host takes
    ``BLOCK_ON_HOST`` then. None: all of a unit's part."""
    state_in_8_bits: bool = False
    """Whether optimizer state has 8 bits, and a scale in fp32 for each :data:`STATE_BLOCK`."""

    def bits_of(self, unit: UnitSize) -> int | None:
        """In how many bits weights of ``unit`` are gathered at stage 3; None as they are, as packed ones are."""
        if unit.packed is not None:
            return None
        return self.travel.frozen if unit.frozen else self.travel.weights

    def gathered(self, unit: UnitSize, elements: int, zero_stage: int) -> int:
        """Returns the bytes of ``elements`` of the weights of ``unit`` in a gather."""
        bits = self.bits_of(unit) if zero_stage == 3 else None
        return self.weights_of(unit) * elements if bits is None else packed_bytes(elements, bits)

    def reduced(self, elements: int) -> int:
        """Returns the bytes of ``elements`` of a gradient in a reduction, from stage 1 on."""
        bits = self.travel.gradients
        return self.travelling * elements if bits is None else packed_bytes(elements, bits)

    @property
    def master(self) -> int:
        """Weights that the optimizer updates."""
        return max(self.weights, _MASTER_BYTES) if self.copies_weights else self.weights

    def state(self, unit: UnitSize, elements: int) -> int | None:
        """Returns the bytes of optimizer state for so many ``elements`` of ``unit``; None if unknown. State of 8 bits
        takes most where as many of them as possible have 32 bits, as they do if the elements are all of the unit."""
        if self.optimizer is None or not self.state_in_8_bits:
            return None if self.optimizer is None else self.optimizer * elements
        in_32_bits = min(elements, unit.in_32_bits)
        blocks, tensors = (elements - in_32_bits) // STATE_BLOCK, self.optimizer // 4
        return self.optimizer * in_32_bits + tensors * blocks * (STATE_BLOCK + 4)

    def rounding_by_chance(self) -> "ElementBytes":
        """Returns the bytes if updates are computed in fp32 on copies of a block, and rounded by chance: copies of
        weights, gradients and state, for which the optimizer takes as much as for others in fp32."""
        known = self.optimizer is not None and self.update is not None
        copied = 2 * ((self.update or 0) + (self.optimizer or 0)) + 2 * 4 if known else self.update
        return replace(self, update=copied, update_block=BLOCK_ON_DEVICE)

    def with_state_in_half(self) -> "ElementBytes":
        """Returns the bytes if the optimizer updates half-precision weights themselves, its state has their type, and
        updates are rounded by chance."""
        alone = replace(self, copies_weights=False)
        state, temporary = (
            None if size is None else size // self.master * alone.master for size in (self.optimizer, self.update)
        )
        return replace(alone, optimizer=state, update=temporary).rounding_by_chance()

    def passing_update(self, elements: int, block: int | None) -> int | None:
        """Returns the bytes that an optimizer takes for a moment while it updates ``elements``; None if unknown. With
        rounding by chance it takes them for a ``block`` at once."""
        return None if self.update is None else self.update * (elements if block is None else min(elements, block))

    def random_numbers(self, block: int | None) -> int:
        """Returns the bytes of the random numbers that it keeps to round a ``block`` at once; 0 if it rounds none."""
        return 0 if self.update is None or block is None else _RANDOM_BYTES * (RANDOM_NUMBERS + block)

    @property
    def sums(self) -> int:
        """Gradients of ranks, and of groups of micro-batches, while they add up."""
        return max(self.master, self.gradients)

    def weights_of(self, unit: UnitSize) -> int:
        """Bytes of a weight of ``unit``."""
        return self.weights if unit.packed is None else unit.packed

    @property
    def travelling(self) -> int:
        """Gradients while they are reduced."""
        return self.gradients if self.communication is None else self.communication


def total(sizes: Sequence[int | None]) -> int | None:
    """Returns the sum of ``sizes``; None if one is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def on_host(units: Sequence[UnitSize], offload: Offload | None) -> list[UnitSize]:
    """Returns the units of which offloading leaves something to the host."""
    return [unit for unit in units if not stays(unit, offload)]


def stays(unit: UnitSize, offload: Offload | None) -> bool:
    """Whether offloading leaves nothing of ``unit`` to the host."""
    if offload is None or unit.whole_on is not None:
        return True
    return bool(offload.on_device) and (unit.tied or unit.chunks[0] in offload.on_device)
