"""Cluster files: ``ds_lgamp plan --calibrate`` and ``ds_lgamp cluster detect`` measure machines and write them, and
``ds_lgamp run --cluster`` gives every process its rank and its networks by one, before a script starts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from ds_lgamp.cli.terminal import at_work, why_not_writable
from ds_lgamp.config import ConfigError
from ds_lgamp.cost.assignment import Assignment, Demand
from ds_lgamp.fields import read_json, with_unit
from ds_lgamp.integrations import cluster_file
from ds_lgamp.integrations.cluster_file import install_transports
from ds_lgamp.integrations.user_script import failures_end_the_process
from ds_lgamp.partition.agreement import everyone, raise_everywhere
from ds_lgamp.planner.assign import Presence, as_launched, assign, places_of, ranked
from ds_lgamp.planner.cluster import Cluster, Link, named_cluster, parse_cluster
from ds_lgamp.planner.island_search import Exposed, exposed
from ds_lgamp.planner.islands import IslandCluster, Node, cluster_text, read_islands
from ds_lgamp.planner.load import demand_of_facts, megatron_demand
from ds_lgamp.runtime.node import (
    Calibration,
    calibrate,
    interfaces,
    link_between,
    measure_nodes,
    network_kind,
    node_name,
    own_interface,
)
from ds_lgamp.schedule.spec import ProgramSpec
from ds_lgamp.watch.launcher import Launch, launcher_hosts_store, node_number, require_launcher
from ds_lgamp.watch.this_rank import this_rank

if TYPE_CHECKING:
    # DeepSpeed, which this imports, is imported late: it may be missing, and takes seconds.
    from ds_lgamp.integrations.deepspeed.explain.facts import LaidOut

_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "CROSS_", "MASTER_", "TORCHELASTIC_")
"""Prefixes of a launcher's variables. A dry run starts without them."""
_DRY_RUN = timedelta(hours=1)


def place_ranks(path: str, demand_of: Callable[[Launch], Demand]) -> None:
    """Gives this process its rank and its networks, as :func:`assigned` chooses them. An error ends the process."""
    with failures_end_the_process():
        this_rank.assignment = assigned(path, demand_of)
        # Never closed: the process keeps its networks until it ends.
        install_transports(ExitStack())


def assigned(path: str, demand_of: Callable[[Launch], Demand]) -> Assignment:
    """Chooses the rank of this process, and sets ``RANK`` before anything is initialised. Collective over all processes
    of the job; every one raises the same ConfigError.

    Args:
        demand_of: returns what a step of the job sends, the same in every process; may raise ValueError in all of them.
    """
    try:
        cluster = read_islands(path)
        launch = this_rank.launch = Launch()
        own = Presence(node_name(), node_number(), launch.gpu, tuple(interfaces()))
        places = places_of(cluster, [Presence(*json.loads(text)) for text in launch.everyone(json.dumps(own))])
        demand = demand_of(launch)
        # The process that hosts the store stays rank 0, because all processes look for the store there.
        assignment = assign(cluster, demand, None if launcher_hosts_store() else places[0])
    except ValueError as error:
        raise ConfigError(f"--cluster is {path}: {error}") from None
    place = places[launch.rank]
    rank = assignment.rank_of[place]
    os.environ["RANK"] = str(rank)
    if "ROLE_RANK" in os.environ:
        os.environ["ROLE_RANK"] = str(rank)
    for name, value in _environment(cluster, place.island).items():
        os.environ.setdefault(name, value)
    if rank == 0:
        seconds = [sum(each.seconds.values()) for each in (assignment, as_launched(cluster, demand, places))]
        print(
            f"ds_lgamp: {assignment.order}. Its messages take {seconds[0]:.3g} s per step, {seconds[1]:.3g} s in the "
            "launcher's order",
            file=sys.stderr,
        )
    return assignment


def dry_run(script: str, arguments: Sequence[str], explained: Path | None, launch: Launch) -> Demand:
    """Returns what the step of a DeepSpeed script sends. Rank 0 runs ``--explain`` for that, unless ``explained`` is
    what it printed before."""

    def facts() -> str:
        if explained is not None:
            return _text_of(explained)
        return _explained(script, arguments, launch.ranks)

    try:
        return demand_of_facts(json.loads(launch.from_first(facts, _DRY_RUN)))
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError("--explained is not what ds_lgamp run --explain --json prints; write it anew") from None


def of_flags(arguments: Sequence[str], config: str, launch: Launch) -> Demand:
    """Returns what the step of a Megatron-LM script with the configuration file ``config`` sends."""
    from ds_lgamp.integrations.megatron.loop.run_script import read_config

    return megatron_demand(arguments, read_config(config), launch.ranks)


