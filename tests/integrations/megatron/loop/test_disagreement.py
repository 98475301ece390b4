"""Ranks of Megatron-LM's loop that differ are refused on all ranks, in one sentence."""

from argparse import Namespace

import pytest
import torch.distributed as dist

from ds_lgamp.config import ConfigError, read_block
from testing.ranks import run_on_ranks

CASES = {
    "alike": None,
    "an argument": "the argument --micro-batch-size is 2 on ranks 0 and 2 and 4 on rank 1; give every rank the same",
    "the file": "zero_optimization of the configuration file is {'stage': 1} on ranks 0 and 2 and {'stage': 0} on rank",
    "a version": "the version of torch is ",
}


def refusals():
    # Megatron-core takes long to import.
    import torch

    from ds_lgamp.integrations.megatron.loop.arguments import check_file, refuse_differing_ranks

    odd, said = dist.get_rank() == 1, {}
    version = torch.__version__
    for case in CASES:
        args = Namespace(
            micro_batch_size=4 if odd and case == "an argument" else 2,
            rank=dist.get_rank(),
            wandb_project="here" if odd else "there",
            hook=object(),
        )
        file = {"ds_lgamp": {}, "zero_optimization": {"stage": int(not (odd and case == "the file"))}}
        if odd and case == "a version":
            torch.__version__ = "2.0.0"
        try:
            refuse_differing_ranks(args, check_file(file, read_block(file)))
            said[case] = None
        except ConfigError as error:
            said[case] = str(error)
        torch.__version__ = version
    return said


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(3, refusals)


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ_are_refused_in_one_sentence(ranks, case):
    (sentence,) = {rank[case] for rank in ranks}
    assert sentence is None if CASES[case] is None else CASES[case] in sentence, sentence
