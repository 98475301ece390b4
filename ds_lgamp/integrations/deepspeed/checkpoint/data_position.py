"""The position in the engine's own data, also for a run that resumes with another batch size or number of ranks."""

from collections.abc import Mapping

from ds_lgamp.integrations.deepspeed.checkpoint.run import Run
from ds_lgamp.runtime.recompute import undisturbed

Epoch = Mapping[str, int]
"""``micro_batches_per_epoch``: of one data-parallel rank; ``samples``: in one micro-batch, over all data-parallel
ranks."""


def epoch_of(run: Run) -> dict[str, int] | None:
    """Returns the size of an epoch of the engine's own data. None if the engine has no data, or too few for a
    micro-batch."""
    if run.own_data is None or run.own_data.micro_batches_per_epoch == 0:
        return None
    samples = run.train_micro_batch_size_per_gpu() * run.dp_world_size
    return {"micro_batches_per_epoch": run.own_data.micro_batches_per_epoch, "samples": samples}


def seek_data(run: Run, pulled: int, there: Epoch | None) -> None:
    """Moves the engine's own data, if it has any, to where they stood when the checkpoint was written.

    Args:
        pulled: micro-batches taken there.
        there: the size of an epoch there; None if the engine had no data of its own.
    """
    here = epoch_of(run)
    if run.own_data is not None and here is not None:
        # A run without own data has taken nothing from it.
        position = 0 if there is None else micro_batches_here(pulled, there, here)
        with undisturbed(run.random_sources):
            run.own_data.seek(position)


def micro_batches_here(pulled: int, there: Epoch, here: Epoch) -> int:
    """Returns how many micro-batches here are as far into the data, in samples, as ``pulled`` micro-batches were where
    the checkpoint was written."""
    if there == here or not pulled:
        return pulled
    # At the end of an epoch, not at the beginning of the next, which draws random numbers.
    epochs, last = divmod(pulled - 1, there["micro_batches_per_epoch"])
    position = here["micro_batches_per_epoch"]
    if last + 1 < there["micro_batches_per_epoch"]:
        position = min(position, (last + 1) * there["samples"] // here["samples"])
    return epochs * here["micro_batches_per_epoch"] + position