def laid_out_on(path: str, facts: Mapping[str, Any]) -> "LaidOut":
    """Returns how ranks would be laid out on the cluster file ``path``. Raises ConfigError if they cannot be."""
    from ds_lgamp.integrations.deepspeed.explain.facts import LaidOut

    try:
        cluster = read_islands(path)
        demand = demand_of_facts(facts)
        chosen, *others = ranked(cluster, demand)
        launched = as_launched(cluster, demand, cluster.slots)
        times = _exposed(cluster, chosen, demand, facts)
    except ValueError as error:
        raise ConfigError(f"--cluster is {path}: {error}") from None
    return LaidOut(
        cluster.name,
        [island.name for island in cluster.islands],
        demand,
        all(rank["hop_bytes"] is not None for rank in facts["ranks"]),
        chosen,
        [*others, launched],
        times.network,
        times.step,
        times.exposed,
    )


def _exposed(cluster: IslandCluster, assignment: Assignment, demand: Demand, facts: Mapping[str, Any]) -> Exposed:
    """Returns what the clock says of the program that ``facts`` describe."""
    owned = {chunk["chunk"]: (rank["pipeline_rank"], chunk) for rank in facts["ranks"] for chunk in rank["chunks"]}
    chunks = [owned[number] for number in range(facts["chunks"])]
    spec = ProgramSpec(
        placement=tuple(rank for rank, _ in chunks),
        schedule=facts["schedule"],
        micro_batches=facts["micro_batches"],
        micro_batch_group=facts["micro_batch_group"],
        zero_stage=facts["zero_stage"],
        resident_chunks=facts["resident_chunks"],
        defers_gathers=facts["defers_gathers"],
        updates=facts["updates"],
        hierarchy=demand.hierarchy,
        recomputes=facts["recompute"] == "full",
        first_trained=facts["first_trained"],
        returns_outputs=facts["returns_outputs"],
        stores_weights=facts["stores_weights"],
    )
    parameters, flops = ([chunk[name] for _, chunk in chunks] for name in ("parameters", "forward_flops"))
    return exposed(cluster, assignment, demand, spec, parameters, flops)


def _environment(cluster: IslandCluster, island: int) -> dict[str, str]:
    """Returns the variables of a node of ``island``. They hold for the whole process; groups choose networks by
    options."""
    outside = cluster.outside(island).interface
    sockets = {} if outside is None else dict.fromkeys(("NCCL_SOCKET_IFNAME", cluster_file.GLOO_INTERFACE), outside)
    return {**sockets, **cluster.islands[island].environment}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def _explained(script: str, arguments: Sequence[str], ranks: int) -> str:
    """Returns the JSON of a dry run. Raises ValueError with the last line of one that fails."""
    words = ["-m", "ds_lgamp", "run", "--explain", "--json", "--ranks", str(ranks), script, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHER)}
    dry = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if dry.returncode:
        last = (dry.stderr.strip().splitlines() or ["without a word"])[-1]
        raise ValueError(f"the dry run that counts what the script sends failed: {last}")
    return dry.stdout


