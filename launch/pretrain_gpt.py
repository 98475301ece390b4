"""Pretrains a GPT model with DeepSpeed's pipeline engine, Megatron-core's layers and datasets, and Megatron-LM's flags.

    torchrun --standalone --nproc_per_node 4 launch/pretrain_gpt.py --deepspeed_config ds_config.json \\
        --pipeline-model-parallel-size 2 --data-path data/pydoc

Flags describe the model, the data and the training. The JSON file tells DeepSpeed how to run it (ZeRO stage, schedule,
recomputation, ...). Flags also give batch sizes, precision, optimizer, scheduler and gradient clipping if the JSON file
does not. Prepare the data with prepare_data.py first.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from arguments import deepspeed_config, padded_vocabulary, parse_arguments, transformer_config
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from prepare_data import END_OF_DOCUMENT
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective
from ds_lgamp.integrations.megatron.layers.gpt_layers import gpt_layer_specs, language_model_loss


def start_distributed(args: argparse.Namespace) -> None:
    """Joins the process group that the launcher described, on NCCL with GPUs and on gloo without."""
    compile_no_collective()
    deepspeed.utils.logger.setLevel(logging.ERROR)  # the progress bar reports the steps
    get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    # Megatron-core's layers look up their tensor-parallel group here. DeepSpeed makes its own groups of the same ranks.
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, create_gloo_process_groups=False)
    if args.transformer_impl == "transformer_engine":
        model_parallel_cuda_manual_seed(args.seed)  # its attention draws from this state


class DatasetTokenizer:
    """The tokenizer interface that Megatron-core's dataset needs. Its texts are already tokens."""

    def __init__(self, path: str):
        tokenizer = Tokenizer.from_file(path)
        self.vocab_size = tokenizer.get_vocab_size()
        self.eod = tokenizer.token_to_id(END_OF_DOCUMENT)
        # Part of the name of the cached sample index, so that newly prepared text gets a new index.
        self.unique_identifiers = {"sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def build_model(args: argparse.Namespace, tokenizer: DatasetTokenizer) -> PipelineModule:
    """Builds the pipeline. Each rank builds its own layers, and all pipeline ranks have equally many transformer
    layers."""
    specs = gpt_layer_specs(
        transformer_config(args),
        padded_vocabulary(tokenizer.vocab_size, args),
        max_positions=args.max_position_embeddings or args.seq_length,
        position_type=args.position_embedding_type,
        tie_embeddings=not args.untie_embeddings_and_output_weights,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        end_of_document=tokenizer.eod,
        reset_attention_mask=args.reset_attention_mask,
        reset_position_ids=args.reset_position_ids,
        transformer_impl=args.transformer_impl,
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


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Returns the matrices, which decay as the optimizer says, and the biases and norms, which do not, as in
    Megatron-LM."""
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def set_seed(seed: int) -> None:
    """Seeds one layer. DeepSpeed passes NumPy integers, which its own seeding function rejects since Python 3.11.

    Does not use torch.manual_seed, because without a GPU it stores a seed for one at every call, with a stack trace.
    """
    torch.default_generator.manual_seed(int(seed))
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed(int(seed))


def build_datasets(
    args: argparse.Namespace, tokenizer: DatasetTokenizer, batch_size: int
) -> tuple[GPTDataset, GPTDataset | None]:
    """Builds training and validation samples, shuffled once. Rank 0 writes the sample index and the others read it."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    sizes = [args.train_iters * batch_size, args.eval_iters * batch_size, 0]
    training, validation, _test = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return training, validation


def micro_batches(engine: deepspeed.PipelineEngine, dataset: GPTDataset, skipped: int = 0) -> Iterator[tuple]:
    """Yields this replica's share of the dataset, in order, as (tokens [b, s], (labels [b, s], loss mask [b, s])).

    All pipeline ranks of a replica read the same share: the first needs the tokens, the last the labels. ``skipped`` is
    the number of samples that any number of replicas has read before.
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
    """Runs the iterations. Returns the losses as {"training" or "validation": {iteration: loss}}."""
    losses: dict[str, dict[int, float]] = {"training": {}, "validation": {}}
    is_first_rank = torch.distributed.get_rank() == 0
    batches = micro_batches(engine, training, engine.global_samples)
    iterations = range(engine.global_steps + 1, args.train_iters + 1)
    unread: dict[int, torch.Tensor] = {}
    for iteration in tqdm(iterations, desc="training", disable=not is_first_rank):
        # The host would wait for the device if it read every loss at once.
        unread[iteration] = engine.train_batch(data_iter=batches)
        if args.log_interval and iteration % args.log_interval == 0:
            losses["training"] |= read(unread)
            if is_first_rank:
                tqdm.write(f"iteration {iteration:5d} | training loss {losses['training'][iteration]:.6f}")
        evaluated = validation is not None and args.eval_iters and args.eval_interval
        if evaluated and iteration % args.eval_interval == 0:
            loss = losses["validation"][iteration] = evaluate(engine, validation, args.eval_iters)
            if is_first_rank:
                tqdm.write(f"iteration {iteration:5d} | validation loss {loss:.6f}")
        if args.save_interval and iteration % args.save_interval == 0:
            engine.save_checkpoint(args.save)
        if args.exit_interval and iteration % args.exit_interval == 0:
            break
    losses["training"] |= read(unread)
    return losses


def read(unread: dict[int, torch.Tensor]) -> dict[int, float]:
    """Returns the losses by iteration, in one copy to the host, and empties ``unread``."""
    values = torch.stack(list(unread.values())).flatten().tolist() if unread else []
    losses = dict(zip(unread, values))
    unread.clear()
    return losses


def evaluate(engine: deepspeed.PipelineEngine, dataset: GPTDataset, iterations: int) -> float:
    """Returns the mean loss over the first batches of a dataset. The batches are the same every time."""
    batches = micro_batches(engine, dataset)
    losses = [engine.eval_batch(data_iter=batches) for _ in range(iterations)]
    return torch.stack(losses).mean().item()


def plot_losses(losses: dict[str, dict[int, float]], path: str) -> None:
    """Draws training and validation loss by iteration to an image file."""
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
    args = parse_arguments(__doc__)
    start_distributed(args)
    first_prefix = get_blend_from_list(args.data_path)[0][0]
    tokenizer = DatasetTokenizer(args.tokenizer_model or f"{first_prefix}.tokenizer.json")
    model = build_model(args, tokenizer)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=deepspeed_config(args)
    )
    if args.load and engine.load_checkpoint(args.load)[0] is None and args.load != args.save:
        raise SystemExit(f"--load is {args.load}, but there is no checkpoint; name a folder that --save wrote")
    training, validation = build_datasets(args, tokenizer, engine.train_batch_size())
    losses = train(args, engine, training, validation)
    if args.save and not (args.save_interval and engine.global_steps % args.save_interval == 0):
        engine.save_checkpoint(args.save)
    if args.loss_plot and torch.distributed.get_rank() == 0:
        plot_losses(losses, args.loss_plot)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
