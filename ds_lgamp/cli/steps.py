"""``ds_lgamp schedule`` and ``ds_lgamp view``: show a simulated or a recorded step as text, JSON, picture or page."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_lgamp.cli.terminal import add_command, at_work, count, write_file
from ds_lgamp.schedule.actions import Kind, Program
from ds_lgamp.schedule.costs import UNIT_DURATIONS, Durations
from ds_lgamp.schedule.orders import SCHEDULES, SINGLE_CHUNK_SCHEDULES, default_placement
from ds_lgamp.schedule.placement import PLACEMENTS, place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, peak_live_activations, simulate
from ds_lgamp.schedule.spec import UPDATES, Hierarchy, Offload, ProgramSpec
from ds_lgamp.schedule.validate import validate
from ds_lgamp.version import __version__
from ds_lgamp.view.figures import Shown, show, simulated, simulated_1f1b
from ds_lgamp.view.perfetto import perfetto_trace
from ds_lgamp.view.pictures import Panel, beside_1f1b, html_page, svg_gantt, title_of
from ds_lgamp.view.recording import RecordingError, of_simulation, read_recording, refuse_measured, write_recording
from ds_lgamp.view.report import report, text_gantt

MOST_COMPUTES = 500_000
"""Forwards and backwards of a step that are simulated, validated and drawn in half a minute."""
LONGEST = 1e100
"""The longest duration whose sum over so many computes is still finite."""
_DURATIONS = {
    "forward": "time of one chunk's forward for one micro-batch",
    "backward": "time of one chunk's backward for one micro-batch",
    "hop": "time to send a tensor to the next rank",
    "gather": "time of one chunk's gather over the data ranks",
    "reduce": "time of one chunk's reduction over the data ranks",
    "refresh": "time of one chunk's gather between nodes",
    "combine": "time of one chunk's reduction between nodes",
    "recompute": "extra time of a backward whose chunk is recomputed",
    "update": "time of one chunk's update",
    "load": "time of one chunk's weights from host to device",
    "store": "time of one chunk's gradient from device to host",
    "weights": "time of one chunk's gathered weights from device to host, or back",
    "exchange": "the part of --forward in which tokens travel among ranks that divide experts",
    "exchanges": "in how many all-to-alls they do",
}
"""Options of a program's durations, and what they mean."""
_COUNTED = {
    Kind.GATHER: "gathers",
    Kind.REDUCE: "reduces",
    Kind.REFRESH: "refreshes",
    Kind.COMBINE: "combines",
    Kind.LOAD: "loads",
    Kind.STORE: "stores",
    Kind.LOAD_WEIGHTS: "loads of weights",
    Kind.STORE_WEIGHTS: "stores of weights",
}
"""The actions that are counted, and what they are called."""
SIMULATED, PLAIN = "simulated", "1f1b"
"""What ``--against`` may name besides a recording."""


