"""The tables of Megatron's flags.

Honoured flags train as with Megatron-core's own schedules. Refused flags name the flag and the fix. The installed
Megatron-core has no flag that the tables lack.
"""

import argparse
import dataclasses
import re
import sys
from argparse import Namespace
from collections import Counter

import pytest
import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.integrations.megatron.loop.flags import (
    REFUSED,
    TOGETHER,
    option_of,
    refuse_flags,
    refuse_together,
)
from ds_lgamp.runtime.batch import ActionError
from testing import ROOT
from testing.pretraining import megatron_tree
from testing.ranks import run_on_ranks
from tests.integrations.megatron.loop.known_flags import ARGUMENTS, HONOURED, HONOURED_ARGUMENTS, NAMES
from tests.integrations.megatron.training_loop import (
    STOCK,
    Place,
    Training,
    assert_trained_alike,
    prepare_process,
    train_all,
)


def place(pipeline_ranks, chunks, schedule="layered", sharded=True, data_ranks=2, others=None, **options):
    """Makes a place with ``options`` of Megatron-core and ``others`` of the place itself."""
    where = Place(pipeline_ranks, chunks, schedule, data_ranks=data_ranks, distributed_optimizer=sharded)
    return where._replace(options=tuple(options.items()), **others or {})


def precision(dtype, **options):
    return {dtype: True, "params_dtype": DTYPES[dtype], "pipeline_dtype": DTYPES[dtype], **options}


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNTIED, HOOKS, PER_TOKEN = {"tied": False}, {"aligned": False}, {"per_token": True}
EXPERTS = {
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "allgather",
}
INSTANCES = {"num_distributed_optimizer_instances": 2}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
CUTS = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", *ENDS}
RATES = {"lr": 0.02, "min_lr": 0.001, "decoupled_lr": 0.1, "decoupled_min_lr": 0.002, "weight_decay": 0.5}

PLACES = {
    "instances": place(1, 4, data_ranks=4, **INSTANCES),
    "instances of one rank": place(2, 2, others=HOOKS, adam_beta1=0.5, adam_beta2=0.9, adam_eps=1e-2, **INSTANCES),
    "buckets": place(1, 4, average_in_collective=True, bucket_size=3000, pad_buckets_for_high_nccl_busbw=True),
    "small buckets of hooks": place(2, 2, others=HOOKS, bucket_size=3000, overlap_param_gather=False),
    "checks": place(
        *(1, 4), others=UNTIED, check_for_nan_in_grad=True, check_for_large_grads=True, log_num_zeros_in_grad=True
    ),
    "whole": place(2, 2, sharded=False, overlap_grad_reduce=True, average_in_collective=True),
    "whole per token": place(1, 4, sharded=False, others=PER_TOKEN, overlap_grad_reduce=True, clip_grad=0.0),
    "momentum": place(2, 1, "1f1b", sharded=False, optimizer="sgd", sgd_momentum=0.5, lr=0.1),
    "sgd": place(1, 4, sharded=False, others=HOOKS, optimizer="sgd", overlap_grad_reduce=True, clip_grad=0.1),
    "no overlap": place(1, 4, overlap_grad_reduce=False, overlap_param_gather=False, decoupled_weight_decay=False),
    "all-to-all": place(1, 4, others=UNTIED, **precision("bf16", reduce_scatter_with_fp32_accumulation=True)),
    "bf16": place(2, 2, "interleaved_1f1b", others=UNTIED, **precision("bf16", grad_reduce_in_fp32=True)),
    "fp32 sums": place(
        2, 2, others=UNTIED, **precision("bf16", param_name_patterns_for_fp32_local_accumulation=("all",))
    ),
    "fp32 sums of whole gradients": place(
        *(1, 4),
        sharded=False,
        others=UNTIED,
        **precision("bf16", param_name_patterns_for_fp32_local_accumulation=("*linear*",)),
    ),
    "skipped": place(2, 2, grad_norm_skip_threshold=0.9),
    "fp16": place(1, 4, others=UNTIED, **precision("fp16", initial_loss_scale=2.0**18, hysteresis=1)),
    "growing scale": place(
        2, 2, others=UNTIED, **precision("fp16", initial_loss_scale=64.0, loss_scale_window=1, min_loss_scale=32.0)
    ),
    "fixed scale": place(2, 1, "gpipe", sharded=False, others=UNTIED, **precision("fp16", loss_scale=1024.0)),
    "fused": place(1, 4, gradient_accumulation_fusion=True),
    "fused and whole": place(2, 2, sharded=False, gradient_accumulation_fusion=True, overlap_grad_reduce=True),
    "rates": place(1, 4, others=UNTIED, qk_layernorm=True, apply_wd_to_qk_layernorm=True, **RATES),
    "rates of a pipeline": place(2, 2, **RATES),
    "first rank": place(2, 2, others=UNTIED, num_layers_in_first_pipeline_stage=6),
    "last rank": place(2, 2, sharded=False, num_layers_in_last_pipeline_stage=6),
    "embedding and loss": place(2, 2, num_layers=6, **ENDS),
    "nothing but embedding and loss": place(1, 4, num_layers=2, **ENDS),
    "gathers in the update": place(1, 4, overlap_param_gather_with_optimizer_step=True),
    "order": place(2, 2, order="tp-cp-ep-pp-dp"),
    "experts": place(1, 4, **EXPERTS),
    "whole experts per token": place(2, 2, sharded=False, others=PER_TOKEN, overlap_grad_reduce=True, **EXPERTS),
    "sequences": place(1, 4, others={"tensor_ranks": 2}, sequence_parallel=True),
    "sequences of a pipeline": place(
        2, 2, data_ranks=1, sharded=False, others={"tensor_ranks": 2}, sequence_parallel=True
    ),
    "context": place(1, 4, data_ranks=1, context_parallel_size=2),
    "context per token": place(2, 2, data_ranks=1, others=PER_TOKEN, context_parallel_size=2),
}
LARGEST_NUMBER = 16
"""In bytes, of messages that hold no gradient."""
PLACES_PER_SPAWN = 5
"""Each place has its own process groups. With very many in one process, gloo stalls."""
ROUNDING = dict.fromkeys(
    ("all-to-all", "bf16", "fp32 sums", "fp32 sums of whole gradients", "fp16", "growing scale", "fixed scale"), 1e-3
)
"""Relative differences where they are larger than those of fp32."""


