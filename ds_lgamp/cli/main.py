"""The command line: ``ds_lgamp schedule``, ``plan``, ``view``, ``run``, ``checkpoint``, ``cluster`` and ``env``."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ds_lgamp.autoload import VARIABLE
from ds_lgamp.cli.steps import add_schedule_command, add_view_command
from ds_lgamp.cli.terminal import add_command, complete_paths, count, own_output, positive, refuse_options
from ds_lgamp.config import ConfigError
from ds_lgamp.version import __version__

_OF_TRAINING = ("measure", "trace", "trace_steps")
"""Options of ``run`` that watch a training."""
_OF_SEARCH = (
    *("batch_size", "tokens", "objective", "top", "plot", "write", "gpus", "host_memory", "disk", "sequence_length"),
    *("law", "rounded", "state", "adapters"),
)
"""Options that belong to --model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The deepspeed launcher puts --local_rank=k right after the module's name; it belongs to the script.
    launcher_words = []
    while words and words[0].startswith("--local_rank"):
        launcher_words.append(words.pop(0))
    options = command_line().parse_args(words)
    options.launcher_words = launcher_words
    return options.run(options.parser, options)


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="ds_lgamp",
        description="Layered gradient accumulation and modular pipeline parallelism for DeepSpeed and Megatron-core.",
        epilog="ds_lgamp COMMAND --help has examples.",
    )
    parser.add_argument("--version", action="version", version=f"ds_lgamp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_schedule_command(commands)
    _add_plan_command(commands)
    add_view_command(commands)
    _add_run_command(commands)
    _add_checkpoint_command(commands)
    _add_cluster_command(commands)
    _add_env_command(commands)
    complete_paths(parser)
    return parser


def _add_plan_command(commands: Any) -> None:
    command = add_command(commands, "plan", "find the fastest configuration for a model on a cluster", run=_plan)
    task = command.add_mutually_exclusive_group(required=True)
    task.add_argument(
        "--model",
        metavar="NAME|FILE|FLAGS",
        help="rank configurations of this model: gpt3-175b, llama-8b, a config.json of transformers, flags of "
        "Megatron-LM, ...",
    )
    task.add_argument(
        "--runs", type=Path, metavar="FILE", help="predict given ones: CSV, one per row; - is standard input"
    )
    task.add_argument(
        "--calibrate", action="store_true", help="measure this machine, and write the file that --cluster names"
    )
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--cluster", metavar="NAME|FILE", help="such as a100 or a100-25gbit, or a JSON file")
    place.add_argument("--here", action="store_true", help="measure this machine first, and plan for its GPUs")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--gpus", type=count, metavar="N", help="GPUs of a cluster given by name, or of this machine")
    command.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="memory of the host of one node, such as '128 GB' (default: the cluster's)",
    )
    command.add_argument(
        "--disk",
        metavar="RATE",
        help="plan also with a disk in every node that reads and writes so much at once, such as '5 GB/s'",
    )
    _add_search(command)


def _add_search(command: argparse.ArgumentParser) -> None:
    """Adds what only a search for a model's plans takes."""
    command.add_argument("--batch-size", type=count, metavar="B", help="sequences of a step, over all GPUs")
    command.add_argument("--sequence-length", type=count, metavar="S", help="default: what the model says")
    command.add_argument("--tokens", type=positive, help="tokens to train on, such as 300e9; tells days and cost")
    command.add_argument(
        "--objective", choices=("time", "cost", "memory"), help="what the best plan has least of (default: time)"
    )
    command.add_argument("--top", type=count, metavar="K", help="how many plans to print (default: 10)")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the step over the network's bandwidth as SVG")
    command.add_argument(
        "--write", type=Path, metavar="DIR", help="write ds_config.json and launch.sh of the best plan"
    )
    command.add_argument(
        "--rounded",
        type=int,
        nargs="?",
        const=8,
        choices=(8, 4),
        help="plan also with weights in 8 bits, gradients in so many (default: 8) and hidden states in fp8 while they "
        "travel, where that shortens a step",
    )
    command.add_argument(
        "--state",
        choices=("fp32", "bf16", "8bit"),
        help="type of the optimizer's state and of the weights that it updates; bf16, rounded by chance, takes 8 bytes "
        "per parameter in place of 16 to 18; 8bit, moments of bitsandbytes beside weights in fp32, takes 10 to 12; "
        "both change results (default: fp32)",
    )
    command.add_argument(
        "--adapters",
        type=count,
        metavar="R",
        help="plan for adapters of this rank on frozen weights, as peft makes them with target_modules='all-linear'",
    )
    command.add_argument(
        "--law",
        choices=("kaplan", "width"),
        help="in place of --batch-size: find the shortest training at the critical batch of this scaling law",
    )


