"""Trains small models of transformers on ranks, and measures the most bytes of live tensors in a step."""

import gc
import json
from typing import Any, NamedTuple

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers

import ds_lgamp
from ds_lgamp.cost.units import ElementBytes
from ds_lgamp.integrations.user_script import finish_engines
from ds_lgamp.planner.activations import Software
from ds_lgamp.planner.configuration import Configuration
from ds_lgamp.planner.model import Model
from ds_lgamp.planner.transformers_config import model_of_config
from ds_lgamp.runtime.measure import PeakMemory, live_tensors, storage_of
from testing.deepspeed_rank import prepare_rank, quiet

LENGTH, HIDDEN, VOCABULARY, LAYERS, HEADS = 256, 128, 1000, 4, 4
GATED = {"intermediate_size": 344, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
EXPERTS = {
    "Qwen3-MoE": ("qwen3_moe", {"moe_intermediate_size": 96, "num_experts": 8, "head_dim": HIDDEN // HEADS}),
    "GPT-OSS": ("gpt_oss", {"intermediate_size": 96, "num_local_experts": 4, "head_dim": HIDDEN // HEADS}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_key_value_heads": HEADS,
            "moe_intermediate_size": 96,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 48,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
"""Models with experts: their ``model_type``, and sizes beside those of all."""
STEPS = 3
"""The first one is not measured, because it learns shapes."""


class Case(NamedTuple):
    """A training to measure."""

    name: str
    configuration: Configuration
    bf16: bool
    adapters: int = 0
    """Their rank; 0 if everything trains."""

    @property
    def model(self) -> Model:
        """The sizes that the planner counts with."""
        sizes = model_of(self.name)
        return sizes.adapted(self.adapters) if self.adapters else sizes

    @property
    def software(self) -> Software:
        """What trains it on the CPU."""
        size = 2 if self.bf16 else 4
        return Software(ElementBytes(weights=size, gradients=size, optimizer=8), all_to_all=True)


def model_of(name: str) -> Model:
    """Returns the sizes of a small model."""
    if name in EXPERTS:
        return model_of_config(name, json.loads(config_of(name).to_json_string()))
    if name == "GPT-2":
        sizes = Model.gpt(name, LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY)
        return Model(**{**vars(sizes), "composed_activation": True})
    grouped = name == "Qwen3"
    return Model(
        name=name,
        layers=LAYERS,
        hidden_size=HIDDEN,
        attention_heads=HEADS,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        key_value_heads=2 if grouped else HEADS,
        head_size=HIDDEN // HEADS,
        feed_forward_size=GATED["intermediate_size"],
        gated=True,
        tied_embeddings=False,
        biases=False,
        query_key_norms=grouped,
    )


def make(name: str) -> Any:
    """Returns the model of transformers that has these sizes."""
    torch.manual_seed(0)
    if name in EXPERTS:
        return transformers.AutoModelForCausalLM.from_config(config_of(name))
    ends = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": VOCABULARY}
    if name == "GPT-2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ends))
    sizes = {**GATED, **ends, "hidden_size": HIDDEN, "max_position_embeddings": LENGTH}
    if name == "Llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    heads = {"num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads))


def config_of(name: str) -> Any:
    """Returns the configuration of a small model with experts."""
    kind, sizes = EXPERTS[name]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "vocab_size": VOCABULARY}
    grouped = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH}
    return transformers.AutoConfig.for_model(kind, **{**GATED, **ends, **grouped, "hidden_size": HIDDEN, **sizes})


def measure_all_on_rank(cases: list[tuple[Case, dict[str, Any]]]) -> list[int]:
    """Returns the most bytes of live tensors on this rank for each case, which comes with its ds_config."""
    prepare_rank()
    ds_lgamp.install()
    return [_measure(*case) for case in cases]


def exchanges_on_rank(cases: list[tuple[Case, dict[str, Any]]]) -> list[tuple[int, int]]:
    """Returns, for each case, how many all-to-alls of hidden states this rank takes part in during all steps, and how
    many bytes it sends to others in them."""
    found, exchange = [], dist.all_to_all_single
    for case in cases:
        calls = sent = 0

        def counted(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
            nonlocal calls, sent
            # Gradients are flat. Scores of routers have 32 bits, and so has the model where its split is tried.
            if input.dim() == 2 and input.dtype == torch.bfloat16:
                calls += 1
                others = (rows for rank, rows in enumerate(input_split_sizes) if rank != dist.get_rank(group))
                sent += sum(others) * input.shape[1] * input.element_size()
            return exchange(output, input, output_split_sizes, input_split_sizes, group, async_op)

        dist.all_to_all_single = counted
        measure_all_on_rank([case])
        found.append((calls, sent))
    return found


def _measure(case: Case, config: dict[str, Any]) -> int:
    gc.collect()
    others = {storage._cdata: storage for storage in map(storage_of, live_tensors())}
    model = make(case.name)
    if case.adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=case.adapters, target_modules="all-linear"))
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    peaks = []
    for step in range(STEPS):
        existing = [tensor for tensor in live_tensors() if storage_of(tensor)._cdata not in others]
        with PeakMemory(existing) as memory:
            train_step(engine, step, case.configuration.micro_batch)
        peaks.append(memory.peak)
    finish_engines()
    return min(peaks[1:])


def train_step(engine: Any, step: int, micro_batch: int) -> float:
    """Trains one step. Returns the sum of the losses of this rank."""
    total = 0.0
    for number in range(engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 * step + 100 * dist.get_rank() + number)
        tokens = torch.randint(VOCABULARY, (micro_batch, LENGTH), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens.clone()).loss
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total
