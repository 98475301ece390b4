"""A script for ``ds_lgamp run --explain``: the training of :class:`benchmarks.gpt.contenders.Layered` on one rank.

Its words are a key of ``SIZES``, the recomputation and the ZeRO stage.
"""

import sys

import deepspeed
from deepspeed.pipe import PipelineModule

import ds_lgamp
from benchmarks.gpt.contenders import configuration
from benchmarks.gpt.model import batch_of, build_optimizer, layer_specs
from benchmarks.gpt.process import start_hosts
from benchmarks.gpt.sizes import SIZES
from ds_lgamp.integrations.megatron.layers.gpt_layers import language_model_loss

size, recompute, stage = SIZES[sys.argv[1]], sys.argv[2], int(sys.argv[3])
start_hosts()
with ds_lgamp.deferred_init():
    module = PipelineModule(layer_specs(size), num_stages=1, loss_fn=language_model_loss, partition_method="uniform")
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
