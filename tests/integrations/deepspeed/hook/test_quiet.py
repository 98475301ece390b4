"""A run is quiet: ds_lgamp prints on the first rank only, and causes neither warnings nor collectives under
autograd."""

import os
import sys
import warnings

import torch.distributed as dist

from testing.deepspeed_rank import prepare_rank
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.models import Training
from tests.integrations.deepspeed.running import Layout, batches, initialize

TIED = Training(tied=True, tuples=False, momentum=0.9)


def everything(folder):
    """Trains at every stage with all that a script usually does. Returns the warnings and the printed text."""
    prepare_rank()
    printed = folder / f"printed{dist.get_rank()}"
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in range(4):
            engine = initialize(TIED, Layout(2, 2, stage, {}, optimizer="json"))
            for step in range(2):
                engine.train_batch(batches(step, engine))
            engine.eval_batch(batches(2, engine))
            engine.save_checkpoint(folder / str(stage))
            engine.load_checkpoint(folder / str(stage))
            engine.module.state_dict()
            engine.destroy()
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, stock in zip((1, 2), kept):
        os.dup2(stock, descriptor)
    ours = [f"{each.filename}:{each.lineno}: {each.message}" for each in caught if "ds_lgamp/" in each.filename]
    return ours, printed.read_text()


def test_tied_layers_train_without_a_warning_of_ours_and_without_a_word_on_other_ranks(tmp_path):
    for rank, (ours, printed) in enumerate(run_on_ranks(4, everything, tmp_path)):
        assert ours == []
        if rank > 0:
            assert "ds_lgamp" not in printed
