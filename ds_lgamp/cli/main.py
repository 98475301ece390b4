"""The command line: ``ds_lgamp schedule``, ``plan``, ``run``, ``checkpoint``, ``cluster`` and ``env``."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from ds_lgamp.cli.examples import with_examples
from ds_lgamp.cli.plan import add_plan_command
from ds_lgamp.config import ConfigError
from ds_lgamp.schedule.actions import Kind, Program
from ds_lgamp.schedule.costs import Durations
from ds_lgamp.schedule.hierarchy import Hierarchy
from ds_lgamp.schedule.offload import Offload
from ds_lgamp.schedule.orders import SCHEDULES, SINGLE_CHUNK_SCHEDULES, default_placement
from ds_lgamp.schedule.placement import PLACEMENTS, place_chunks
from ds_lgamp.schedule.program import build_program
from ds_lgamp.schedule.simulate import Timeline, peak_live_activations, simulate
from ds_lgamp.schedule.spec import UPDATES, ProgramSpec
from ds_lgamp.schedule.validate import validate
from ds_lgamp.view.svg import beside_1f1b
from ds_lgamp.view.text import text_gantt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The deepspeed launcher puts --local_rank=k right behind the module's name; it belongs to the script.
    launcher_words = []
    while words and words[0].startswith("--local_rank"):
        launcher_words.append(words.pop(0))
    parser = command_line()
    options = parser.parse_args(words)
    options.launcher_words = launcher_words
    return options.run(parser, options)


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(prog="ds_lgamp", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_schedule_command(commands)
    add_plan_command(commands)
    _add_run_command(commands)
    _add_checkpoint_command(commands)
    _add_cluster_command(commands)
    _add_env_command(commands)
    return parser


def _add_schedule_command(commands) -> None:
    command = commands.add_parser(
        "schedule", help="build, check, simulate and draw a training step's program", **with_examples("schedule")
    )
    command.add_argument("--schedule", choices=SCHEDULES, default="layered")
    command.add_argument("--pipeline-ranks", type=_count, default=4, metavar="P")
    command.add_argument("--chunks-per-rank", type=_count, metavar="N", help="default: 1 for 1f1b and gpipe, else 4")
    command.add_argument("--micro-batches", type=_count, default=8, metavar="M")
    command.add_argument(
        "--micro-batch-group",
        type=_count_or_all,
        metavar="G",
        help="micro-batches that move together, or all (default)",
    )
    command.add_argument("--zero-stage", type=int, default=3, choices=range(4))
    command.add_argument("--resident-chunks", type=_count, default=2, metavar="B")
    command.add_argument(
        "--defer-gathers", action="store_true", help="gather updates in the next step, one chunk ahead"
    )
    command.add_argument(
        "--node-shards",
        choices=("refreshed", "replicated"),
        help="stage 3: gather inside nodes, whose shards are refreshed by other nodes or the same on all",
    )
    command.add_argument(
        "--updates",
        choices=UPDATES,
        help="when the optimizer updates a chunk: all at the step (default), behind its reduction, or in the next step "
        "(default with --offload)",
    )
    command.add_argument(
        "--offload",
        choices=("optimizer", "parameters"),
        help="what the host holds: the optimizer's state and master weights, which it updates, or the parameters too",
    )
    command.add_argument("--placement", choices=PLACEMENTS, help="default: contiguous for 1f1b and gpipe, else modular")
    command.add_argument("--forward", type=float, default=1.0, help="time of one chunk's forward for one micro-batch")
    command.add_argument("--backward", type=float, default=2.0, help="time of one chunk's backward for one micro-batch")
    command.add_argument("--hop", type=float, default=0.0, help="time to send a tensor to the next rank")
    command.add_argument("--gather", type=float, default=0.0, help="time of one chunk's gather over the data ranks")
    command.add_argument("--reduce", type=float, default=0.0, help="time of one chunk's reduction over the data ranks")
    command.add_argument("--refresh", type=float, default=0.0, help="time of one chunk's gather between nodes")
    command.add_argument("--combine", type=float, default=0.0, help="time of one chunk's reduction between nodes")
    command.add_argument(
        "--recompute", type=float, default=0.0, help="extra time of a backward whose chunk is recomputed"
    )
    command.add_argument("--update", type=float, default=0.0, help="time of one chunk's update")
    command.add_argument("--load", type=float, default=0.0, help="time of one chunk's weights from host to device")
    command.add_argument("--store", type=float, default=0.0, help="time of one chunk's gradient from device to host")
    command.add_argument("--json", action="store_true", help="print the program and its figures as JSON")
    command.add_argument(
        "--svg", type=Path, metavar="FILE", help="also draw the program beside 1F1B with the same work, as SVG"
    )
    command.set_defaults(run=_schedule)


def _add_run_command(commands) -> None:
    command = commands.add_parser(
        "run", help="run an unedited DeepSpeed or Megatron-LM script with its ds_lgamp block", **with_examples("run")
    )
    command.add_argument("--measure", metavar="FILE", help="write losses, times, traffic and peak memory as JSON")
    command.add_argument(
        "--explain", action="store_true", help="stop at deepspeed.initialize and print what the block would do"
    )
    command.add_argument(
        "--ranks", type=_count, metavar="N", help="with --explain: ranks of the job (default: WORLD_SIZE, else 1)"
    )
    command.add_argument("--json", action="store_true", help="with --explain: print JSON")
    command.add_argument(
        "--cluster",
        metavar="FILE",
        help="lay ranks out over the islands of this file: docs/networks.md",
    )
    command.add_argument(
        "--explained",
        type=Path,
        metavar="FILE",
        help="with --cluster: what --explain --json printed for the script, in place of a dry run of the first rank",
    )
    command.add_argument("script", help="path of the script")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    command.set_defaults(run=_run)


def _add_checkpoint_command(commands) -> None:
    command = commands.add_parser("checkpoint", help="inspect, verify and convert checkpoints")
    command.set_defaults(run=_checkpoint)
    actions = command.add_subparsers(required=True, metavar="ACTION", dest="action")
    of_one = {"type": Path, "metavar": "DIR[/TAG]", "help": "a checkpoint, or a folder whose file latest names one"}
    info = actions.add_parser("info", help="print what a checkpoint holds", **with_examples("checkpoint info"))
    info.add_argument("source", **of_one)
    verify = actions.add_parser(
        "verify",
        help="read all of a checkpoint and check that nothing is missing or damaged",
        **with_examples("checkpoint verify"),
    )
    verify.add_argument("source", **of_one)
    export = actions.add_parser(
        "export", help="write a checkpoint in another format", **with_examples("checkpoint export")
    )
    export.add_argument("source", **of_one)
    export.add_argument("target", type=Path, metavar="TARGET", help="the new folder to write")
    export.add_argument("--format", choices=("safetensors", "deepspeed"), default="safetensors")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="safetensors: data type of the parameters (default: fp32)"
    )
    export.add_argument(
        "--max-shard-size",
        type=float,
        metavar="GB",
        help="safetensors: largest size of a file, in 10^9 bytes (default: 5)",
    )
    export.add_argument(
        "--pipeline-ranks", type=int, metavar="P", help="deepspeed: pipeline ranks of the run that will load it"
    )
    export.add_argument("--data-ranks", type=int, metavar="W", help="deepspeed: its data-parallel ranks")
    importing = actions.add_parser(
        "import",
        help="make a checkpoint from weights or from a stock DeepSpeed checkpoint",
        **with_examples("checkpoint import"),
    )
    importing.add_argument(
        "source", type=Path, metavar="SOURCE", help="a .safetensors file, a folder of them, or DeepSpeed's DIR[/TAG]"
    )
    importing.add_argument(
        "target",
        type=Path,
        metavar="DIR/TAG",
        help="a new folder, or an existing one, to which the source's name is added",
    )
    publishing = actions.add_parser(
        "publish",
        help="make a checkpoint from the newest live state that all ranks have",
        **with_examples("checkpoint publish"),
    )
    publishing.add_argument(
        "source", type=Path, metavar="FOLDER", help="the folder of live_checkpoint, with the files of all ranks"
    )
    publishing.add_argument(
        "target", type=Path, metavar="DIR/TAG", help="a new folder, or an existing one, to which the step is added"
    )
    for action in (info, verify, export, importing, publishing):
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_cluster_command(commands) -> None:
    command = commands.add_parser("cluster", help="describe a cluster of unlike networks")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    detect = actions.add_parser(
        "detect",
        help="measure all nodes of this job, started by torchrun, and write a file",
        **with_examples("cluster detect"),
    )
    detect.add_argument("file", type=Path, metavar="FILE", help="the cluster file to write on the first node")
    detect.set_defaults(run=_detect)


def _add_env_command(commands) -> None:
    command = commands.add_parser(
        "env", help="print what is installed and whether ds_lgamp can work with it", **with_examples("env")
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_env)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.explain and (options.ranks is not None or options.json):
        parser.error("--ranks and --json belong to --explain")
    if options.explain and options.measure is not None:
        parser.error("--explain trains nothing that --measure could measure; remove one of them")
    if options.explained is not None and (options.cluster is None or options.explain):
        parser.error("--explained belongs to --cluster, without --explain")
    from ds_lgamp.integrations.megatron.loop import run_script as megatron

    try:
        config, arguments = megatron.split_option(options.arguments)
    except ConfigError as error:
        parser.error(str(error))
    if config is not None:
        if options.explain or options.measure is not None:
            parser.error(f"--explain and --measure are for DeepSpeed's engine, not for a run with {megatron.OPTION}")
        if options.explained is not None:
            parser.error("--explained is for DeepSpeed's engine; flags of Megatron-LM say what its step sends")
        if options.cluster is not None:
            from ds_lgamp.cli.run_islands import of_flags, place_ranks

            place_ranks(options.cluster, partial(of_flags, arguments, config))
        # Megatron-LM takes its rank from the environment, so it needs no words of the launcher.
        return megatron.run_script(options.script, arguments, config)
    if options.cluster is not None and not options.explain:
        from ds_lgamp.cli.run_islands import dry_run, place_ranks

        place_ranks(options.cluster, partial(dry_run, options.script, arguments, options.explained))
    arguments = [*options.launcher_words, *arguments]
    from ds_lgamp.integrations.deepspeed.hook.run_script import explain_script, run_script

    if not options.explain:
        return run_script(options.script, arguments, options.measure)
    with _own_output() as output:
        lay_out = None
        if options.cluster is not None:
            from ds_lgamp.cli.run_islands import laid_out_on

            lay_out = partial(laid_out_on, options.cluster)
        return explain_script(options.script, arguments, options.ranks, options.json, output, lay_out)


def _checkpoint(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.action == "export":
        _check_export(parser, options)
    from ds_lgamp.cli.checkpoint import run_command

    with _own_output() as output:
        return run_command(options.action, options, output)


def _check_export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks that every option belongs to the format, and fills in defaults."""
    ranks, files = (options.pipeline_ranks, options.data_ranks), (options.dtype, options.max_shard_size)
    if options.format == "deepspeed":
        if files != (None, None):
            parser.error("--dtype and --max-shard-size belong to --format safetensors")
        if None in ranks or min(ranks) < 1:
            parser.error("--format deepspeed needs --pipeline-ranks and --data-ranks of at least 1")
        return
    if ranks != (None, None):
        parser.error("--pipeline-ranks and --data-ranks belong to --format deepspeed")
    options.dtype = options.dtype or "fp32"
    options.max_shard_size = 5.0 if options.max_shard_size is None else options.max_shard_size
    if not 0 < options.max_shard_size < float("inf"):
        parser.error(f"--max-shard-size is {options.max_shard_size:g}; use a size above 0, in 10^9 bytes")


