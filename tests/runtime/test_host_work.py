"""What the engine asks of the host for every micro-batch on every chunk, counted in calls of its functions and of
torch's operators.

Times depend on the machine; ``python -m benchmarks run overhead`` measures them.
"""

import os
import sys
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

import ds_lgamp
from benchmarks.overhead import bare_step, engine_step
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_rank_program
from ds_lgamp.schedule.spec import ProgramSpec
from testing.ranks import run_on_ranks

CHUNKS, MICRO_BATCHES = 8, 8
LIMIT = 53
"""Calls for a forward and a backward of a layer that saves two tensors and is recomputed. Each further saved tensor
takes four more."""
_ENGINE = os.path.dirname(ds_lgamp.__file__)


def calls_of_a_step(micro_batches):
    """Returns how often a step calls each function of the engine, once it knows which states layers change."""
    spec = ProgramSpec(place_chunks("modular", CHUNKS, 1), "layered", micro_batches, micro_batches, zero_stage=3)
    step = engine_step(spec, 0, build_rank_program(spec, 0))
    calls = Counter()

    def count(frame, event, argument):
        code = frame.f_code
        # Python 3.12 calls no function for a comprehension.
        if event == "call" and code.co_filename.startswith(_ENGINE) and not code.co_name.endswith("comp>"):
            calls[code.co_name] += 1

    for _ in range(3):
        step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_two_steps():
    return calls_of_a_step(MICRO_BATCHES), calls_of_a_step(2 * MICRO_BATCHES)


def test_calls_for_a_micro_batch_on_a_chunk_stay_in_their_budget():
    fewer, more = run_on_ranks(1, calls_of_two_steps)[0]
    visits = CHUNKS * MICRO_BATCHES
    added = more - fewer
    assert added["execute"] == 2 * visits
    assert added.total() / visits <= LIMIT, added


class Operators(TorchDispatchMode):
    """Counts torch's operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def operators_beyond_a_bare_loop(chunks, micro_batches, recomputes):
    """Returns the operators of a step of the engine that a bare loop does without."""
    spec = ProgramSpec(
        *(place_chunks("modular", chunks, 1), "layered", micro_batches, micro_batches),
        zero_stage=3,
        recomputes=recomputes,
    )
    found = []
    for step in (engine_step(spec, 0, build_rank_program(spec, 0)), bare_step(spec, 0)):
        for _ in range(3):
            step()
        with Operators() as operators:
            step()
        found.append(operators.counts)
    ours, bare = found
    ours.subtract(bare)
    return ours


def operators_of_one_more(micro_batches):
    """Returns what one more micro-batch takes on each further chunk, with and without recomputation."""
    found = []
    for recomputes in (True, False):
        few, many = (
            operators_beyond_a_bare_loop(chunks, micro_batches + 1, recomputes)
            - operators_beyond_a_bare_loop(chunks, micro_batches, recomputes)
            for chunks in (CHUNKS, 2 * CHUNKS)
        )
        found.append({name: count / CHUNKS for name, count in (many - few).items()})
    return found


def test_a_micro_batch_on_a_chunk_takes_as_many_operators_beyond_a_bare_loop_however_many_there_are():
    """Of these, a GPU launches a kernel for a clone alone: layers may change their input in place."""
    for micro_batches in (2, MICRO_BATCHES):
        recomputed, kept = run_on_ranks(1, operators_of_one_more, micro_batches)[0]
        assert recomputed == {"clone": 2, "detach": 5}
        assert kept == {"clone": 1, "detach": 3, "_unsafe_view": 1, "new_empty_strided": 1, "view": 1}
