"""Counts the bytes that cross the bus between host and device in a step: ``python -m benchmarks run offload``.

Every contender trains the same model with one block per chunk and recomputes all but the last one. Weights, gradients
and optimizer state are in fp32. All run on the CPU. There host and device are two pools of main memory. The counts of
ds_lgamp are compared with the formula of ``ds_lgamp/cost/traffic.py``.
"""

from collections.abc import Sequence

from benchmarks.contenders import Contender, Layout
from benchmarks.contenders.formula import program_of
from benchmarks.contenders.offload import ALL_ON_HOST, OPTIMIZER_ON_HOST, OUTER, OWN, PEERS, Moved
from benchmarks.counting import WARM_UP, check_losses
from benchmarks.model import ModelSize, block_elements, reference_losses
from benchmarks.record import OURS, Record, begin
from ds_lgamp.cost.traffic import bus_bytes
from ds_lgamp.cost.units import ElementBytes, Sharding
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.spec import Offload, ProgramSpec
from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks

NAME = "offload"
SIZE = ModelSize()
MICRO_BATCHES = (1, 4, 16)
OFFLOADS = {
    ALL_ON_HOST: (Offload(True), None),
    OPTIMIZER_ON_HOST: (Offload(False), None),
    OUTER: (Offload(True), 1),
}
"""What the host holds, and the micro-batch group; None for all micro-batches."""
SECONDS = 900


def run(size: ModelSize = SIZE, micro_batches: Sequence[int] = MICRO_BATCHES) -> Record:
    """Counts all contenders for every number of micro-batches per step."""
    record = begin(NAME)
    layout = Layout(1, 2, size)
    deviations = 0
    for contender in (*OWN, *PEERS):
        found = count(contender, layout, micro_batches)
        enter(record, contender, layout, found)
        if contender.name in OFFLOADS:
            deviations += sum(
                moved != predicted(layout, number, *OFFLOADS[contender.name])
                for number, on_ranks in found.items()
                for moved in on_ranks
            )
    record.aim(f"counts of {OURS} that differ from the formula", deviations, 0)
    compare(record)
    return record


def predicted(layout: Layout, micro_batches: int, offload: Offload, group: int | None) -> Moved:
    """The formula's bytes of a step on a rank without a pipeline. ``group`` None means all micro-batches."""
    _, units = program_of(layout, 0, micro_batches, 3, 2)
    spec = ProgramSpec(
        (0,) * layout.size.blocks,
        "layered",
        micro_batches,
        group or micro_batches,
        3,
        updates="reduction",
        offload=offload,
    )
    (program,) = build_program(spec)
    return Moved(*bus_bytes(program, units, offload, Sharding(3, layout.data_ranks), ElementBytes()))


def compare(record: Record) -> None:
    """Compares each peer with everything on the host with ds_lgamp, at the largest number of micro-batches."""
    most = max(int(row.config["micro_batches"]) for row in record.rows)
    moved: dict[str, float] = {}
    for row in record.rows:
        if row.config["micro_batches"] == most and row.unit == "bytes":
            moved[row.contender] = moved.get(row.contender, 0) + row.median
    peers = {contender.name for contender in PEERS if "all on the host" in contender.name}
    own = moved[ALL_ON_HOST]
    record.aim(
        f"peers with everything on the host that move no more than {OURS} at {most} micro-batches",
        sum(moved[name] <= own for name in peers),
        0,
    )


def count(contender: Contender, layout: Layout, micro_batches: Sequence[int]) -> dict[int, list[Moved]]:
    """Returns what every rank moves in a step, by micro-batches. Raises AssertionError if the losses differ from those
    of one process."""
    ranks = layout.pipeline_ranks * layout.data_ranks
    sequence = tuple(number for number in micro_batches for _ in range(WARM_UP + 1))
    on_ranks = run_on_ranks(ranks, _count_on_rank, contender, layout, sequence, seconds=SECONDS)
    expected = reference_losses(layout.size, layout.data_ranks, sequence)
    for losses, _ in on_ranks:
        check_losses(contender.name, losses, expected)
    # The last step with a number is the counted one.
    return {
        number: [moved[step] for _, moved in on_ranks]
        for step, number in enumerate(sequence)
        if step % (WARM_UP + 1) == WARM_UP
    }


def enter(record: Record, contender: Contender, layout: Layout, found: dict[int, list[Moved]]) -> None:
    """Enters the rows of one contender: bytes of the rank that moves most, and how often that is its shard."""
    shard = 4 * block_elements(layout.size) * layout.size.blocks / layout.data_ranks
    for number, on_ranks in found.items():
        config = layout.config(number)
        for metric in Moved._fields:
            most = max(getattr(moved, metric) for moved in on_ranks)
            record.add(contender.name, config, metric, [most], "bytes")
            record.add(contender.name, config, f"{metric} / shard", [most / shard], "ratio")


def _count_on_rank(
    contender: Contender, layout: Layout, sequence: Sequence[int]
) -> tuple[list[float | None], list[Moved]]:
    prepare_rank()
    training = contender.build(layout)
    losses, moved = [], []
    for step, number in enumerate(sequence):
        losses.append(training.step(step, number))
        moved.append(training.moved)
    return losses, moved