def add_schedule_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``ds_lgamp``."""
    meaning = "build, check, simulate and draw a training step's program"
    command = add_command(commands, "schedule", meaning, run=_schedule)
    _add_program(command)
    _add_durations(command)
    command.add_argument("--json", action="store_true", help="print the program and its figures as JSON")
    command.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw the program beside 1F1B with the same work, as SVG"
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="also draw both into a page to zoom into; a browser opens the file"
    )
    command.add_argument(
        "--trace", type=Path, metavar="DIR", help="also write the simulated step as a recording, as runs do"
    )


def _add_program(command: argparse.ArgumentParser) -> None:
    """Adds the options that say what the program is."""
    command.add_argument("--schedule", choices=SCHEDULES, default="layered")
    command.add_argument("--pipeline-ranks", type=count, default=4, metavar="P")
    command.add_argument(
        "--chunks-per-rank", type=count, metavar="N", help="default: 1 for 1f1b and gpipe, 2 for zbv, else 4"
    )
    command.add_argument("--micro-batches", type=count, default=8, metavar="M")
    command.add_argument(
        "--micro-batch-group",
        type=_count_or_all,
        metavar="G",
        help="micro-batches that move together, or all (default)",
    )
    command.add_argument("--zero-stage", type=int, default=3, choices=range(4))
    command.add_argument("--resident-chunks", type=count, default=2, metavar="B")
    command.add_argument(
        "--defer-gathers", action="store_true", help="gather updates in the next step, one chunk early"
    )
    command.add_argument(
        "--node-shards",
        choices=("refreshed", "replicated"),
        help="stage 3: gather inside nodes, whose shards are refreshed by other nodes or the same on all",
    )
    command.add_argument(
        "--updates",
        choices=UPDATES,
        help="when the optimizer updates a chunk: all at the step (default), after its reduction, or in the next step "
        "(default with --offload)",
    )
    command.add_argument(
        "--offload",
        choices=("optimizer", "parameters"),
        help="what the host holds: the optimizer's state and master weights, which it updates, or the parameters too",
    )
    command.add_argument(
        "--regather",
        choices=("network", "host"),
        default="network",
        help="stage 3: where weights come from that a step needs again: another gather (default) or a copy on the host",
    )
    command.add_argument(
        "--split-backward",
        type=count,
        nargs="?",
        const=0,
        metavar="N",
        help="backwards in two parts: at most N of a rank, by default P, wait for the second one, which computes "
        "gradients of weights",
    )
    command.add_argument(
        "--overlap-exchanges",
        action="store_true",
        help="compute another micro-batch while tokens travel among ranks that divide experts",
    )
    command.add_argument(
        "--placement", choices=PLACEMENTS, help="default: contiguous for 1f1b and gpipe, vee for zbv, else modular"
    )


def _add_durations(command: argparse.ArgumentParser) -> None:
    """Adds the options that say how long its actions take."""
    for name, meaning in _DURATIONS.items():
        command.add_argument(f"--{name}", type=float, default=getattr(UNIT_DURATIONS, name), help=meaning)


def _schedule(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        spec = _spec(options)
        durations = _durations(options)
    except ValueError as error:
        parser.error(str(error))
    with at_work("simulating"):
        program = build_program(spec)
        validate(spec, program)
        timeline = simulate(spec, program, durations)
    if options.svg is not None or options.html is not None:
        panels = beside_1f1b(spec, timeline, durations)
        if options.svg is not None:
            write_file(parser, "--svg", options.svg, svg_gantt(panels).encode())
        if options.html is not None:
            write_file(parser, "--html", options.html, _page(panels).encode())
    if options.trace is not None:
        try:
            refuse_measured(options.trace)
            write_recording(options.trace, of_simulation(spec, timeline, __version__))
        except RecordingError as error:
            parser.error(f"--trace is '{options.trace}', {error}")
        except OSError as error:
            parser.error(
                f"--trace is '{options.trace}', which cannot be written ({error.strerror}); name another folder"
            )
    report = _report(program, timeline)
    if options.json:
        json.dump(report, sys.stdout)
        print()
        return 0
    print(text_gantt(spec, timeline))
    print(f"step time {timeline.step_time:g}, bubble {timeline.bubble:.4f} of the ideal {timeline.ideal:g}")
    network = [Kind.GATHER, Kind.REDUCE, *([Kind.REFRESH, Kind.COMBINE] if options.node_shards else [])]
    bus = [Kind.LOAD, Kind.STORE] if options.offload else []
    bus += [Kind.LOAD_WEIGHTS, Kind.STORE_WEIGHTS] if options.regather == "host" else []
    takes_time = any((options.gather, options.reduce, options.refresh, options.combine))
    exposed = [_exposed_key(kind) for kind in (*(network if takes_time else []), *bus)]
    for key in (*(_COUNTED[kind] for kind in (*network, *bus)), *exposed, "peak_live_activations"):
        print(f"{key.replace('_', ' ')} by rank: {report[key]}")
    for path in filter(None, (options.svg, options.html, options.trace)):
        print(f"written: {path}")
    return 0


def _page(panels: Sequence[Panel]) -> str:
    shown = [(each.title, show(of_simulation(each.spec, each.timeline, __version__))) for each in panels]
    return html_page("Simulated programs with the same work", shown, unit="")


def _spec(options: argparse.Namespace) -> ProgramSpec:
    usual = {"zbv": 2, **dict.fromkeys(SINGLE_CHUNK_SCHEDULES, 1)}.get(options.schedule, 4)
    chunks_per_rank = options.chunks_per_rank or usual
    placement = options.placement or default_placement(options.schedule)
    updates = options.updates or ("next_step" if options.offload else "step")
    # What the host updates is gathered in the next step, and so is what the device updates there.
    defers = options.zero_stage > 0 and (updates == "next_step" or options.offload is not None)
    micro_batches = options.micro_batches
    _refuse_too_many(options, chunks_per_rank)
    group = options.micro_batch_group or micro_batches
    return ProgramSpec(
        placement=place_chunks(placement, options.pipeline_ranks * chunks_per_rank, options.pipeline_ranks),
        schedule=options.schedule,
        micro_batches=micro_batches,
        micro_batch_group=min(group, micro_batches),
        zero_stage=options.zero_stage,
        resident_chunks=options.resident_chunks,
        defers_gathers=options.defer_gathers or defers,
        updates=updates,
        # How large a node is does not matter to the program.
        hierarchy=Hierarchy(2, options.node_shards == "replicated") if options.node_shards else None,
        offload=Offload(options.offload == "parameters") if options.offload else None,
        stores_weights=options.regather == "host",
        recomputes=options.recompute > 0,
        split_backward=0 if options.split_backward is None else options.split_backward or options.pipeline_ranks,
        overlaps_exchanges=options.overlap_exchanges,
    )


def _refuse_too_many(options: argparse.Namespace, chunks_per_rank: int) -> None:
    computes = 2 * options.pipeline_ranks * chunks_per_rank * options.micro_batches
    if computes > MOST_COMPUTES:
        raise ValueError(
            f"--micro-batches is {options.micro_batches}: with --pipeline-ranks {options.pipeline_ranks} and "
            f"{chunks_per_rank} chunks per rank, a step has {computes:,} forwards and backwards, and at most "
            f"{MOST_COMPUTES:,} are simulated; use fewer"
        )


def _count_or_all(text: str) -> int | None:
    """None means all."""
    return None if text == "all" else count(text)


def _durations(options: argparse.Namespace) -> Durations:
    if not options.offload and (options.load or options.store):
        raise ValueError("--load and --store belong to --offload; add it, or remove them")
    if not options.node_shards and (options.refresh or options.combine):
        raise ValueError("--refresh and --combine belong to --node-shards; add it, or remove them")
    if options.regather == "network" and options.weights:
        raise ValueError("--weights belongs to --regather host; add it, or remove --weights")
    if not options.overlap_exchanges and (options.exchange or options.exchanges):
        raise ValueError("--exchange and --exchanges belong to --overlap-exchanges; add it, or remove them")
    if options.exchange > options.forward:
        raise ValueError(f"--exchange is {options.exchange:g}, a part of --forward {options.forward:g}; use less")
    durations = {name: getattr(options, name) for name in _DURATIONS}
    for name, duration in durations.items():
        if not 0 <= duration <= LONGEST:
            raise ValueError(f"--{name} is {duration:g}; a duration is a number from 0 to {LONGEST:g}")
    return Durations(**durations)


def _report(program: Program, timeline: Timeline) -> dict[str, Any]:
    counts = {
        name: [sum(action.kind is kind for action in actions) for actions in program] for kind, name in _COUNTED.items()
    }
    return {
        "valid": True,
        "step_time": timeline.step_time,
        "bubble": timeline.bubble,
        **counts,
        **{_exposed_key(kind): timeline.exposed(kind) for kind in _COUNTED},
        "peak_live_activations": [peak_live_activations(actions) for actions in program],
        "program": {str(rank): [str(action) for action in actions] for rank, actions in enumerate(program)},
    }


def _exposed_key(kind: Kind) -> str:
    return f"exposed_{kind.name.lower()}_time"


def add_view_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``ds_lgamp``."""
    command = add_command(commands, "view", "show where the time of a recorded step went", run=_view)
    command.add_argument("recording", type=Path, metavar="RECORDING", help="the folder that a run recorded into")
    command.add_argument(
        "--step", type=count, metavar="N", help="which recorded step (default: the one of median length)"
    )
    command.add_argument(
        "--against",
        metavar="simulated|1f1b|OTHER",
        help="also show the same program, or 1F1B, on the clock with the mean durations of the step; or another "
        "recording",
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="also draw a page to zoom into; a browser opens the file"
    )
    command.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write all recorded steps for ui.perfetto.dev"
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")


