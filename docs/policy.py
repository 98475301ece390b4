"""The generated blocks of docs/partition.md: pictures of the partition policy, and numbers beside its formulas."""

from contextlib import redirect_stdout
from io import StringIO

from ds_lgamp.cli.main import main
from ds_lgamp.schedule.actions import Kind
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import simulate
from ds_lgamp.schedule.spec import ProgramSpec
from testing.markdown import table

CHUNKS, MICRO_BATCHES = 4, 4
DURATIONS = Durations(forward=1, backward=2, gather=2, reduce=3)


def picture(*options: str) -> str:
    """A command and its output."""
    words = ["schedule", "--pipeline-ranks", "1", "--chunks-per-rank", f"{CHUNKS}"]
    words += ["--micro-batches", f"{MICRO_BATCHES}"]
    words += ["--gather", f"{DURATIONS.gather}", "--reduce", f"{DURATIONS.reduce}", *options]
    with redirect_stdout(StringIO()) as printed:
        main(words)
    return f"```\n$ ds_lgamp {' '.join(words)}\n{printed.getvalue()}```"


def costs() -> str:
    """Gathers, reductions and the time that compute waits for them, by stage, resident chunks and number of groups,
    with the picture's durations."""
    rows = []
    for stage in (1, 2, 3):
        for resident in (1, 2, CHUNKS):
            for group in (MICRO_BATCHES, MICRO_BATCHES // 2):
                spec = ProgramSpec((0,) * CHUNKS, "layered", MICRO_BATCHES, group, stage, resident)
                program = build_program(spec)
                timeline = simulate(spec, program, DURATIONS)
                counts = (sum(action.kind is kind for action in program[0]) for kind in (Kind.GATHER, Kind.REDUCE))
                exposed = (timeline.exposed(kind)[0] for kind in (Kind.GATHER, Kind.REDUCE))
                settings = stage, resident, MICRO_BATCHES // group
                rows.append([*map(str, settings), *map(str, counts), *(f"{wait:g}" for wait in exposed)])
    header = ["stage", "B", "K", "gathers", "reductions", "waits for gathers", "waits for reductions"]
    return table(header, rows, numbers_from=0)
