"""A trace of one step, what it shows in numbers, and the trace itself if it is small enough to carry."""

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from benchmarks.gpt.contenders import CONTENDERS
from benchmarks.gpt.sizes import LARGE, SIZES, TINY
from benchmarks.gpu import PROCESS_SECONDS, measure
from benchmarks.record import OURS

LARGEST = 16 * 2**20
"""Bytes of a trace that is kept."""
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls in which the host waits for the device. cudaMemcpyAsync is none."""
TRACED = f"{OURS}, ZeRO-3"

Events = list[dict[str, Any]]
"""Events of a Chrome trace. Times and durations are in microseconds."""


def run(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    name = TINY if get_accelerator().device_name() == "cpu" else LARGE[0]
    contender = next(contender for contender in CONTENDERS if contender.name == TRACED)
    path = out / f"trace_{name}.json.gz"
    deadline = time.monotonic() + PROCESS_SECONDS
    measured = measure(contender, SIZES[name]._replace(recompute=("full",)), deadline, path)["full"]
    yield name, measured
    if "failure" in measured:
        return
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    # The profiler's own span is no part of the step.
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    yield "step", {"file": kept(path), **figures(timed)}


def kept(path: Path) -> str:
    """Returns the trace's name. Removes a trace that is too large."""
    size = path.stat().st_size
    if size <= LARGEST:
        return path.name
    path.unlink()
    return f"removed: {size} bytes"


def figures(events: Events) -> dict[str, Any]:
    """Returns seconds of the step, the share in which a kernel ran, kernels by total time, and waits of the host by
    action."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    begin, end = min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)
    times: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"]
    return {
        "seconds": (end - begin) / 1e6,
        "busy": covered(kernels) / (end - begin),
        "kernels": len(kernels),
        "longest kernels, ms": {name: duration / 1e3 for name, duration in times.most_common(10)},
        "host waits, ms": waits(events),
    }


def covered(events: Events) -> float:
    """Microseconds in which at least one of the events goes on."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total


def waits(events: Events) -> dict[str, float]:
    """Milliseconds of the host's waits, by call and by the ranges around it, such as an action and the optimizer."""
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    found: Counter[str] = Counter()
    for event in events:
        if event["name"] in WAITS:
            found[f"{event['name']} in {around(ranges, event['ts'])}"] += event["dur"] / 1e3
    return dict(found.most_common())


def around(ranges: Events, time: float) -> str:
    """Names of the ranges at a time, the longest first. Autograd may call from threads of its own, so the thread does
    not count."""
    found = [event for event in ranges if event["ts"] <= time <= event["ts"] + event["dur"]]
    return " > ".join(event["name"] for event in sorted(found, key=lambda event: -event["dur"])) or "no action"
