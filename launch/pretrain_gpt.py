"""Pretrain a GPT model with DeepSpeed's pipeline engine: Megatron-core's layers and datasets, Megatron-LM's flag names.

    torchrun --standalone --nproc_per_node 4 launch/pretrain_gpt.py --deepspeed_config ds_config.json \\
        --pipeline-model-parallel-size 2 --data-path data/pydoc

Flags describe the model, the data and the training; the JSON file tells DeepSpeed how to run it (ZeRO stage, precision,
...). Batch sizes, optimizer, scheduler and gradient clipping come from the flags where the JSON leaves them out.
Prepare the data with prepare_data.py first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.transformer import TransformerConfig
from prepare_data import END_OF_DOCUMENT
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

from ds_lgamp.integrations.megatron.gpt_layers import gpt_layer_specs, language_model_loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser.add_argument_group("model"))
    add_training_arguments(parser.add_argument_group("training"))
    add_data_arguments(parser.add_argument_group("data and output"))
    parser.add_argument(
        "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)), help="set by the launcher"
    )
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is required")
    if args.sequence_parallel and (args.tensor_model_parallel_size == 1 or not torch.cuda.is_available()):
        parser.error("--sequence-parallel needs --tensor-model-parallel-size from 2, and GPUs; remove it")
    refuse_missing_data(args)
    return args


def refuse_missing_data(args: argparse.Namespace) -> None:
    """End the script if a file of the datasets or the tokenizer is not there."""
    prefixes = get_blend_from_list(args.data_path)[0]
    files = [args.tokenizer_model or f"{prefixes[0]}.tokenizer.json"]
    for file in files + [f"{prefix}{suffix}" for prefix in prefixes for suffix in (".bin", ".idx")]:
        if not Path(file).is_file():
            raise SystemExit(
                f"--data-path is {' '.join(args.data_path)}, but {file} is missing; write it with "
                f"launch/prepare_data.py --output-prefix {prefixes[0]}"
            )


def add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, default=8)
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--max-position-embeddings", type=int, help="for learned_absolute (default: --seq-length)")
    group.add_argument("--position-embedding-type", choices=["rope", "learned_absolute"], default="learned_absolute")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--attention-dropout", type=float, default=0.1)


def add_training_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument(
        "--sequence-parallel", action="store_true", help="tensor-parallel ranks share the sequence between layers"
    )
    group.add_argument("--micro-batch-size", type=int, default=2)
    group.add_argument("--global-batch-size", type=int, default=32)
    group.add_argument("--train-iters", type=int, default=150)
    group.add_argument("--exit-interval", type=int, help="stop after an iteration that this divides")
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--lr-decay-style", choices=["constant", "cosine"], default="constant")
    group.add_argument("--lr-warmup-iters", type=int, default=5)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--seed", type=int, default=1234)


def add_data_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-path", nargs="+", default=["data/pydoc"], help="[WEIGHT] PREFIX ...")
    group.add_argument("--tokenizer-model", help="tokenizer.json (default: beside the first dataset)")
    group.add_argument("--split", default="95,5,0", help="shares of documents for training, validation and test")
    group.add_argument("--eval-interval", type=int, default=50)
    group.add_argument("--eval-iters", type=int, default=2)
    group.add_argument("--log-interval", type=int, default=1)
    group.add_argument("--loss-plot", help="draw the losses into this image file")
    group.add_argument("--save", help="write a checkpoint of the last iteration into this folder")
    group.add_argument("--load", help="go on from the last checkpoint in this folder")


def start_distributed(local_rank: int, tensor_ranks: int) -> None:
    """Join the process group that the launcher described, on NCCL with GPUs and on gloo without."""
    # DeepSpeed would compile this CPU collective at start-up, which takes a compiler and half a minute; gloo does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)  # the progress bar says what happens
    get_accelerator().set_device(local_rank)
    deepspeed.init_distributed()
    # Megatron-core's layers look up their tensor-parallel group here. DeepSpeed has the same, and groups of its own.
    parallel_state.initialize_model_parallel(tensor_ranks, create_gloo_process_groups=False)


class DatasetTokenizer:
    """What Megatron-core's dataset asks of a tokenizer: its texts are tokens already."""

    def __init__(self, path: str):
        tokenizer = Tokenizer.from_file(path)
        self.vocab_size = tokenizer.get_vocab_size()
        self.eod = tokenizer.token_to_id(END_OF_DOCUMENT)
        # The name of the cached sample index derives from this: text prepared anew gets a new index.
        self.unique_identifiers = {"sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def build_model(args: argparse.Namespace, vocab_size: int) -> PipelineModule:
    """The pipeline: each rank builds its own layers, with equal numbers of transformer layers on all pipeline ranks."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        use_cpu_initialization=True,  # the same weights on every device, and no CUDA random states to set up
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )
    specs = gpt_layer_specs(
        config,
        vocab_size,
        max_positions=args.max_position_embeddings or args.seq_length,
        position_type=args.position_embedding_type,
        tie_embeddings=not args.untie_embeddings_and_output_weights,
    )
    pipeline_ranks, tensor_ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    data_ranks = torch.distributed.get_world_size() // (pipeline_ranks * tensor_ranks)
    return PipelineModule(
        specs,
        topology=PipeModelDataParallelTopology(pipeline_ranks, tensor_ranks, data_ranks),
        loss_fn=language_model_loss,
        seed_layers=True,  # a layer's weights depend on its place in the model, not on the number of ranks
        seed_fn=set_seed,
        base_seed=args.seed,
        partition_method="type:TransformerBlock",
    )


def set_seed(seed: int) -> None:
    """Seed one layer. DeepSpeed passes NumPy integers, which its own seeding function rejects since Python 3.11.

    Not torch.manual_seed: without a GPU it stores a seed for one, and a stack trace, at every call.
    """
    torch.default_generator.manual_seed(int(seed))
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed(int(seed))


def deepspeed_config(args: argparse.Namespace) -> dict:
    """The JSON configuration, with what it leaves out filled in from the flags."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    batch_keys = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    if batch_keys.isdisjoint(config):
        config["train_batch_size"] = args.global_batch_size
        config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
    # torch_adam: PyTorch's own AdamW, because DeepSpeed's fused one is compiled at start-up
    adam = {"lr": args.lr, "weight_decay": args.weight_decay, "torch_adam": True}
    config.setdefault("optimizer", {"type": "AdamW", "params": adam})
    config.setdefault("scheduler", scheduler_config(args))
    config.setdefault("gradient_clipping", args.clip_grad)
    return config


def scheduler_config(args: argparse.Namespace) -> dict:
    """Linear warm-up to the optimizer's learning rate, then constant or down a cosine to almost zero."""
    params = {"warmup_num_steps": max(1, args.lr_warmup_iters), "warmup_type": "linear"}
    if args.lr_decay_style == "constant":
        return {"type": "WarmupLR", "params": params}
    return {"type": "WarmupCosineLR", "params": {**params, "total_num_steps": args.train_iters}}


def build_datasets(
    args: argparse.Namespace, tokenizer: DatasetTokenizer, batch_size: int
) -> tuple[GPTDataset, GPTDataset | None]:
    """Training and validation samples, shuffled once; rank 0 writes the sample index, the others then read it."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [args.train_iters * batch_size, args.eval_iters * batch_size, 0]
    training, validation, _test = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return training, validation


def micro_batches(engine: deepspeed.PipelineEngine, dataset: GPTDataset, skipped: int = 0) -> Iterator[tuple]:
    """This replica's share of the dataset, in order, as (tokens [b, s], (labels [b, s], loss mask [b, s])).

    All pipeline ranks of a replica read the same share: the first needs the tokens, the last the labels. ``skipped``
    samples have been read before, by any number of replicas.
    """
    rest = Subset(dataset, range(skipped, len(dataset)))
    sampler: DistributedSampler = DistributedSampler(
        rest,
        num_replicas=engine.mpu.get_data_parallel_world_size(),
        rank=engine.mpu.get_data_parallel_rank(),
        shuffle=False,
        drop_last=True,
    )
    for batch in DataLoader(rest, engine.train_micro_batch_size_per_gpu(), sampler=sampler):
        yield batch["tokens"], (batch["labels"], batch["loss_mask"])


def train(
    args: argparse.Namespace, engine: deepspeed.PipelineEngine, training: GPTDataset, validation: GPTDataset | None
) -> dict[str, dict[int, float]]:
    """Run the iterations and return the losses: {"training" or "validation": {iteration: loss}}."""
    losses: dict[str, dict[int, float]] = {"training": {}, "validation": {}}
    is_first_rank = torch.distributed.get_rank() == 0
    batches = micro_batches(engine, training, engine.global_samples)
    iterations = range(engine.global_steps + 1, args.train_iters + 1)
    progress = tqdm(iterations, desc="training", disable=not is_first_rank)
    for iteration in progress:
        loss = losses["training"][iteration] = engine.train_batch(data_iter=batches).item()
        progress.set_postfix(loss=f"{loss:.4f}")
        if is_first_rank and iteration % args.log_interval == 0:
            tqdm.write(f"iteration {iteration:5d} | training loss {loss:.6f}")
        if validation is not None and args.eval_iters and iteration % args.eval_interval == 0:
            loss = losses["validation"][iteration] = evaluate(engine, validation, args.eval_iters)
            if is_first_rank:
                tqdm.write(f"iteration {iteration:5d} | validation loss {loss:.6f}")
        if args.exit_interval and iteration % args.exit_interval == 0:
            break
    return losses


def evaluate(engine: deepspeed.PipelineEngine, dataset: GPTDataset, iterations: int) -> float:
    """Mean loss over the first batches of a dataset: the same ones every time."""
    batches = micro_batches(engine, dataset)
    return sum(engine.eval_batch(data_iter=batches).item() for _ in range(iterations)) / iterations


def plot_losses(losses: dict[str, dict[int, float]], path: str) -> None:
    """Draw training and validation loss over the iterations into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in losses.items():
        if curve:
            axes.plot(list(curve), list(curve.values()), marker="." if len(curve) < 100 else None, label=name)
    axes.set(xlabel="iteration", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    args = parse_arguments()
    start_distributed(args.local_rank, args.tensor_model_parallel_size)
    first_prefix = get_blend_from_list(args.data_path)[0][0]
    tokenizer = DatasetTokenizer(args.tokenizer_model or f"{first_prefix}.tokenizer.json")
    model = build_model(args, tokenizer.vocab_size)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=deepspeed_config(args)
    )
    if args.load and engine.load_checkpoint(args.load)[0] is None:
        raise SystemExit(f"--load is {args.load}, but there is no checkpoint; name a folder that --save wrote")
    training, validation = build_datasets(args, tokenizer, engine.train_batch_size())
    losses = train(args, engine, training, validation)
    if args.save:
        engine.save_checkpoint(args.save)
    if args.loss_plot and torch.distributed.get_rank() == 0:
        plot_losses(losses, args.loss_plot)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