def _detect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.cluster import detect

    try:
        with _own_output() as output:
            return detect(options.file, output)
    except ValueError as error:
        parser.error(str(error))


def _env(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.environment import run_env

    with _own_output() as output:
        return run_env(options.json, output)


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Keeps standard output for the command. Whatever scripts and libraries print in between goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", closefd=False) as output:
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _schedule(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        spec = _spec(options)
        durations = _durations(options)
    except ValueError as error:
        parser.error(str(error))
    program = build_program(spec)
    validate(spec, program)
    timeline = simulate(spec, program, durations)
    if options.svg is not None:
        try:
            options.svg.write_text(beside_1f1b(spec, timeline, durations))
        except OSError as error:
            parser.error(f"--svg is '{options.svg}', which cannot be written ({error.strerror}); name another file")
    report = _report(program, timeline)
    if options.json:
        json.dump(report, sys.stdout)
        print()
        return 0
    print(text_gantt(spec, timeline))
    print(f"step time {timeline.step_time:g}, bubble {timeline.bubble:.4f} of the ideal {timeline.ideal:g}")
    counts, exposed = ["gathers", "reduces"], ["exposed_gather_time", "exposed_reduce_time"]
    if options.node_shards:
        counts += ["refreshes", "combines"]
        exposed += ["exposed_refresh_time", "exposed_combine_time"]
    if not any((options.gather, options.reduce, options.refresh, options.combine)):
        exposed = []
    if options.offload:
        counts += ["loads", "stores"]
        exposed += ["exposed_load_time", "exposed_store_time"]
    for key in (*counts, *exposed, "peak_live_activations"):
        print(f"{key.replace('_', ' ')} by rank: {report[key]}")
    return 0


def _spec(options: argparse.Namespace) -> ProgramSpec:
    single_chunk = options.schedule in SINGLE_CHUNK_SCHEDULES
    chunks_per_rank = (1 if single_chunk else 4) if options.chunks_per_rank is None else options.chunks_per_rank
    placement = options.placement or default_placement(options.schedule)
    updates = options.updates or ("next_step" if options.offload else "step")
    # What the host updates is gathered in the next step, and so is what the device updates there.
    defers = options.zero_stage > 0 and (updates == "next_step" or options.offload is not None)
    micro_batches = options.micro_batches
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
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number from 1")
    return int(text)


def _count_or_all(text: str) -> int | None:
    """None means all."""
    return None if text == "all" else _count(text)


def _durations(options: argparse.Namespace) -> Durations:
    of_network = ("hop", "gather", "reduce", "refresh", "combine")
    names = ("forward", "backward", *of_network, "recompute", "update", "load", "store")
    if not options.offload and (options.load or options.store):
        raise ValueError("--load and --store belong to --offload; add it, or remove them")
    durations = Durations(**{name: getattr(options, name) for name in names})
    for name, duration in durations._asdict().items():
        if not 0 <= duration < float("inf"):
            raise ValueError(f"--{name} is {duration:g}; a duration is finite and not negative")
    return durations


def _report(program: Program, timeline: Timeline) -> dict:
    def count(kind: Kind) -> list[int]:
        return [sum(action.kind is kind for action in actions) for actions in program]

    return {
        "valid": True,
        "step_time": timeline.step_time,
        "bubble": timeline.bubble,
        "gathers": count(Kind.GATHER),
        "reduces": count(Kind.REDUCE),
        "refreshes": count(Kind.REFRESH),
        "combines": count(Kind.COMBINE),
        "loads": count(Kind.LOAD),
        "stores": count(Kind.STORE),
        "exposed_gather_time": timeline.exposed(Kind.GATHER),
        "exposed_reduce_time": timeline.exposed(Kind.REDUCE),
        "exposed_refresh_time": timeline.exposed(Kind.REFRESH),
        "exposed_combine_time": timeline.exposed(Kind.COMBINE),
        "exposed_load_time": timeline.exposed(Kind.LOAD),
        "exposed_store_time": timeline.exposed(Kind.STORE),
        "peak_live_activations": [peak_live_activations(actions) for actions in program],
        "program": {str(rank): [str(action) for action in actions] for rank, actions in enumerate(program)},
    }
