"""A script for ``ds_lgamp run --explain``: the training of :class:`benchmarks.gpt.contenders.Layered` on one rank.

Its words are a key of ``SIZES``, the recomputation and the ZeRO stage.
"""

import sys

import deepspeed

import ds_lgamp
from benchmarks.gpt.contenders import configuration, pipeline_module
from benchmarks.gpt.model import batch_of, build_optimizer
from benchmarks.gpt.process import start_hosts
from benchmarks.gpt.sizes import SIZES

size, recompute, stage = SIZES[sys.argv[1]], sys.argv[2], int(sys.argv[3])
start_hosts()
with ds_lgamp.deferred_init():
    module = pipeline_module(size)
samples = [
    (tokens, (targets, mask))
    for micro_batch, (labels, masks) in batch_of(size, "cpu")
    for tokens, targets, mask in zip(micro_batch, labels, masks)
]
deepspeed.initialize(
    model=module,
    optimizer=build_optimizer(module.parameters()),
    training_data=samples,
    config=configuration(size, stage) | {"ds_lgamp": {"recompute": recompute}},
)
