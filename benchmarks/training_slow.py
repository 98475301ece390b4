"""Times whole training steps of a small GPT over a slow network: ``python -m benchmarks run training_slow``.

Contenders and method are those of ``training.py``.
"""

from collections.abc import Sequence

from benchmarks.contenders import Layout
from benchmarks.contenders.field import in_training
from benchmarks.model import ModelSize
from benchmarks.record import REPETITIONS, Record, begin
from benchmarks.training import MICRO_BATCHES, SMALL, aim, compete, enter
from testing.namespaces import NetworkUnavailable, throttled_network

NAME = "training_slow"
LAYOUTS = ((1, 2), (2, 2))
"""Pipeline ranks and data-parallel ranks."""
SLOW_RATE, SLOW = "200mbit", "200 Mbit/s"


def run(
    size: ModelSize = SMALL,
    layouts: Sequence[tuple[int, int]] = LAYOUTS,
    micro_batches: int = MICRO_BATCHES,
    repetitions: int = REPETITIONS,
) -> Record:
    """Measures every layout, with recomputation."""
    record = begin(NAME)
    for pipeline_ranks, data_ranks in layouts:
        layout = Layout(pipeline_ranks, data_ranks, size)
        try:
            with throttled_network(pipeline_ranks * data_ranks, SLOW_RATE) as network:
                groups = compete(in_training(layout, True), layout, micro_batches, repetitions, network.enter)
        except NetworkUnavailable as reason:
            record.lack_network(f"nothing measured at {SLOW}", reason)
            break
        enter(record, layout, micro_batches, True, SLOW, groups)
        aim(record, layout, SLOW, [groups])
    return record