def calibrate_cluster(path: Path, as_json: bool, output: TextIO) -> int:
    """Measures, and writes ``path``. Rank 0 writes and prints. Returns the exit status.

    Under torchrun, all ranks measure links too. What cannot be measured stays as the file has it; a new file gets the
    links of the ready cluster a100, and standard error says which ones to correct.

    Raises ValueError, before it measures, if the file exists and is no cluster file, or cannot be written.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    text = {}
    if rank == 0:
        text, complaint = _existing(path), why_not_writable(path)
        if complaint is not None:
            raise ValueError(f"--cluster is {complaint}")
    device = _begin(ranks)
    with at_work("measuring this machine"):
        found = calibrate(device)
    if rank == 0:
        text = merged(text, found)
        path.write_text(json.dumps(text, indent=2) + "\n")
        output.write(json.dumps(text) + "\n" if as_json else f"{path}:\n{json.dumps(text, indent=2)}\n")
    if ranks > 1:
        dist.destroy_process_group()
    return 0


def here() -> Cluster:
    """Measures this machine and returns it as a cluster of one node. Raises ValueError if it has no accelerator."""
    device = _begin(1)
    if device.type == "cpu":
        raise ValueError("--here finds no GPU on this machine; name one with --cluster, such as rtx4090")
    gpus = device_count(device)
    with at_work("measuring this machine"):
        found = calibrate(device)
        if gpus > 1:
            found = found._replace(ranks_per_node=gpus, inside=link_between(device, torch.device(device.type, 1)))
    # It has one node, and with one GPU no link inside it either.
    own = {"name": "this machine", "between": _link(1e9, 1e-5), "inside": _link(1e9, 1e-5)}
    return parse_cluster(merged(own, found))


def device_count(device: torch.device) -> int:
    """Returns how many devices of that kind this process sees."""
    return int(torch.get_device_module(device).device_count())


def _begin(ranks: int = 2) -> torch.device:
    """Returns the device of this process. Initialises ``torch.distributed`` if there are several ``ranks``."""
    # Imported late: it may be missing, and takes seconds.
    from deepspeed.accelerator import get_accelerator

    accelerator, number = get_accelerator(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(accelerator.device_name(number))
    if device.type != "cpu":
        accelerator.set_device(number)
    if ranks > 1:
        dist.init_process_group(accelerator.communication_backend_name() if device.type != "cpu" else "gloo")
    return device


def merged(text: dict[str, Any], found: Calibration) -> dict[str, Any]:
    """Returns the cluster file ``text`` with what was ``found`` in place of what it said."""
    text = {"name": "measured", **text}
    text["nodes"] = max(found.nodes, text.get("nodes", 1))
    text["gpus_per_node"] = max(found.ranks_per_node, text.get("gpus_per_node", 1))
    text["peak"] = with_unit(found.flops, "FLOP/s")
    text["memory"] = with_unit(found.memory, "B")
    text["memory_bandwidth"] = with_unit(found.memory_bandwidth, "B/s")
    if found.host is not None:
        text["host"] = {
            "memory": with_unit(found.host.memory, "B"),
            "memory_bandwidth": with_unit(found.host.memory_bandwidth, "B/s"),
            "bus": with_unit(found.host.bus, "B/s"),
        }
    assumed = named_cluster("a100")
    for name, link in (("inside", found.inside), ("between", found.between)):
        if link is not None:
            text[name] = {**text.get(name, {}), **_link(link.bandwidth, link.latency)}
        elif name not in text:
            ready = getattr(assumed, name)
            text[name] = _link(ready.bandwidth, ready.latency)
            if name == "between":
                text[name]["cards_per_node"] = assumed.cards_per_node
            print(f"{name} was not measured: the file has that of {assumed.name}; correct it", file=sys.stderr)
    # The rates above were reached, so nothing remains to be lost but what small products lose.
    reached = {"matmul": 1.0, "memory": 1.0, "dimension": round(found.half_size, 1)}
    if found.host is not None:
        reached |= {"bus": 1.0, "host_memory": 1.0}
    if found.between is not None:
        reached["between"] = 1.0
    if found.gather_inside is not None:
        reached["inside"] = round(min(1.0, found.gather_inside), 3)
    text["efficiency"] = {**text.get("efficiency", {}), **reached}
    return text


def _link(bandwidth: float, latency: float) -> dict[str, Any]:
    return {"bandwidth": with_unit(bandwidth, "B/s"), "latency": with_unit(latency, "s")}


def _existing(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    text = read_json(path, "--cluster")
    if "islands" in text:
        raise ValueError(
            f"--cluster is '{path}', which has islands, but --calibrate describes nodes that are alike; name another "
            "file, and copy its peak, memory and memory_bandwidth"
        )
    for key in ("nodes", "gpus_per_node"):
        if not isinstance(text.get(key, 1), int):
            raise ValueError(f"--cluster is '{path}', whose {key} is {text[key]!r}; write a whole number")
    return text


def detect(path: Path, as_json: bool, output: TextIO) -> int:
    """Measures, and writes ``path``. Collective over all ranks that a launcher started. Rank 0 writes and prints.
    Returns the exit status.

    Raises ValueError on every rank, before it measures, if the file exists or cannot be written, or if no launcher has
    set the environment.
    """
    require_launcher()
    device = _begin()
    try:
        raise_everywhere(_complaint_about(path) if dist.get_rank() == 0 else None, ValueError)
        with at_work("measuring every pair of nodes"):
            measured = measure_nodes(device)
        interface = own_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        facts = {node: rest for node, *rest in everyone((node_name(), network_kind(), interface))}
        flops: Sequence[float | None] = measured.flops or [None] * len(measured.nodes)
        nodes = [
            Node(name, gpus, facts[name][0], speed, facts[name][1])
            for name, gpus, speed in zip(measured.nodes, measured.ranks_per_node, flops)
        ]
        links = {frozenset(pair): Link(*rate) for pair, rate in measured.links.items()}
        text = cluster_text(nodes, links, None if measured.inside is None else Link(*measured.inside))
        if dist.get_rank() == 0:
            path.write_text(json.dumps(text, indent=2) + "\n")
            output.write(json.dumps(text) + "\n" if as_json else f"{path}:\n{json.dumps(text, indent=2)}\n")
    finally:
        dist.destroy_process_group()
    return 0


def _complaint_about(path: Path) -> str | None:
    if path.exists():
        return f"{path} exists; name another file"
    complaint = why_not_writable(path)
    return None if complaint is None else f"FILE is {complaint}"
