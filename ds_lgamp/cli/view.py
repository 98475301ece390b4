"""``ds_lgamp view``: shows a recorded step as text, JSON or a page."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_lgamp.cli.terminal import at_work, count, with_examples, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds_lgamp.view.figures import Shown

SIMULATED, PLAIN = "simulated", "1f1b"


def add_view_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``ds_lgamp``."""
    command = commands.add_parser("view", help="show where the time of a recorded step went", **with_examples("view"))
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
    command.set_defaults(run=_view, parser=command)


def _view(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.view.html import html_page
    from ds_lgamp.view.recording import RecordingError
    from ds_lgamp.view.report import report

    try:
        with at_work("reading the recording"):
            shown = list(_shown(options))
    except RecordingError as error:
        parser.error(str(error))
    if options.html is not None:
        panels = [(f"{name}: {each.title}", each) for name, each in shown]
        with at_work("drawing the page"):
            page = html_page(_title(shown[0][1]), panels)
        write_file(parser, "--html", options.html, page.encode())
    if options.perfetto is not None:
        from ds_lgamp.view.perfetto import perfetto_trace

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


def _title(shown: "Shown") -> str:
    from ds_lgamp.view.svg import title_of

    spec = shown.recording.program_spec()
    return f"{title_of(spec)}, ZeRO-{spec.zero_stage}"


def _shown(options: argparse.Namespace) -> "Iterator[tuple[str, Shown]]":
    """Yields the step and, if asked for, the one to compare it with, each after the name of its recording."""
    from ds_lgamp.view.figures import show
    from ds_lgamp.view.recording import read_recording

    first = show(read_recording(options.recording), options.step)
    yield str(options.recording), first
    if options.against == SIMULATED:
        from ds_lgamp.view.measured_costs import simulated

        yield "the same program", show(simulated(first))
    elif options.against == PLAIN:
        from ds_lgamp.view.measured_costs import simulated_1f1b

        yield "1F1B", show(simulated_1f1b(first))
    elif options.against is not None:
        yield options.against, show(read_recording(Path(options.against)))
