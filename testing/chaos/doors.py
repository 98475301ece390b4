"""The ways to train of the jobs that testing.chaos disturbs: one small model each."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

WIDTH, VOCABULARY, LENGTH, SEQUENCES = 8, 32, 8, 2
Meet = Callable[[str], None]
"""What a model calls where its rank may meet a fault."""


class Training(Protocol):
    """A job of this rank."""

    step: int
    """Steps made."""

    def train(self) -> float:
        """Makes a step. Returns its loss, as this rank knows it."""

    def evaluate(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class UnderDeepSpeed:
    """Trains with an engine of DeepSpeed.

    Args:
        told: the fields of the job.
        meet: called with the places.
    """

    def __init__(self, told: dict[str, Any], meet: Meet) -> None:
        import deepspeed

        from testing.deepspeed_rank import is_ours

        deepspeed.init_distributed("gloo", verbose=False)
        self.told, self.meet = told, meet
        block = {key: told[key] for key in ("hang_timeout", "schedule", "asynchronous_save")}
        self.config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": told["micro_batches"],
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": told["zero_stage"]},
            "ds_lgamp": {**block, "keep_last": 3},
        }
        if told["door"] != "pipeline":
            self.config["ds_lgamp"]["pipeline_ranks"] = told["pipeline_ranks"]
        torch.manual_seed(5)
        self.engine, *_ = deepspeed.initialize(model=MODELS[told["door"]](told, meet), config=self.config)
        assert is_ours(self.engine)
        self.batches = self._batches()

    @property
    def step(self) -> int:
        return self.engine.global_steps

    def _batches(self) -> Iterator[Any]:
        """The same numbers on every rank, by step."""
        generator = torch.Generator()
        while True:
            self.meet("data")
            generator.manual_seed(self.step)
            if self.told["door"] == "transformers":
                yield torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
            else:
                yield torch.randn(2, WIDTH, generator=generator), torch.zeros(2, WIDTH)

    def _loss(self) -> torch.Tensor:
        batch = next(self.batches)
        return self.engine(batch) if self.told["door"] == "plain" else self.engine(input_ids=batch, labels=batch).loss

    def train(self) -> float:
        if self.told["door"] == "pipeline":
            return self.engine.train_batch(self.batches).item()
        losses = []
        for _ in range(self.told["micro_batches"]):
            loss = self._loss()
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss)
        return sum(float(loss.detach()) for loss in losses) / len(losses)

    def evaluate(self) -> None:
        if self.told["door"] == "pipeline":
            self.engine.eval_batch(self.batches)
            return
        self.engine.eval()
        with torch.no_grad():
            self._loss()
        self.engine.train()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder)


def _pipeline(told: dict[str, Any], meet: Meet) -> nn.Module:
    from deepspeed.pipe import LayerSpec, PipelineModule

    class Layer(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            meet("forward")
            return super().forward(hidden)

    return PipelineModule(
        [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(told["layers"])],
        **{"num_stages": told["pipeline_ranks"], "loss_fn": nn.functional.mse_loss, "seed_layers": True},
        **{"seed_fn": lambda value: torch.manual_seed(int(value)), "base_seed": 5},
    )


def _plain(told: dict[str, Any], meet: Meet) -> nn.Module:
    class Layer(nn.Linear):
        def forward(self, pair):  # noqa: ANN001, ANN202
            meet("forward")
            return super().forward(pair[0]), pair[1]

    class Loss(nn.Module):
        def forward(self, pair):  # noqa: ANN001, ANN202
            return nn.functional.mse_loss(*pair)

    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(told["layers"])), Loss())


def _transformers(told: dict[str, Any], meet: Meet) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": told["layers"], "n_embd": 8, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda *_: meet("forward"))
    return model


MODELS = {"pipeline": _pipeline, "plain": _plain, "transformers": _transformers}


class InMegatronsLoop:
    """Trains in a loop of Megatron-core, as docs/megatron.md has it. It saves nothing.

    Args:
        told: the fields of the job.
        meet: called with the places.
    """

    def __init__(self, told: dict[str, Any], meet: Meet) -> None:
        from testing import cpu_shim

        cpu_shim.install()
        dist.init_process_group("gloo")
        self.told, self.meet, self.step = told, meet, 0
        self._install()
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.models = self._chunks()
        self._prepare_optimizer()
        self.forward_backward = get_forward_backward_func()

    def _install(self) -> None:
        from ds_lgamp.config import read_block
        from ds_lgamp.integrations.megatron.loop.arguments import check_file
        from ds_lgamp.integrations.megatron.loop.install import install_schedules

        block = {key: self.told[key] for key in ("hang_timeout", "schedule")}
        content = {"zero_optimization": {"stage": self.told["zero_stage"]}, "ds_lgamp": block}
        settings = read_block(content)
        assert settings is not None, "there is a block"
        install_schedules(check_file(content, settings))

    def _chunks(self) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        from ds_lgamp.integrations.megatron.loop.several_chunks import share_embedding
        from ds_lgamp.integrations.megatron.loop.sharded_model import ShardedChunk

        ranks = self.told["pipeline_ranks"]
        count = self.told["layers"] // ranks if self.told["schedule"] == "layered" else 1
        virtual = count if count > 1 else None
        parallel_state.initialize_model_parallel(1, ranks, virtual)
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        self.config = TransformerConfig(
            **{"num_layers": self.told["layers"], "hidden_size": 16, "num_attention_heads": 2},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "pipeline_dtype": torch.float32},
            **{"pipeline_model_parallel_size": ranks, "virtual_pipeline_model_parallel_size": virtual},
            **{"overlap_p2p_comm": virtual is not None and ranks > 1, "batch_p2p_comm": virtual is None or ranks == 1},
            microbatch_group_size_per_vp_stage=self.told["micro_batches"],
        )

        def build(number: int | None) -> Any:
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
            ends = {"pre_process": first, "post_process": last, "share_embeddings_and_output_weights": True}
            return GPTModel(self.config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, vp_stage=number, **ends)

        chunks = [build(number if virtual else None) for number in range(count)]
        if ranks == 1:
            share_embedding(chunks)
        wrap = ShardedChunk if self.told["zero_stage"] > 1 else DistributedDataParallel
        return [wrap(self.config, DistributedDataParallelConfig(), chunk) for chunk in chunks]

    def _prepare_optimizer(self) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

        settings = OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=1e-4)
        self.optimizer = get_megatron_optimizer(settings, self.models, get_standard_config_overrides(settings))
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def _batches(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.step)
        for _ in range(self.told["micro_batches"]):
            self.meet("data")
            yield torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)

    def _forward_step(self, iterator: Iterator[torch.Tensor], model: Any) -> Any:
        tokens = next(iterator)
        self.meet("forward")
        positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
        output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def _run(self, evaluates: bool) -> list[Any]:
        several = len(self.models) > 1
        iterators = [self._batches() for _ in self.models]
        return self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.models if several else self.models[0],
            num_microbatches=self.told["micro_batches"],
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            forward_only=evaluates,
        )

    def train(self) -> float:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(evaluates=False)
        self.optimizer.step()
        self.step += 1
        return sum(float(report["loss"]) for report in reports) / len(reports) if reports else 0.0

    def evaluate(self) -> None:
        with torch.no_grad():
            self._run(evaluates=True)


DOORS: dict[str, Callable[[dict[str, Any], Meet], Any]] = {
    **dict.fromkeys(MODELS, UnderDeepSpeed),
    "megatron": InMegatronsLoop,
}
