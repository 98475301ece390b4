"""``ds_lgamp plan``: its options. Imports what they need only when they are given."""

import argparse
import math
from pathlib import Path
from typing import Any

from ds_lgamp.cli.terminal import count, own_output, with_examples

_OF_SEARCH = ("batch_size", "tokens", "objective", "top", "plot", "write", "gpus", "sequence_length", "law")
"""Options that belong to --model."""


def add_plan_command(commands: Any) -> None:
    """Adds the command to the subparsers of ``ds_lgamp``."""
    command = commands.add_parser(
        "plan", help="find the fastest configuration for a model on a cluster", **with_examples("plan")
    )
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
    command.add_argument(
        "--cluster", required=True, metavar="NAME|FILE", help="such as a100 or a100-25gbit, or a JSON file"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--gpus", type=count, metavar="N", help="GPUs of a cluster given by name (default: one node)")
    command.add_argument("--batch-size", type=count, metavar="B", help="sequences of a step, over all GPUs")
    command.add_argument("--sequence-length", type=count, metavar="S", help="default: what the model says")
    command.add_argument("--tokens", type=_positive, help="tokens to train on, such as 300e9; tells days and cost")
    command.add_argument(
        "--objective", choices=("time", "cost", "memory"), help="what the best plan has least of (default: time)"
    )
    command.add_argument("--top", type=count, metavar="K", help="how many plans to print (default: 10)")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the step over the network's bandwidth as SVG")
    command.add_argument(
        "--write", type=Path, metavar="DIR", help="write ds_config.json and launch.sh of the best plan"
    )
    command.add_argument(
        "--law",
        choices=("kaplan", "width"),
        help="in place of --batch-size: find the shortest training at the critical batch of this scaling law",
    )
    command.set_defaults(run=_plan, parser=command)


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.model is None:
        for name in _OF_SEARCH:
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} belongs to --model; remove it")
    try:
        if options.runs is not None:
            from ds_lgamp.cli.plan_search import predict_runs

            return predict_runs(options.runs, options.cluster, options.json)
        if options.calibrate:
            from ds_lgamp.cli.cluster import calibrate_cluster

            with own_output() as output:
                return calibrate_cluster(Path(options.cluster), options.json, output)
        return _search(parser, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _search(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from ds_lgamp.cli.plan_search import run_search, run_shortest
    from ds_lgamp.planner.cluster import GPUS_PER_NODE, has_islands, read_cluster
    from ds_lgamp.planner.models import read_model

    model = read_model(options.model, options.sequence_length)
    if has_islands(options.cluster):
        return _search_islands(parser, options, model)
    cluster = read_cluster(options.cluster, options.gpus or GPUS_PER_NODE)
    if options.gpus not in (None, cluster.gpus):
        parser.error(f"--gpus is {options.gpus}, but {options.cluster} has {cluster.gpus}; use a multiple of a node")
    if options.law is not None:
        for name in ("batch_size", "gpus", "objective", "top", "plot", "write"):
            if getattr(options, name) is not None:
                parser.error(
                    f"--{name.replace('_', '-')} does not go with --law, which looks for the shortest training"
                )
        if options.tokens is None:
            parser.error("--law needs --tokens, such as 300e9")
        return run_shortest(model, cluster, options.tokens, options.law, options.json)
    _complete(parser, options)
    return run_search(options, model, cluster)


def _search_islands(parser: argparse.ArgumentParser, options: argparse.Namespace, model: Any) -> int:
    from ds_lgamp.cli.plan_search import search_on_islands
    from ds_lgamp.planner.islands import read_islands

    for name in ("law", "plot", "gpus"):
        if getattr(options, name) is not None:
            parser.error(f"--{name} does not go with islands, as {options.cluster} has; remove it")
    if options.objective not in (None, "time"):
        parser.error(f"--objective is '{options.objective}', but plans for islands are ranked by time; remove it")
    _complete(parser, options)
    return search_on_islands(options, model, read_islands(options.cluster))


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks that the batch is given, and fills in defaults."""
    if options.batch_size is None:
        parser.error("--model needs --batch-size, the sequences of a step over all GPUs")
    options.objective, options.top = options.objective or "time", options.top or 10


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number above 0")
    return number
