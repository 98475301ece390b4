"""Trains a small GPT as Megatron-LM's loop does: with its data parallelism, its optimizer, and the function that
``get_forward_backward_func()`` returns."""

import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ds_lgamp.config import LgampConfig
from ds_lgamp.runtime.measure import CollectiveCounter
from testing import cpu_shim
from testing.ranks import run_on_ranks
from tests.integrations.megatron.core_models import SEQUENCE, VOCABULARY, build_model, initialise

SEQUENCES, STEPS = 2, 3
STOCK = "stock"


class Place(NamedTuple):
    """A model on ranks, and the schedule that runs its batches."""

    pipeline_ranks: int
    chunks_per_rank: int
    schedule: str
    """The block's schedule, or ``STOCK``."""
    tensor_ranks: int = 1
    data_ranks: int = 1
    distributed_optimizer: bool = False
    zero_stage: int = 0
    """2 or 3 for sharded chunks."""
    aligned: bool = True
    """Only for the distributed optimizer: gathers and reduces whole chunks instead of buckets from hooks."""
    tied: bool = True
    layout: str | None = None
    """The layout for chunks with different numbers of layers."""
    per_token: bool = False
    """Whether the loss is a mean over tokens and not over micro-batches."""
    lengths: bool = False
    """Whether micro-batches have different lengths."""
    micro_batches: tuple[int, ...] = (4,) * STEPS
    """Micro-batches of all data-parallel ranks, by step."""
    group: int | str = "all"
    loss_chunk: int | str = "auto"
    model: str = "GPTModel"
    block: tuple[tuple[str, Any], ...] = ()
    """More keys of the block."""
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of Megatron-core's configurations of the model, data parallelism or the optimizer, and parameters of
    ``initialize_model_parallel``."""

    @property
    def ranks(self) -> int:
        context_ranks = dict(self.options).get("context_parallel_size", 1)
        return self.pipeline_ranks * self.tensor_ranks * self.data_ranks * context_ranks

    def options_of(self, takes: Any) -> dict[str, Any]:
        """Returns the options that ``takes`` accepts."""
        return {name: value for name, value in self.options if name in signature(takes).parameters}


class Step(NamedTuple):
    loss: float
    norm: float
    """The gradient's norm before clipping."""
    log: list[tuple[str, int]]
    """What this rank did: ("forward" or "backward", its chunk), and its collectives with the bytes sent."""
    zeros: int | None
    """The number of zeros in the gradient, if they are counted."""


def prepare_process(_rank: int) -> None:
    warnings.simplefilter("ignore")
    # Replaces Apex's kernel, which adds a weight's gradient to the buffer within the backward pass.
    sys.modules["fused_weight_gradient_mlp_cuda"] = ModuleType("fused_weight_gradient_mlp_cuda")
    vars(sys.modules["fused_weight_gradient_mlp_cuda"])["wgrad_gemm_accum_fp32"] = _add_weight_gradient
    cpu_shim.install()


def _add_weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    total += gradient.t() @ inputs


def train_all(places: list[Place]) -> dict[Place, list[Step]]:
    """Trains at every place. Returns the steps of this rank."""
    return {place: Training(place).train() for place in places}