def alone(where):
    """Returns the same place with Megatron-core's own loop and one chunk. Gathers in the update need several chunks."""
    of_chunks = {"overlap_param_gather_with_optimizer_step", *CUTS}
    options = tuple(option for option in where.options if option[0] not in of_chunks)
    return where._replace(pipeline_ranks=1, chunks_per_rank=1, schedule=STOCK, options=options)


@pytest.fixture(scope="module")
def trained():
    places = {*PLACES.values(), *map(alone, PLACES.values())}
    results = {}
    for ranks in sorted({where.ranks for where in places}):
        of_ranks = sorted((where for where in places if where.ranks == ranks), key=str)
        for start in range(0, len(of_ranks), PLACES_PER_SPAWN):
            members = of_ranks[start : start + PLACES_PER_SPAWN]
            on_ranks = run_on_ranks(ranks, train_all, members, before_init=prepare_process)
            results |= {where: [found[where] for found in on_ranks] for where in members}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_honoured_flags_train_as_megatrons_own_loop_does(trained, name):
    steps, expected = trained[PLACES[name]][0], trained[alone(PLACES[name])][0]
    assert_trained_alike(steps, expected, ROUNDING.get(name, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["instances", "instances of one rank", "small buckets of hooks"])
def test_no_gradient_is_reduced_twice_not_even_in_the_first_batch(trained, name):
    for steps in trained[PLACES[name]]:
        # Gradients only: in its first step, the optimizer of release 0.19 agrees on a number.
        counts = [Counter(kind for kind, size in step.log if size > LARGEST_NUMBER) for step in steps]
        for kind in ("reduce_scatter", "all_reduce"):
            assert len({count[kind] for count in counts}) == 1


def test_gradients_are_whole_on_request_and_checked_before_their_reduction():
    for _sharded, whole, of_all_reduce in run_on_ranks(2, look_at_gradients, before_init=prepare_process):
        assert whole == pytest.approx(of_all_reduce, rel=1e-5) != _sharded


def look_at_gradients():
    """Returns the gradient's norm in the buffers of the distributed optimizer, there with a forced all-reduce, and
    without the optimizer. A further batch, whose loss is NaN, fails."""
    training, plain = (Training(place(1, 4, sharded=sharded, check_for_nan_in_grad=True)) for sharded in (True, False))
    norms = [norm_in_buffers(training, False), norm_in_buffers(training, True), norm_in_buffers(plain, False)]
    training.loss = lambda mask, output: (output.sum() * float("nan"), {})
    with pytest.raises(ActionError, match="found NaN in local grad norm"):
        norm_in_buffers(training, False)
    return norms


def norm_in_buffers(training, force_all_reduce):
    for model in training.models:
        model.zero_grad_buffer()
        model.force_all_reduce = force_all_reduce
    training.forward_backward(**training.call(0), force_all_reduce=force_all_reduce)
    return sum(float(buffer.grad_data.norm() ** 2) for model in training.models for buffer in model.buffers)


# test_batches.py and test_arguments.py show these.
SHOWN_ELSEWHERE = {
    "defer_embedding_wgrad_compute",
    "pipeline_model_parallel_layout",
    "virtual_pipeline_model_parallel_size",
}
OF_PLACES = {
    "use_distributed_optimizer": "distributed_optimizer",
    "align_grad_reduce": "aligned",
    "align_param_gather": "aligned",
    "calculate_per_token_loss": "per_token",
}


def test_every_honoured_flag_is_shown():
    shown = {name for where in PLACES.values() for name, _ in where.options} | SHOWN_ELSEWHERE
    for flag, field in OF_PLACES.items():
        if len({getattr(where, field) for where in PLACES.values()}) > 1:
            shown.add(flag)
    honoured = {*HONOURED, *HONOURED_ARGUMENTS.values()}
    assert honoured - shown == set() == set(OF_PLACES) - honoured


@pytest.mark.parametrize("flag", REFUSED, ids=str)
def test_refusals_name_flag_value_and_fix(flag):
    argument = flag.argument or flag.name
    with pytest.raises(ConfigError) as refusal:
        refuse_flags(Namespace(**{argument: 987}), arguments=True)
    message = str(refusal.value)
    assert message == f"{flag.option or option_of(argument)} is 987: {flag.note}"
    assert "remove it" in message or "; use " in message
    for value in flag.harmless:
        refuse_flags(Namespace(**{argument: value}), arguments=True)
    if flag.name:
        with pytest.raises(ConfigError, match=f"^{flag.name} is 987: "):
            refuse_flags(Namespace(**{flag.name: 987}))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("enable_cuda_graph", True), ("external_cuda_graph", True), ("cpu_offloading_num_layers", 2)],
)
def test_arguments_that_megatron_lm_turns_into_a_refused_one_are_refused_as_they_are_given(argument, value):
    with pytest.raises(ConfigError, match=f"^{option_of(argument)} is {value}: it needs Megatron-core's own schedules"):
        refuse_flags(Namespace(**{argument: value}), arguments=True)


