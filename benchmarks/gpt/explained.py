"""A script for ``ds_lgamp run --explain``: the training of :class:`benchmarks.gpt.contenders.Layered` on one rank.

Its words are a key of ``SIZES``, the recomputation, the ZeRO stage, the number of micro-batches, and the keys of
``zero_optimization`` that say what lies in the memory of the host.
"""

import sys

import deepspeed

import ds_lgamp
from benchmarks.gpt.contenders import configuration, pipeline_module
from benchmarks.gpt.model import batch_of, build_optimizer
from benchmarks.gpt.process import start_hosts
from benchmarks.gpt.sizes import SIZES

name, recompute, stage, micro_batches, *offload = sys.argv[1:]
size = SIZES[name]._replace(micro_batches=int(micro_batches))
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
    config=configuration(size, int(stage), offload=offload) | {"ds_lgamp": {"recompute": recompute}},
)
