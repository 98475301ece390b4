"""Writes a configuration: in words, and as files that train with it, which are ``ds_config.json`` and ``launch.sh``;
with islands also ``step.json``, by which ``ds_lgamp run`` orders the ranks as the plan does.

Without tensor parallelism these start an unedited script that trains a model of transformers. Every rank feeds its own
micro-batches, and the P ranks of a pipeline compute all of them as one program. So a rank accumulates M / P
micro-batches, and P must divide M (docs/transformers.md). With tensor parallelism they start launch/pretrain_gpt.py,
and of flags with experts Megatron-LM's pretrain_gpt.py. There the ranks of a pipeline read the same M micro-batches.
"""

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ds_lgamp.cost.assignment import Demand
from ds_lgamp.planner.cluster import Cluster
from ds_lgamp.planner.configuration import STATES, Configuration
from ds_lgamp.planner.load import facts_of
from ds_lgamp.planner.model import AUTOEP, MEGATRON, Model
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES

DISK = "/local_nvme"
"""The folder on a disk that a written configuration names. A user replaces it."""
_STATE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
"""The keys by which DeepSpeed keeps the optimizer's state in bf16."""
_OPTIMIZERS = {
    "fp32": "",
    "bf16": " Its optimizer is Adam or AdamW of torch.",
    "8bit": " Its optimizer is AdamW8bit of bitsandbytes: a Trainer takes --optim adamw_8bit.",
}
"""What the launch line says of the script's optimizer, by the state of the configuration."""
CONFIG_FILE, LAUNCH_FILE, STEP_FILE = "ds_config.json", "launch.sh", "step.json"


class OnIslands(NamedTuple):
    """What a plan for a cluster with islands has chosen."""

    cluster_file: Path
    demand: Demand
    """What a step sends, with the order of the ranks."""


