"""What the block can do, one trial each: trainings of a few steps whose losses have to be plain torch's."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.gpt.contenders import Layered
from benchmarks.gpt.process import free_memory, start_hosts
from benchmarks.gpu_day.equality import PRECISIONS, STEPS, compared, device, expected_losses, losses_of, size
from benchmarks.gpu_day.layouts import Layout
from benchmarks.gpu_day.own_loops import LOOPS
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.view.recording import read_recording

FOLDER = "FOLDER"
"""Stands for the trial's folder in a configuration."""
OFFLOADED = ("offload_optimizer", "offload_param")
CLIPPING = {"gradient_clipping": 1e6}
"""No norm is so large, so that nothing is clipped. But no update may begin before the norm is known."""

Expected = dict[str, list[float]]
"""Losses of plain torch by precision."""
Found = dict[str, Any]
Trial = Callable[[Layout, Expected, Path], Found]
"""Trains on this rank. Its folder is empty, and all ranks have the same."""


def losses_of_plain_torch() -> Expected:
    start_hosts()
    return {precision: expected_losses(precision) for precision in PRECISIONS}


def configured(
    layout: Layout,
    expected: Expected,
    folder: Path,
    more: Mapping[str, Any],
    stage: int = 3,
    precision: str = "bf16",
    recompute: str = "full",
) -> Found:
    """Trains with ``more`` in the configuration."""
    more = json.loads(json.dumps(more).replace(FOLDER, str(folder)))
    dtype, _ = PRECISIONS[precision]
    training = Layered(size(), recompute, device(), stage, layout.pipeline_ranks, dtype, more=more)
    found = compared(losses_of(training), expected[precision], precision)
    finish_engines()
    return found


def recorded(layout: Layout, expected: Expected, folder: Path) -> Found:
    """Records two steps. Keeps the recording beside the results of the part."""
    kept = folder.parent.parent / f"recording_{layout.pipeline_ranks}_{layout.data_ranks}"
    found = configured(layout, expected, kept, {"ds_lgamp": {"trace": FOLDER, "trace_steps": "3:4"}})
    dist.barrier()
    steps = [step.step for step in read_recording(kept).ranks[dist.get_rank()].steps]
    return found if steps == [3, 4] else {**found, "failure": f"the recording has steps {steps}"}


def resumed(layout: Layout, expected: Expected, folder: Path) -> Found:
    """Saves after two steps, trains on, and trains on again in another engine, from the checkpoint."""
    training, again = (Layered(size(), "full", device(), 3, layout.pipeline_ranks) for _ in range(2))
    before = [float(training.step()) for _ in range(2)]
    training.engine.save_checkpoint(str(folder))
    after = [float(training.step()) for _ in range(STEPS - 2)]
    finish_engines()
    again.engine.load_checkpoint(str(folder))
    losses = [float(again.step()) for _ in range(STEPS - 2)]
    return compared([*before, *after, *losses], [*expected["bf16"], *expected["bf16"][2:]], "bf16")


def sharded(layout: Layout, expected: Expected, folder: Path, config: Mapping[str, Any]) -> Found:
    """Trains with an optimizer of the configuration, sharded and whole."""
    losses: dict[int, list[float]] = {}
    for stage in (0, 3):
        training = Layered(size(), "full", device(), stage, layout.pipeline_ranks, more={"optimizer": config})
        losses[stage] = losses_of(training)
        del training
        free_memory()
    return compared(losses[3], losses[0], "bf16")


def in_own_loop(layout: Layout, expected: Expected, folder: Path, name: str) -> Found:
    """Trains a model as a script of one's own does."""
    return LOOPS[name].compared(layout.pipeline_ranks)


def _block(**keys: Any) -> dict[str, Any]:
    return {"ds_lgamp": keys}


def _zero(device: str, *keys: str) -> dict[str, Any]:
    place = {"device": device, **({"nvme_path": FOLDER} if device == "nvme" else {})}
    return {"zero_optimization": {key: {**place, "pin_memory": True} for key in keys}}


TRIALS: dict[str, Trial] = {
    "gpipe": partial(configured, more=_block(schedule="gpipe"), stage=1),
    "1f1b": partial(configured, more=_block(schedule="1f1b"), stage=1),
    "interleaved_1f1b": partial(configured, more=_block(schedule="interleaved_1f1b")),
    "groups of one micro-batch": partial(configured, more=_block(micro_batch_group=1)),
    "one resident chunk": partial(configured, more=_block(resident_chunks=1)),
    "recompute none": partial(configured, more={}, recompute="none"),
    "reproducible, fp32": partial(configured, more=_block(reproducible=True), precision="fp32"),
    "nonfinite": partial(configured, more=_block(nonfinite="abort")),
    "deferred gathers": partial(configured, more=_block(defer_gathers=True), stage=1),
    "updates behind reductions": partial(configured, more=_block(overlap_update=True)),
    "updates in the next step": partial(configured, more=_block(overlap_update=True) | CLIPPING),
    "fp16": partial(
        configured, more={"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 10}}
    ),
    "optimizer on the host": partial(configured, more=_zero("cpu", "offload_optimizer"), stage=2),
    "all on the host": partial(configured, more=_zero("cpu", *OFFLOADED)),
    "all on the host, clipped": partial(configured, more=_zero("cpu", *OFFLOADED) | CLIPPING),
    "all on a disk": partial(configured, more=_zero("nvme", *OFFLOADED)),
    "all on a disk, clipped": partial(configured, more=_zero("nvme", *OFFLOADED) | CLIPPING),
    "inputs on the host": partial(configured, more=_block(offload_activations="cpu")),
    "inputs on a disk": partial(configured, more=_block(offload_activations="nvme", nvme_path=FOLDER)),
    "live states": partial(configured, more=_block(live_checkpoint=FOLDER)),
    "recorded": recorded,
    "resumed": resumed,
    "LAMB": partial(sharded, config={"type": "Lamb", "params": {"lr": 1e-3, "weight_decay": 0.01}}),
    "Muon": partial(sharded, config={"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 1e-3}}),
    **{name: partial(in_own_loop, name=name) for name in LOOPS},
}
"""By name."""
ON_GPU: dict[str, Trial] = {"recompute selective": partial(configured, more={}, recompute="selective")}
"""Those that need a GPU: Megatron-core offers it there."""
