"""Random programs: built, validated, simulated, run under the rules of hardware queues, written and read back."""

import traceback
from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

from ds_lgamp.schedule.actions import Action, Kind, Program, joined
from ds_lgamp.schedule.placement import place_chunks
from ds_lgamp.schedule.program import build_program, mark_recomputed
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import UPDATES, Hierarchy, Offload, ProgramSpec
from ds_lgamp.schedule.validate import run_in_one_queue, validate
from testing.fuzz.outcome import Outcome, sentence_fault

SCHEDULES = ("layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv")


def random_spec(random: Random) -> ProgramSpec:
    """Returns a spec of numbers that need not fit each other. Raises ValueError if they do not."""
    ranks, schedule = random.randint(1, 6), random.choice(SCHEDULES)
    chunks = ranks * random.randint(1, 4) if random.random() < 0.7 else random.randint(ranks, 4 * ranks)
    if schedule in ("1f1b", "gpipe") and random.random() < 0.9:
        chunks = ranks
    if schedule == "zbv" and random.random() < 0.9:
        chunks = 2 * ranks
    micro_batches = random.randint(1, 10)
    if schedule == "interleaved_1f1b" and random.random() < 0.9:
        micro_batches = ranks * random.randint(1, 3)
        chunks = ranks * random.randint(1, 4)
    in_groups = schedule == "layered" and random.random() < 0.5
    zero_stage = random.randint(0, 3)
    hierarchical = zero_stage == 3 and random.random() < 0.3
    offloaded = zero_stage > 0 and not hierarchical and random.random() < 0.4
    contiguous = schedule in ("1f1b", "gpipe") or (schedule == "layered" and random.random() < 0.4)
    kind = "vee" if schedule == "zbv" else "contiguous" if contiguous else "modular"
    updates = random.choice(UPDATES[1:] if offloaded and random.random() < 0.9 else UPDATES)
    returns_outputs = random.random() < 0.2
    if returns_outputs and random.random() < 0.9:
        micro_batches = ranks * random.randint(1, 4)
    kept = random.choice((0.0, 0.0, 0.5))
    return ProgramSpec(
        placement=place_chunks(kind, chunks, ranks),
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_group=random.randint(1, micro_batches) if in_groups else micro_batches,
        zero_stage=zero_stage,
        resident_chunks=random.randint(1, 5),
        forward_only=random.random() < 0.15,
        defers_gathers=updates == "next_step" or offloaded or random.random() < 0.4,
        updates=updates,
        receives_on_arrival=random.random() < 0.5,
        hierarchy=Hierarchy(2, random.random() < 0.5) if hierarchical else None,
        offload=Offload(zero_stage == 3 and random.random() < 0.5, alone=random.random() < 0.5) if offloaded else None,
        stores_inputs=random.random() < 0.2,
        recomputes=random.random() < 0.8,
        first_trained=random.randrange(chunks) if random.random() < 0.2 else 0,
        returns_outputs=returns_outputs,
        stores_weights=zero_stage == 3 and not hierarchical and random.random() < 0.5,
        split_backward=random.choice((0, 0, 1, 3)),
        overlaps_exchanges=random.random() < 0.2,
        whole_chunks=frozenset(chunk for chunk in range(chunks) if random.random() < 0.1),
        kept=frozenset(pair for pair in product(range(chunks), range(micro_batches)) if random.random() < kept),
    )


def check_counts(spec: ProgramSpec, program: Program) -> None:
    """Raises AssertionError if the program computes or reduces other than its spec says, by a count of its own."""
    actions = Counter(action._replace(recomputed=False) for rank in program for action in rank)
    for chunk in range(spec.chunks):
        trains = chunk >= spec.first_trained and not spec.forward_only
        for micro_batch in range(spec.micro_batches):
            assert actions[Action(Kind.FORWARD, chunk, micro_batch)] == 1
            assert actions[Action(Kind.BACKWARD, chunk, micro_batch)] == trains
        groups = -(-spec.micro_batches // spec.micro_batch_group) if spec.zero_stage > 1 else 1
        assert actions[Action(Kind.REDUCE, chunk)] == (groups if trains else 0), f"reductions of {chunk}"
    for rank in program:
        last = {action.chunk: row for row, action in enumerate(rank) if action.kind is Kind.BACKWARD}
        reduced = {action.chunk: row for row, action in enumerate(rank) if action.kind is Kind.REDUCE}
        assert all(last[chunk] < reduced[chunk] for chunk in last), "every backward is reduced"


def run_case(random: Random) -> Outcome:
    try:
        spec = random_spec(random)
    except ValueError as error:
        fault = sentence_fault(str(error))
        return Outcome("refused") if fault is None else Outcome(f"defect: {fault}", str(error))
    try:
        program = build_program(spec)
        validate(spec, program)
        check_counts(spec, program)
        written = [[str(action) for action in actions] for actions in program]
        read = [[Action.parse(text) for text in actions] for actions in written]
        marked = [joined(mark_recomputed(spec, rank, [actions])) for rank, actions in enumerate(read)]
        assert marked == program, "the text reads back"
        assert simulate(spec, program).step_time > 0
        on_arrival = replace(spec, receives_on_arrival=True)
        arriving = build_program(on_arrival)
        validate(on_arrival, arriving)
        run_in_one_queue(on_arrival, arriving)
    except Exception:
        return Outcome("defect", f"{spec}\n{traceback.format_exc(limit=-3)}")
    return Outcome("sound")