def _view(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        with at_work("reading the recording"):
            shown = list(_shown(options))
    except RecordingError as error:
        parser.error(str(error))
    if options.html is not None:
        panels = [(f"{name}: {each.title}", each) for name, each in shown]
        spec = shown[0][1].recording.program_spec()
        with at_work("drawing the page"):
            page = html_page(f"{title_of(spec)}, ZeRO-{spec.zero_stage}", panels)
        write_file(parser, "--html", options.html, page.encode())
    if options.perfetto is not None:
        with at_work("writing the trace"):
            trace = perfetto_trace(shown[0][1].recording)
        write_file(parser, "--perfetto", options.perfetto, trace)
    steps = [each for _, each in shown]
    if options.json:
        print(json.dumps([each.figures.as_json() for each in steps]))
        return 0
    print(report(steps))
    for path in filter(None, (options.html, options.perfetto)):
        print(f"written: {path}")
    return 0


def _shown(options: argparse.Namespace) -> Iterator[tuple[str, Shown]]:
    """Yields the step and, if asked for, the one to compare it with, each after the name of its recording."""
    first = show(read_recording(options.recording), options.step)
    yield str(options.recording), first
    if options.against == SIMULATED:
        yield "the same program", show(simulated(first))
    elif options.against == PLAIN:
        yield "1F1B", show(simulated_1f1b(first))
    elif options.against is not None:
        yield options.against, show(read_recording(Path(options.against)))
