"""How much of a step the host's launches take: what CUDA graphs of chunks could save, and what they could not.

Each size is trained without recomputation by plain torch and by ds_lgamp. Steps by the clock come first, each with the
time after which the host has issued it: if that is most of the step, the device waits for the host. Then a profile of
one more step has, by kind of action, how many kernels and copies an action launches and how long the host takes, and
when the device is idle. The profiler slows the host, so only counts, and the device's own times, are exact in it.
"""

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import BASELINE, Contender, Layered, PlainTorch, Training
from benchmarks.gpt.process import free_memory, prepare_process, start_hosts
from benchmarks.gpt.sizes import SIZES, TINY, GptSize
from benchmarks.gpu import WARM_UP, write_trace
from benchmarks.gpu_day.equality import caught
from benchmarks.gpu_day.trace import Events, covered, kept
from benchmarks.record import OURS
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.schedule.actions import Action
from testing.ranks import run_on_ranks

STEPS = 10
SECONDS = 100
"""For a training in its process."""
CONTENDERS = (Contender(BASELINE, PlainTorch), Contender(OURS, partial(Layered, stage=3)))
SHORT = SIZES["125M"]._replace(samples=1, sequence=512)
"""Kernels that take hardly longer than their launches."""
LAUNCH = ("LaunchKernel", "MemcpyAsync", "MemsetAsync", "GraphLaunch")
"""Ends, or near ends, of the names of CUDA's calls that launch work."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    on_cpu = get_accelerator().device_name() == "cpu"
    sizes = {TINY: SIZES[TINY]} if on_cpu else {"125M, short": SHORT, "125M": SIZES["125M"], "1.3B": SIZES["1.3B"]}
    for name, size in sizes.items():
        for contender in CONTENDERS:
            trace = out / f"launches_{name}_{contender.name}.json.gz".replace(" ", "_")
            yield f"{contender.name}, {name}", caught(partial(measured, contender, size, trace))


def measured(contender: Contender, size: GptSize, trace: Path) -> dict[str, Any]:
    """Trains in a process of its own. Returns the times of its steps, and the figures of the trace."""
    (times,) = run_on_ranks(
        *(1, _train, contender, size, trace),
        seconds=SECONDS,
        before_init=prepare_process,
        backend=get_accelerator().communication_backend_name(),
    )
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    return {**times, **figures(timed), "file": kept(trace)}


def _train(contender: Contender, size: GptSize, trace: Path) -> dict[str, Any]:
    start_hosts()
    training = contender.build(size, "none", torch.device(get_accelerator().current_device_name()))
    times = [timed_step(training) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    write_trace(training, trace)
    finish_engines()
    del training
    free_memory()
    issued, whole = (median(each) for each in zip(*times))
    return {"seconds": whole, "issued after": issued, "issued after / seconds": issued / whole}


def timed_step(training: Training) -> tuple[float, float]:
    """Returns the seconds after which the host has issued a step, and those after which the device has done it."""
    get_accelerator().synchronize()
    begun = time.perf_counter()
    training.step()
    issued = time.perf_counter() - begun
    get_accelerator().synchronize()
    return issued, time.perf_counter() - begun


def figures(events: Events) -> dict[str, Any]:
    """Returns what the trace of a step says of launches.

    ``idle in computes`` is the share of the step in which the host is in a forward or a backward and the device has
    nothing to do: the most that graphs of chunks could save. A bare loop has no actions, and only ``idle``.
    """
    begin, end = min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = [event for event in events if _launches(event)]
    actions = [event for event in events if event.get("cat") == "user_annotation" and _kind(event["name"])]
    computes = [event for event in actions if _kind(event["name"]) in ("F", "B")]
    length = end - begin
    return {
        "launches": len(launches),
        "traced seconds": length / 1e6,
        "idle": 1 - covered(work) / length,
        **({"idle in computes": (covered([*work, *computes]) - covered(work)) / length} if computes else {}),
        "actions": by_kind(actions, launches),
    }


def by_kind(actions: Events, launches: Events) -> dict[str, dict[str, float]]:
    """Returns by kind of action: how many there are, and means of an action's launches and of the host's
    microseconds."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for action in actions:
        begin, end = action["ts"], action["ts"] + action["dur"]
        count = sum(begin <= launch["ts"] <= end for launch in launches)
        found[_kind(action["name"])].append((count, action["dur"]))
    return {
        kind: {"count": len(each), "launches": mean(count for count, _ in each), "us": mean(us for _, us in each)}
        for kind, each in found.items()
    }


def _launches(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and any(each in event["name"] for each in LAUNCH)


def _kind(name: str) -> str:
    """Returns the kind of the action that a range is; nothing if it is none."""
    try:
        return Action.parse(name).kind.value
    except ValueError:
        return ""