@pytest.mark.parametrize("names", TOGETHER)
def test_flags_that_do_not_go_together_are_refused(names):
    with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} are True: "):
        refuse_together(Namespace(**{names[0]: True}), Namespace(**{names[1]: True}))
    for name in names:
        refuse_together(Namespace(**{name: True}))


def test_a_flag_has_one_row():
    rows = [*ARGUMENTS, *(flag.argument or flag.name for flag in REFUSED)]
    assert len(rows) == len(set(rows))


def test_the_installed_megatron_core_has_no_flag_that_the_tables_lack():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    names = NAMES | {flag.name for flag in REFUSED}
    for kind in (DistributedDataParallelConfig, OptimizerConfig):
        assert {field.name for field in dataclasses.fields(kind)} - names == set()


CODE = ROOT / "ds_lgamp" / "integrations" / "megatron" / "loop"
OWN = {"--ds-lgamp-config", "--cluster"}
"""What the messages and comments of ``CODE`` name beside flags of Megatron-LM."""
GROUPS = "distributed mixed_precision regularization learning_rate transformer_engine experimental"
"""Of Megatron-LM's arguments, those about data parallelism, precision and the optimizer."""


def test_megatron_lm_has_no_flag_that_the_tables_lack():
    run_on_ranks(1, look_for_unknown_arguments, str(megatron_tree()), before_init=prepare_process)


def look_for_unknown_arguments(tree):
    sys.path.insert(0, tree)
    from megatron.training import arguments

    options = {flag.argument or flag.name: flag.option for flag in REFUSED}
    known = {*ARGUMENTS, *options}
    for group in GROUPS.split():
        parser = argparse.ArgumentParser(add_help=False)
        getattr(arguments, f"_add_{group}_args")(parser)
        assert {action.dest for action in parser._actions} - known == set()
    everything = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    written = {action.dest: action.option_strings for action in everything._actions}
    for name, option in options.items():
        if name in written and option:
            assert option in written[name]
    named = {flag for file in CODE.rglob("*.py") for flag in re.findall("--[a-z][a-z0-9-]+", file.read_text())}
    assert named - OWN - {option for spellings in written.values() for option in spellings} == set()


PAGE = ROOT / "docs" / "megatron.md"


def test_the_page_lists_what_is_refused():
    (listed,) = re.findall("are refused beside a block: (.*?)\\n\\n", PAGE.read_text(), re.DOTALL)
    assert set(re.findall("`(--[a-z0-9-]+)`", listed)) == {
        flag.option or option_of(flag.argument or flag.name) for flag in REFUSED if flag.name != "use_custom_fsdp"
    }