def _add_run_command(commands) -> None:
    meaning = "run an unedited DeepSpeed or Megatron-LM script with its ds_lgamp block"
    command = add_command(commands, "run", meaning, run=_run)
    command.add_argument(
        "--block",
        metavar="BLOCK",
        help="the block, as JSON or the file that holds it, for scripts that make their configuration themselves",
    )
    command.add_argument("--measure", metavar="FILE", help="write losses, times, traffic and peak memory as JSON")
    command.add_argument("--trace", metavar="DIR", help="record what ranks do in some steps: docs/tracing.md")
    command.add_argument("--trace-steps", metavar="A:B", help="the first and last step to record (default: 10:12)")
    command.add_argument(
        "--explain",
        action="store_true",
        help="stop at deepspeed.initialize and print what every rank would hold and send, of divided experts too",
    )
    command.add_argument(
        "--ranks", type=count, metavar="N", help="with --explain: ranks of the job (default: WORLD_SIZE, else 1)"
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
    command.add_argument("script", metavar="SCRIPT", help="path of the script")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def _add_checkpoint_command(commands) -> None:
    command = commands.add_parser("checkpoint", help="inspect, verify and convert checkpoints")
    command.set_defaults(run=_checkpoint, parser=command)
    actions = command.add_subparsers(required=True, metavar="ACTION", dest="action")
    one = "a checkpoint, or a folder whose file latest names one"
    readers = {
        "info": "print what a checkpoint holds",
        "verify": "read all of a checkpoint and check that nothing is missing or damaged",
    }
    for name, meaning in readers.items():
        reader = add_command(actions, f"checkpoint {name}", meaning)
        reader.add_argument("source", type=Path, metavar="DIR[/TAG]", help=one)
    export = add_command(actions, "checkpoint export", "write a checkpoint in another format")
    export.add_argument("source", type=Path, metavar="DIR[/TAG]", help=one)
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
    _add_makers(actions)
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_makers(actions) -> None:
    """Adds the actions that make checkpoints."""
    meaning = "make a checkpoint from weights or from a stock DeepSpeed checkpoint"
    importing = add_command(actions, "checkpoint import", meaning)
    importing.add_argument(
        "source", type=Path, metavar="SOURCE", help="a .safetensors file, a folder of them, or DeepSpeed's DIR[/TAG]"
    )
    importing.add_argument(
        "target",
        type=Path,
        metavar="DIR/TAG",
        help="a new folder, or an existing directory of checkpoints, where the source's name is the tag",
    )
    meaning = "make a checkpoint from the newest live state that all ranks have"
    publishing = add_command(actions, "checkpoint publish", meaning)
    publishing.add_argument(
        "source", type=Path, metavar="FOLDER", help="the folder of live_checkpoint, with the files of all ranks"
    )
    publishing.add_argument(
        "target", type=Path, metavar="DIR", help="the directory of checkpoints, which gets DIR/global_stepN"
    )


def _add_cluster_command(commands) -> None:
    command = commands.add_parser("cluster", help="describe a cluster with different networks")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    meaning = "measure all nodes of this job, started by torchrun, and write a file"
    detect = add_command(actions, "cluster detect", meaning, run=_detect)
    detect.add_argument("file", type=Path, metavar="FILE", help="the cluster file to write on the first node")
    detect.add_argument("--json", action="store_true", help="print JSON")


def _add_env_command(commands) -> None:
    meaning = "print what is installed and whether ds_lgamp can work with it"
    add_command(commands, "env", meaning, run=_env).add_argument("--json", action="store_true", help="print JSON")


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.model is None:
        refuse_options(parser, options, _OF_SEARCH, "{} belongs to --model; remove it")
        if options.here:
            parser.error("--here belongs to --model; give --cluster")
    try:
        if options.runs is not None:
            from ds_lgamp.cli.predictions import predict_runs

            return predict_runs(options.runs, options.cluster, options.json)
        if options.calibrate:
            from ds_lgamp.cli.cluster import calibrate_cluster

            with own_output() as output:
                return calibrate_cluster(Path(options.cluster), options.json, output)
        return _search(parser, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _search(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.plan_search import run_search
    from ds_lgamp.cli.predictions import run_shortest
    from ds_lgamp.planner.cluster import GPUS_PER_NODE, has_islands, read_cluster, with_part
    from ds_lgamp.planner.models import read_model

    model = read_model(options.model, options.sequence_length)
    if options.adapters is not None:
        refuse_options(parser, options, ("law", "rounded"), "{} does not go with --adapters; remove one of them")
        model = model.adapted(options.adapters)
    if not options.here and has_islands(options.cluster):
        return _search_islands(parser, options, model)
    if options.here:
        from ds_lgamp.cli.cluster import here

        cluster = here()
    else:
        cluster = read_cluster(options.cluster, options.gpus or GPUS_PER_NODE)
    cluster = with_part(cluster, options.gpus, options.host_memory, options.disk)
    if options.law is not None:
        others = ("batch_size", "gpus", "objective", "top", "plot", "write", "rounded", "state")
        refuse_options(parser, options, others, "{} does not go with --law, which looks for the shortest training")
        if options.tokens is None:
            parser.error("--law needs --tokens, such as 300e9")
        return run_shortest(model, cluster, options.tokens, options.law, options.json)
    _complete(parser, options)
    return run_search(options, model, cluster)


def _search_islands(parser: argparse.ArgumentParser, options: argparse.Namespace, model: Any) -> int:
    from ds_lgamp.cli.plan_search import search_on_islands
    from ds_lgamp.planner.islands import read_islands

    others = ("law", "plot", "gpus", "host_memory", "disk", "rounded", "state", "adapters")
    refuse_options(parser, options, others, f"{{}} does not go with islands, as {options.cluster} has; remove it")
    if options.objective not in (None, "time"):
        parser.error(f"--objective is '{options.objective}', but plans for islands are ranked by time; remove it")
    _complete(parser, options)
    return search_on_islands(options, model, read_islands(options.cluster))


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks that the batch is given, and fills in defaults."""
    if options.batch_size is None:
        parser.error("--model needs --batch-size, the sequences of a step over all GPUs")
    options.objective, options.top = options.objective or "time", options.top or 10


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.explain and (options.ranks is not None or options.json):
        parser.error("--ranks and --json belong to --explain")
    if options.explain:
        refuse_options(parser, options, _OF_TRAINING, "--explain trains nothing that {} could see; remove one of them")
    if options.explained is not None and (options.cluster is None or options.explain):
        parser.error("--explained belongs to --cluster, without --explain")
    from ds_lgamp.integrations.megatron.loop import run_script as megatron

    try:
        config, arguments = megatron.split_option(options.arguments)
    except ConfigError as error:
        parser.error(str(error))
    traced = {"trace": options.trace, "trace_steps": options.trace_steps}
    keys = {key: value for key, value in traced.items() if value is not None}
    if config is not None:
        return _run_megatron(parser, options, arguments, config, keys)
    if options.block is not None:
        os.environ[VARIABLE] = options.block
    if options.cluster is not None and not options.explain:
        from ds_lgamp.cli.cluster import dry_run, place_ranks

        place_ranks(options.cluster, partial(dry_run, options.script, arguments, options.explained))
    arguments = [*options.launcher_words, *arguments]
    if not options.explain:
        from ds_lgamp.integrations.deepspeed.hook.run_script import run_script

        return run_script(options.script, arguments, options.measure, keys)
    from ds_lgamp.integrations.deepspeed.hook.run_script import explain_script

    with own_output() as output:
        lay_out = None
        if options.cluster is not None:
            from ds_lgamp.cli.cluster import laid_out_on

            lay_out = partial(laid_out_on, options.cluster)
        return explain_script(options.script, arguments, options.ranks, options.json, output, lay_out)


def _run_megatron(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    arguments: list[str],
    config: str,
    keys: dict[str, str],
) -> NoReturn:
    """Runs a script of Megatron-LM with the block of the file ``config``, some of whose ``keys`` are replaced."""
    from ds_lgamp.integrations.megatron.loop import run_script as megatron

    if options.explain or options.measure is not None:
        parser.error(f"--explain and --measure are for DeepSpeed's engine, not for a run with {megatron.OPTION}")
    if options.block is not None:
        parser.error(f"--block is for DeepSpeed's engine; write the block into the file of {megatron.OPTION}")
    if options.explained is not None:
        parser.error("--explained is for DeepSpeed's engine; flags of Megatron-LM say what its step sends")
    if options.cluster is not None:
        from ds_lgamp.cli.cluster import of_flags, place_ranks

        place_ranks(options.cluster, partial(of_flags, arguments, config))
    # Megatron-LM takes its rank from the environment, so it needs no words of the launcher.
    megatron.run_script(options.script, arguments, config, keys)


def _checkpoint(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.checkpoint import check_export, run_command

    if options.action == "export":
        check_export(parser, options)
    with own_output() as output:
        return run_command(options.action, options, output)


def _detect(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.cluster import detect

    try:
        with own_output() as output:
            return detect(options.file, options.json, output)
    except ValueError as error:
        parser.error(str(error))


def _env(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.environment import run_env

    with own_output() as output:
        return run_env(options.json, output)