class Training:
    def __init__(self, place: Place) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.pipeline_parallel import schedules

        from ds_lgamp.integrations.megatron.loop.arguments import Job
        from ds_lgamp.integrations.megatron.loop.forward_backward import ForwardBackward
        from ds_lgamp.integrations.megatron.loop.install import install_schedules, uninstall

        self.place = place
        uninstall()
        # Restores the function, because the configuration of an earlier model may have replaced it.
        param_and_grad_buffer.dist_reduce_scatter_func = dist.reduce_scatter_tensor
        if place.schedule != STOCK:
            settings = LgampConfig(
                **{"schedule": place.schedule, "micro_batch_group": place.group, "loss_chunk": place.loss_chunk},
                **dict(place.block),
            )
            install_schedules(Job(settings, place.zero_stage or int(place.distributed_optimizer), {}))
        parallel_state.destroy_model_parallel()
        virtual = place.chunks_per_rank if place.chunks_per_rank > 1 else None
        initialize = parallel_state.initialize_model_parallel
        initialize(place.tensor_ranks, place.pipeline_ranks, virtual, **place.options_of(initialize))
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.config = self.config_of(virtual)
        self.models = self.build(virtual)
        self.optimizer = self.optimizer_of()
        self.forward_backward = schedules.get_forward_backward_func()
        assert isinstance(self.forward_backward, ForwardBackward) == (place.schedule != STOCK), place
        self.log: list[tuple[str, int]] = []

    def config_of(self, virtual: int | None) -> Any:
        from megatron.core.transformer import TransformerConfig

        place = self.place
        interleaved = virtual is not None and place.pipeline_ranks > 1
        settings = {
            "num_layers": place.layout.count("t") if place.layout else 8,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": place.tensor_ranks,
            "pipeline_model_parallel_size": place.pipeline_ranks,
            "virtual_pipeline_model_parallel_size": virtual,
            "pipeline_model_parallel_layout": place.layout,
            "pipeline_dtype": torch.float32,
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
            "microbatch_group_size_per_vp_stage": max(place.micro_batches) // place.data_ranks,
            "calculate_per_token_loss": place.per_token,
            "variable_seq_lengths": place.lengths,
            "moe_token_dispatcher_type": "alltoall",  # the other one would be refused even for a dense model
        }
        return TransformerConfig(**settings | place.options_of(TransformerConfig))

    def build(self, virtual: int | None) -> list[Any]:
        """Builds the chunks of this rank in DistributedDataParallel. The weights depend only on their names in the
        whole model."""
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.enums import ModelType
        from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
        from megatron.core.transformer.module import Float16Module

        from ds_lgamp.integrations.megatron.loop.several_chunks import share_embedding
        from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk

        models = []
        for stage in range(self.place.chunks_per_rank) if virtual else [None]:
            model = build_model(
                self.place.model,
                self.config,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=self.place.tied,
                **{} if stage is None else {"vp_stage": stage},
            )
            model.model_type = ModelType.encoder_or_decoder
            initialise(model)
            for parameter in model.parameters():
                set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            models.append(model)
        if self.place.pipeline_ranks == 1:
            share_embedding(models)
        if self.config.fp16 or self.config.bf16:
            models = [Float16Module(self.config, model) for model in models]
        overlap = self.place.distributed_optimizer
        settings = {
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap,
            "use_distributed_optimizer": overlap,
            "bucket_size": 2**62,
        }
        settings |= self.place.options_of(DistributedDataParallelConfig)
        if self.place.zero_stage > 1:
            return [ShardedChunk(self.config, DistributedDataParallelConfig(**settings), model) for model in models]
        return [
            # Makes a copy, because DistributedDataParallel changes its configuration.
            DistributedDataParallel(
                self.config, DistributedDataParallelConfig(**settings), model, disable_bucketing=number > 0
            )
            for number, model in enumerate(models)
        ]

    def optimizer_of(self) -> Any:
        """Makes Megatron-core's optimizer and sets the functions of the batch in the configuration, as the loop
        does."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        overlap = self.place.distributed_optimizer
        # Adam's small default epsilon would amplify rounding differences.
        settings = {
            "optimizer": "adam",
            "lr": 0.01,
            "adam_eps": 1e-4,
            "clip_grad": 0.5,
            "use_distributed_optimizer": overlap,
            "overlap_param_gather": overlap,
        }
        configuration = OptimizerConfig(**settings | self.place.options_of(OptimizerConfig))
        overrides = get_standard_config_overrides(configuration)
        optimizer = get_megatron_optimizer(configuration, self.models, config_overrides=overrides)
        # Sets the rate and the weight decay of each group of parameters.
        OptimizerParamScheduler(
            optimizer,
            **{"init_lr": 0.0, "max_lr": configuration.lr, "min_lr": 0.0, "lr_decay_style": "constant"},
            **{"lr_warmup_steps": 0, "lr_decay_steps": STEPS, "wd_incr_steps": STEPS, "wd_incr_style": "constant"},
            **{"start_wd": configuration.weight_decay, "end_wd": configuration.weight_decay},
        )
        config = self.config
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            config.no_sync_func = one_or_all([model.no_sync for model in self.models])
            if self.place.aligned:
                config.grad_sync_func = one_or_all([model.start_grad_sync for model in self.models])
                config.param_sync_func = one_or_all([model.start_param_sync for model in self.models])
        return optimizer

    def train(self) -> list[Step]:
        steps = []
        for step in range(STEPS):
            with CollectiveCounter() as counter:
                # The log has collectives and passes in the order of their events.
                self.log = counter.log
                for model in self.models:
                    model.zero_grad_buffer()
                self.optimizer.zero_grad()
                loss = self.run_batch(step)
                _, norm, zeros = self.optimizer.step()
            # A step that is skipped because of an overflow has no norm.
            steps.append(Step(loss, -1.0 if norm is None else float(norm), list(self.log), zeros))
        return steps

    def run_batch(self, step: int, **options: Any) -> float:
        """Runs a batch. Returns its mean loss, which is the same on all ranks."""
        reports = self.forward_backward(**self.call(step), **options)
        return self.mean_of(reports)

    def call(self, step: int) -> dict[str, Any]:
        count = self.place.micro_batches[step] // self.place.data_ranks
        return {
            "forward_step_func": partial(self.forward_step, log=self.log),
            "data_iterator": one_or_all([self.batches(step) for _ in self.models]),
            "model": one_or_all(self.models),
            "num_microbatches": count,
            "seq_length": SEQUENCE,
            "micro_batch_size": SEQUENCES,
        }

    def batches(self, step: int) -> Iterator[torch.Tensor]:
        from megatron.core import parallel_state

        count = self.place.micro_batches[step] // self.place.data_ranks
        first = 100 * step + count * parallel_state.get_data_parallel_rank()
        for number in range(first, first + count):
            length = SEQUENCE - 4 * (number % 3) if self.place.lengths else SEQUENCE
            generator = torch.Generator().manual_seed(number)
            yield torch.randint(0, VOCABULARY, (SEQUENCES, length + 1), generator=generator)

    def forward_step(
        self, iterator: Iterator[torch.Tensor], model: Any, log: list[tuple[str, int]]
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        from megatron.core import parallel_state
        from megatron.core.utils import get_batch_on_this_cp_rank

        tokens = next(iterator)
        chunk = self.models.index(model)
        log.append(("forward", chunk))
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "positions": torch.arange(tokens.shape[1] - 1).repeat(len(tokens), 1),
            "labels": tokens[:, 1:].contiguous(),
            # Masks some labels out.
            "mask": (tokens[:, 1:] % 4 != 0).float(),
        }
        # Releases from 0.18 on ask for the first argument. Without the second, they divide a sequence among all ranks.
        hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
        group = parallel_state.get_context_parallel_group()
        inputs, positions, labels, mask = get_batch_on_this_cp_rank(batch, **hybrid, cp_group=group).values()
        output = self.output_of(model, inputs, positions, labels)
        hooked = output[0] if isinstance(output, tuple) else output
        if hooked.requires_grad:
            hooked.register_hook(lambda gradient: log.append(("backward", chunk)))
        return output, partial(self.loss, mask)

    def output_of(self, model: Any, inputs: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> Any:
        """Returns the hidden state or the losses of tokens. BertModel also returns two logits per sequence."""
        if self.place.model == "BertModel":
            return model(inputs, torch.ones_like(inputs), lm_labels=labels)
        if self.place.model == "T5Model":
            hidden = positions[:, None, None, :] > positions[:, None, :, None]
            none = torch.zeros_like(hidden)
            return model(inputs, labels, none, hidden, none, lm_labels=inputs)
        return model(inputs, positions, None, labels=labels)

    def loss(self, mask: torch.Tensor, output: Any, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.shape
        if isinstance(output, tuple):
            output, logits = output
            output = output + logits.logsumexp(dim=1, keepdim=True) - logits[:, :1]
        total = (output * mask).sum()
        tokens = mask.sum().to(torch.int)
        report = torch.stack([total.detach(), tokens])
        if self.place.per_token:
            return total, tokens, {"loss": report}
        return total / tokens, {"loss": report}

    def mean_of(self, reports: list[dict[str, torch.Tensor]]) -> float:
        """Returns the mean over micro-batches, or over tokens."""
        from megatron.core import parallel_state

        sums = torch.zeros(2, dtype=torch.float64)
        for report in reports:
            total, tokens = report["loss"].double()
            sums += torch.stack([total, tokens] if self.place.per_token else [total / tokens, torch.ones(())])
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return float(sums[0] / sums[1])


class Case(NamedTuple):
    """A function with assertions, which runs on every rank."""

    ranks: int
    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()


def outcomes_of(cases: dict[str, Case], chosen: Collection[str]) -> dict[str, str]:
    """Runs the chosen cases, those on as many ranks in the same processes. Returns the tracebacks of each: "" if it
    raised nothing."""
    found = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        some = {name: case for name, case in cases.items() if case.ranks == ranks and name in chosen}
        if some:
            on_ranks = run_on_ranks(ranks, run_in_turn, some, before_init=prepare_process)
            found |= {name: "".join(tracebacks[name] for tracebacks in on_ranks) for name in some}
    return found


def run_in_turn(cases: dict[str, Case]) -> dict[str, str]:
    found = dict.fromkeys(cases, "")
    for name, case in cases.items():
        try:
            case.function(*case.arguments)
        except Exception:
            found[name] = traceback.format_exc()
    return found


def one_or_all(items: list[Any]) -> Any:
    """Returns what Megatron-LM's loop passes: a list only if a rank has several chunks."""
    return items[0] if len(items) == 1 else items


def assert_trained_alike(steps: list[Step], expected: list[Step], rounding: float) -> None:
    """Compares the steps of two trainings, of which the losses change."""
    assert expected[0] != expected[-1]
    for step, stock in zip(steps, expected, strict=True):
        assert (step.loss, step.norm) == pytest.approx((stock.loss, stock.norm), rel=rounding)
        # The order of sums decides which rounding errors are zero.
        assert step.zeros == (None if stock.zeros is None else pytest.approx(stock.zeros, rel=0.02))