def write(
    model: Model, configuration: Configuration, cluster: Cluster, folder: Path, islands: OnIslands | None = None
) -> None:
    """Writes the files into ``folder``.

    Raises ValueError if :func:`why_not` has a reason, if the GPUs of the configuration do not fill whole nodes of the
    cluster, if one of the files exists, or if they cannot be written.
    """
    reason = why_not(model, configuration)
    if reason is not None:
        raise ValueError(reason)
    config = ds_config(model, configuration)
    if islands is not None and configuration.tensor_ranks > 1 and not configuration.micro_batch_outer:
        # launch/pretrain_gpt.py could give faster ranks more micro-batches, which the plan does not count.
        config["ds_lgamp"]["data_rank_speeds"] = [1] * configuration.data_ranks
    files = {
        CONFIG_FILE: json.dumps(config, indent=2) + "\n",
        LAUNCH_FILE: launch_script(model, configuration, cluster, islands),
    }
    if islands is not None:
        files[STEP_FILE] = json.dumps(facts_of(islands.demand), indent=2) + "\n"
    for name in files:
        if (folder / name).exists():
            raise ValueError(f"--write is {folder}, which has a {name}; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / LAUNCH_FILE).chmod(0o755)
    except OSError as error:
        raise ValueError(
            f"--write is '{folder}', which cannot be written ({error.strerror}); name another folder"
        ) from None


def why_not(model: Model, configuration: Configuration) -> str | None:
    """Returns in one sentence why no script can run the configuration; None if one can."""
    ranks, micro_batches = configuration.pipeline_ranks, configuration.micro_batches
    if configuration.micro_batch_outer:
        stock = configuration.pipeline_ranks == configuration.tensor_ranks == 1
        return None if stock else "micro_batch_outer is True; stock ZeRO-3 needs pipeline_ranks 1 and tensor_ranks 1"
    if _is_for_megatron_lm(model, configuration):
        held = "shards lie inside nodes" if configuration.hierarchy is not None else "the host holds something"
        if configuration.rounds:
            return (
                f"something travels rounded, which Megatron-LM's training loop, for {model.name}, does not do; use "
                "another plan"
            )
        if configuration.state != "fp32":
            return (
                f"state is '{configuration.state}', which Megatron-LM's training loop, for {model.name}, does not "
                "know; use another plan"
            )
        if configuration.takes_clock:
            return f"{held}, which Megatron-LM's training loop, for {model.name}, does not know; use another plan"
        return None
    if configuration.tensor_ranks > 1:
        if model.gated or model.experts > 1:
            part = "gated feed-forward parts" if model.gated else "a mixture of experts"
            return f"tensor_ranks is {configuration.tensor_ranks}, but {model.name} has {part}; use tensor_ranks 1"
        if model.sequence_length % configuration.tensor_ranks:
            return (
                f"tensor_ranks is {configuration.tensor_ranks}, which does not divide the {model.sequence_length} "
                "tokens of a sequence, of which each rank has a part; use a divisor"
            )
        if not model.is_plain_gpt:
            return (
                f"tensor_ranks is {configuration.tensor_ranks}, but {model.name} is not the GPT that "
                "launch/pretrain_gpt.py builds from sizes; use tensor_ranks 1"
            )
        return None
    if micro_batches % ranks:
        return (
            f"micro_batches is {micro_batches}, but each of {ranks} pipeline ranks feeds equally many; use a multiple "
            f"of {ranks}"
        )
    return None


def _is_for_megatron_lm(model: Model, configuration: Configuration) -> bool:
    """Whether Megatron-LM's own script trains the model, which flags with experts describe."""
    of = configuration
    return model.divided_by == MEGATRON and of.tensor_ranks == 1 and not of.micro_batch_outer


def ds_config(model: Model, configuration: Configuration) -> dict[str, Any]:
    """Returns what ``ds_config.json`` holds. It names no optimizer: the script chooses one."""
    ranks = configuration.pipeline_ranks if _feeds_each_rank(model, configuration) else 1
    return {
        "train_batch_size": configuration.sequences,
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.micro_batches // ranks,
        "bf16": {"enabled": True, **(dict.fromkeys(_STATE, True) if configuration.state == "bf16" else {})},
        "zero_optimization": {
            "stage": configuration.zero_stage,
            # DeepSpeed's own default is to overlap at stage 3 only.
            **({"overlap_comm": True} if configuration.micro_batch_outer and configuration.zero_stage < 3 else {}),
            **_node_shards(configuration),
            **_offload(configuration),
            **_rounded(configuration),
        },
        **_divided_experts(model, configuration),
        "ds_lgamp": {"enabled": False} if configuration.micro_batch_outer else _block(model, configuration),
    }


def _feeds_each_rank(model: Model, configuration: Configuration) -> bool:
    """Whether every rank of a pipeline feeds micro-batches of its own."""
    return configuration.tensor_ranks == 1 and not _is_for_megatron_lm(model, configuration)


def _divided_experts(model: Model, configuration: Configuration) -> dict[str, Any]:
    if configuration.expert_ranks == 1 or model.divided_by != AUTOEP:
        return {}
    return {"expert_parallel": {"enabled": True, "autoep_size": configuration.expert_ranks}}


def _node_shards(configuration: Configuration) -> dict[str, int]:
    hierarchy = configuration.hierarchy
    if hierarchy is None:
        return {}
    return {"mics_shard_size" if hierarchy.replicated else "zero_hpz_partition_size": hierarchy.node_ranks}


def _offload(configuration: Configuration) -> dict[str, dict[str, str]]:
    parts = {None: (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[configuration.offload]
    home = {"device": "nvme", "nvme_path": DISK} if configuration.on_disk else {"device": "cpu"}
    return {f"offload_{part}": home for part in parts}


def _rounded(configuration: Configuration) -> dict[str, bool]:
    keys = {
        "zero_quantized_weights": configuration.weight_bits,
        "zero_quantized_gradients": configuration.gradient_bits,
    }
    return {key: True for key, bits in keys.items() if bits is not None}


def launch_script(
    model: Model, configuration: Configuration, cluster: Cluster, islands: OnIslands | None = None
) -> str:
    """Returns what ``launch.sh`` holds. Raises ValueError if the GPUs do not fill whole nodes."""
    gpus, per_node = configuration.gpus, min(configuration.gpus, cluster.gpus_per_node)
    if gpus % per_node:
        raise ValueError(
            f"gpus_per_node of {cluster.name} is {per_node}, which does not divide the {gpus} GPUs of the configuration"
        )
    nodes, torchrun = gpus // per_node, ["torchrun"]
    if nodes == 1:
        torchrun.append("--standalone")
    else:
        endpoint = '"${MASTER_ADDR:?name one of the nodes}:${MASTER_PORT:-29500}"'
        torchrun += ["--nnodes", str(nodes), "--rdzv_backend c10d --rdzv_id ds_lgamp --rdzv_endpoint", endpoint]
    torchrun += ["--nproc_per_node", str(per_node), "-m ds_lgamp run"]
    if islands is not None:
        cluster_file = shlex.quote(str(islands.cluster_file.absolute()))
        torchrun += ["--cluster", cluster_file, "--explained", _beside(STEP_FILE)]
    if _is_for_megatron_lm(model, configuration):
        about = "SCRIPT is pretrain_gpt.py of Megatron-LM. Flags of the model, of data and of training follow."
        flags = ["--ds-lgamp-config", _beside(CONFIG_FILE), *_megatron_lm_flags(configuration)]
    elif configuration.tensor_ranks > 1:
        about = "SCRIPT is launch/pretrain_gpt.py of ds_lgamp. Its --data-path and training flags follow."
        flags = ["--deepspeed_config", _beside(CONFIG_FILE), *map(shlex.quote, _megatron_flags(model, configuration))]
    else:
        about = "SCRIPT trains a model of transformers and takes --deepspeed FILE. Its own flags follow."
        flags = ["--deepspeed", _beside(CONFIG_FILE)]
        about += _OPTIMIZERS[configuration.state]
        if model.adapters:
            about += f' It adds adapters by LoraConfig(r={model.adapters}, target_modules="all-linear") of peft.'
        if configuration.micro_batch_outer and configuration.recompute == "full":
            about += " The plan counts on it to recompute activations, as gradient_checkpointing of transformers does."
    lines = [
        "#!/usr/bin/env bash",
        f"# Trains {model.name} on {nodes} x {per_node} GPUs: {configuration.data_ranks} data-parallel x "
        f"{configuration.pipeline_ranks} pipeline x {configuration.tensor_ranks} tensor-parallel ranks.",
        f"#     SCRIPT=train.py {LAUNCH_FILE} [FLAGS...]",
        f"# {about}" + ("" if nodes == 1 else " Run it on every node."),
        "set -euo pipefail",
        f'exec {" ".join(torchrun)} "${{SCRIPT:?name the script}}" {" ".join(flags)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _beside(name: str) -> str:
    """Returns the path of a file in the folder of ``launch.sh``, for the shell."""
    return f'"$(dirname "${{BASH_SOURCE[0]}}")/{name}"'


def _block(model: Model, configuration: Configuration) -> dict[str, Any]:
    block: dict[str, Any] = {"schedule": configuration.schedule, "recompute": configuration.recompute}
    if _feeds_each_rank(model, configuration):
        block["pipeline_ranks"] = configuration.pipeline_ranks
    if configuration.schedule not in SINGLE_CHUNK_SCHEDULES and (
        configuration.chunks != model.layers or configuration.speeds
    ):
        block["chunks_per_rank"] = configuration.chunks_per_rank
    if configuration.zero_stage > 0:
        block["resident_chunks"] = configuration.resident_chunks
    if configuration.schedule == "layered" and configuration.group < configuration.micro_batches:
        block["micro_batch_group"] = configuration.group
    if configuration.overlap_update:
        block["overlap_update"] = True
    if configuration.stores_inputs:
        block["offload_activations"] = "cpu"
    if configuration.stores_weights:
        block["regather"] = "host"
    if configuration.split_backward:
        waits = configuration.split_backward
        block["split_backward"] = True if waits == configuration.pipeline_ranks else waits
    if configuration.keep_frozen is not None:
        block["keep_frozen"] = configuration.keep_frozen
    if configuration.gradient_bits == 4:
        block["quantised_gradient_bits"] = 4
    if configuration.activation_dtype is not None:
        block["activation_dtype"] = configuration.activation_dtype
    if configuration.state == "bf16":
        block["stochastic_rounding"] = True
    return block


def _megatron_lm_flags(configuration: Configuration) -> list[str]:
    """Returns the flags of Megatron-LM that describe the ranks and the batch, and that make collectives overlap."""
    values = {
        "pipeline-model-parallel-size": configuration.pipeline_ranks,
        "expert-model-parallel-size": configuration.expert_ranks,
        "micro-batch-size": configuration.micro_batch,
        "global-batch-size": configuration.sequences,
    }
    flags = ["--bf16", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]
    if configuration.zero_stage == 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return flags


def _megatron_flags(model: Model, configuration: Configuration) -> list[str]:
    """Returns the flags of launch/pretrain_gpt.py that describe the model and the ranks."""
    values = {
        "tensor-model-parallel-size": configuration.tensor_ranks,
        "pipeline-model-parallel-size": configuration.pipeline_ranks,
        "num-layers": model.layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.feed_forward_size,
        "num-attention-heads": model.attention_heads,
        "kv-channels": model.head_size,
        "seq-length": model.sequence_length,
        "position-embedding-type": "learned_absolute" if model.position_embeddings else "rope",
        "hidden-dropout": 0,
        "attention-dropout": 0,
    }
    flags = ["--sequence-parallel", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]
    if model.position_embeddings:
        flags += ["--max-position-embeddings", str(model.position_embeddings)]
    if model.key_value_heads < model.attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.key_value_heads)]
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if not model.biases:
        flags += ["--disable-bias-linear", "--normalization", "RMSNorm"]
    return flags


def method_of(configuration: Configuration) -> str:
    """Returns the name of the method, as tables show it."""
    of, words = configuration, [_exact_method_of(configuration)]
    if of.keep_frozen is not None:
        words.append("frozen weights " + ("on the " + of.keep_frozen if of.keeps_frozen_whole else "in shards"))
    words += [f"{of.weight_bits}-bit weights"] if of.weight_bits else []
    words += [f"{of.gradient_bits}-bit gradients"] if of.gradient_bits else []
    words += [f"{of.activation_dtype} hidden states"] if of.activation_dtype else []
    words += ["backwards in two parts"] if of.split_backward else []
    # Megatron-LM recomputes everything or nothing.
    words += ["recompute auto"] if of.recompute == "auto" and of.schedule != "layered" else []
    words += [STATES[of.state]] if STATES[of.state] else []
    return ", ".join(words)


def _exact_method_of(configuration: Configuration) -> str:
    if configuration.micro_batch_outer:
        return f"ZeRO-{configuration.zero_stage}"
    if configuration.hierarchy is not None:
        return f"{configuration.schedule} {'MiCS' if configuration.hierarchy.replicated else 'hpZ'}"
    if configuration.uses_host or configuration.stores_weights:
        kinds = [] if configuration.offload is None else [configuration.offload]
        waiting = ["inputs"] * configuration.stores_inputs + ["gathered weights"] * configuration.stores_weights
        homes = {"a disk": kinds, "the host": waiting} if configuration.on_disk else {"the host": kinds + waiting}
        held = (f"{' and '.join(names)} on {home}" for home, names in homes.items() if names)
        return f"{configuration.schedule}, {' and '.join(held)}"
    return configuration.schedule


def describe(configuration: Configuration) -> str:
    """Returns the configuration in a few words."""
    of = configuration
    ranks = f"W{of.data_ranks} P{of.pipeline_ranks} T{of.tensor_ranks}"
    ranks += f" E{of.expert_ranks}" if of.expert_ranks > 1 else ""
    words = [method_of(of), ranks, f"ZeRO-{of.zero_stage}"]
    if not of.micro_batch_outer:
        words.append(f"{of.chunks_per_rank} chunks per rank")
        if of.zero_stage == 3:
            words[-1] += f", {min(of.resident_chunks, of.chunks_per_rank)} resident"
    if of.hierarchy is not None:
        words.append(f"shards of {of.hierarchy.node_ranks} ranks")
    words.append(f"{of.micro_batches} micro-batches of {of.micro_batch}")
    if of.group < of.micro_batches:
        words[-1] += f" in groups of {of.group}"
    if of.recompute == "auto":
        words.append(f"{of.recomputed_pairs} of {of.computes // 2} forwards recomputed")
    return ", ".join(words)
