"""The ``ds_lgamp`` block of ds_config.json."""

import math
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from ds_lgamp.fields import parse_quantity
from ds_lgamp.schedule.orders import SINGLE_CHUNK_SCHEDULES

BLOCK = "ds_lgamp"


def _check_trace_steps(text: str) -> str:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError('give the first and the last step, from 1, such as "10:12"')
    return text


def _check_memory(text: str) -> str:
    try:
        parse_quantity("", text, "bytes")
    except ValueError as error:
        raise ValueError(str(error).partition("; ")[2]) from None
    return text


_OPTIONS_OF_COMPILE = {"backend": str, "mode": str, "dynamic": bool, "fullgraph": bool, "options": dict}
"""The options of torch.compile, each with its type. ``disable`` is not among them: without the key nothing is
compiled."""
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes of torch.compile that capture CUDA graphs."""


def check_compile(given: bool | dict[str, Any]) -> bool | dict[str, Any]:
    """Returns ``given``: whether to compile, or options of torch.compile. Raises ValueError for options that cannot
    work. torch itself knows which backends, modes and inner options it has."""
    options = given if isinstance(given, dict) else {}
    for name, value in options.items():
        if name not in _OPTIONS_OF_COMPILE:
            raise ValueError(f"{name} is no option of torch.compile; use {', '.join(_OPTIONS_OF_COMPILE)}")
        if not isinstance(value, kind := _OPTIONS_OF_COMPILE[name]):
            raise ValueError(f"its {name} must be a {kind.__name__}")
    if "mode" in options and "options" in options:
        raise ValueError("torch.compile takes a mode or options; keep one of them")
    of_mode = options.get("mode") in _WITH_GRAPHS or options.get("options", {}).get("triton.cudagraphs")
    if of_mode or options.get("backend") == "cudagraphs":
        raise ValueError(
            "its CUDA graphs would keep the addresses of weights, which change when they are gathered; use "
            + ("mode 'max-autotune-no-cudagraphs'" if of_mode else "'inductor'")
        )
    return given


TraceSteps = Annotated[str, AfterValidator(_check_trace_steps)]
Compile = Annotated[bool | dict[str, Any], AfterValidator(check_compile)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConfigError(ValueError):
    """A setting that cannot work; the message names key, value and fix."""


class LgampConfig(BaseModel):
    """The block. ``{}`` asks for the layered schedule, modular placement, automatic chunks, all micro-batches in one
    group, 2 resident chunks, and full recomputation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """false leaves stock DeepSpeed untouched, as if there were no block."""
    pipeline_ranks: PositiveInt | None = None
    """Over how many pipeline ranks to split a model that is no PipelineModule; default 1. A PipelineModule has its
    num_stages instead."""
    schedule: Literal["layered", "interleaved_1f1b", "1f1b", "gpipe", "zbv"] = "layered"
    """The order in which a rank computes."""
    placement: Literal["modular", "contiguous", "vee"] | None = None
    """How chunks are placed on pipeline ranks. The default is modular, contiguous for schedules with one chunk per
    rank, and vee for zbv: two chunks per rank, one on the way to the last rank and one on the way back."""
    chunks_per_rank: PositiveInt | None = None
    """Cuts the layers into this many chunks per pipeline rank by the module's ``partition_method``."""
    layers_per_chunk: PositiveInt | None = None
    """Cuts the layers into chunks of this many. With neither this key nor chunks_per_rank, every layer of the most
    frequent class starts a chunk; with modular placement, the first chunks hold more of them where the chunks would not
    be equally many on every pipeline rank."""
    pipeline_rank_speeds: list[Speed] | None = None
    """The relative speed of every pipeline rank, such as [2, 1]. The chunks of a rank then have as many layers of the
    most frequent class as its speed asks for, and all ranks have equally many chunks. Without chunks_per_rank, the
    slowest rank has chunks of one layer."""
    data_rank_speeds: list[Speed] | None = None
    """The relative speed of every data-parallel rank, such as [3, 1]. They share all their gradient_accumulation_steps
    by speed: with 4 on each of 2 ranks, 6 and 2. Losses and gradients stay the means over all micro-batches."""
    micro_batch_group: PositiveInt | Literal["all"] = "all"
    """How many micro-batches go through the chunks together (layered). Fewer need less memory for activations, and more
    communication."""
    resident_chunks: PositiveInt = 2
    """How many chunks may have their full weights on a rank at once under ZeRO stage 3, and their full gradients under
    stages 1 to 3. Stage 1 holds the gradients of all chunks if micro-batches go in several groups. With 1, gathers and
    reductions cannot hide behind compute."""
    keep_frozen: Literal["auto", "device", "host", "none"] = "auto"
    """Where frozen weights lie at stage 3, such as the base of adapters. device: every rank keeps all that its chunks
    use. host: a copy in the memory of each machine, which its data-parallel ranks share, is loaded for each use. Both
    gather nothing frozen. none: ranks shard and gather them as weights that train. auto: on the device if they take a
    quarter of its memory at most, else on the host if they take a quarter of these ranks' part of its memory at most,
    else none; none, too, with offload_param."""
    regather: Literal["network", "host"] = "network"
    """Where the weights of a chunk come from when a step needs them again at stage 3, as its backward does. network:
    from the other ranks, by a second gather. host: from a copy in this rank's host memory, which the first gather left
    there. A rank then gathers each chunk once per step, and its bus carries the rest."""
    quantised_gradient_bits: Literal[4, 8] = 8
    """In how many bits gradients travel with zero_optimization.zero_quantized_gradients. DeepSpeed's are 4."""
    defer_gathers: bool = False
    """When stages 1 and 2 gather the parameters that a step updated. false: right after the step; code that reads a
    parameter waits until it is gathered. true: in the next step, each chunk during the forward of the chunk before;
    code that reads a parameter earlier gets an error that says how to gather it."""
    overlap_update: bool = False
    """true: the optimizer updates each chunk by itself, with the same result to the bit. Where no update needs the
    gradients of other chunks, it runs while lower chunks' gradients are reduced. Where it does (gradient_clipping,
    fp16, bf16.check_grad_overflow, reproducible, models that are no PipelineModule), each update runs in the next step,
    before the chunk's forwards; stages 1 and 2 then gather as with defer_gathers. false: all updates run in the step,
    after the last reduction."""
    recompute: Literal["full", "selective", "none", "auto"] = "full"
    """full: the backward pass recomputes chunks from their stored input, except the last chunk if its backward follows
    its forward at once; selective: layers that offer it recompute a part of themselves, and everything else that
    autograd saves is kept; none: everything that autograd saves is kept; auto: as full in the first batch, which
    measures what autograd saves of each chunk, and from then on every rank recomputes only what it must to stay within
    recompute_memory, as selective does before as full does."""
    recompute_memory: Annotated[str, AfterValidator(_check_memory)] | None = None
    """The most memory that tensors may take on a rank's device with recompute "auto", such as "60 GB". The default is
    what the device has left, less a twentieth for what lies between tensors; a CPU needs a value."""
    split_backward: bool | PositiveInt = False
    """true: a backward pass computes the gradient of a chunk's input first, which other pipeline ranks wait for, and
    gradients of weights later, while its rank would wait. Results are the same to the bit, but for the gradient of a
    weight that a chunk reads in other ways, too, which is equal to rounding. As many passes of a rank may wait for
    their second part as there are pipeline ranks; a number sets how many, because each holds the inputs and the
    gradients of results of its matrix products. Weights that anything else reads than torch.nn.functional.linear or
    torch.addmm belong to the first part. Without pipeline ranks nothing changes."""
    overlap_exchanges: bool = False
    """true: where tokens travel among ranks that divide experts, a rank computes another micro-batch meanwhile. Two
    consecutive forwards of a chunk then run beside each other, with the same results to the bit, and the activations of
    both take memory at once. So do forwards that backwards repeat; backwards run one by one. For layers of DeepSpeed's
    AutoEP that draw no random numbers."""
    compile: Compile = False
    """true: torch.compile makes code of what layers compute, in the first batch; of a model that is no PipelineModule
    and no nn.Sequential, of its blocks. Equal layers share code. An object has options of torch.compile: backend, mode,
    dynamic, fullgraph, options. By default, the shapes of the first call get code of their own, and all other shapes
    share code. Results are equal to rounding. This is not compile.deepcompile of DeepSpeed."""
    blocks: str | None = None
    """The name in the model of the list of modules at which to split it, such as "model.layers"; not for a
    PipelineModule or an nn.Sequential. The default is the one that the model's own pipeline plan names, or else the one
    with most parameters."""
    model: str | None = None
    """The name of the model with the blocks in the module that deepspeed.initialize gets, such as "model", where the
    code around it is no part of what is split: every rank runs that code itself, with the model's outputs. The default
    is the model in a LightningModule, and for any other module the module itself. Implies outputs "all"."""
    dummy_inputs: dict[str, Any] | None = None
    """Arguments, by name, for one small forward of a model that is no PipelineModule and no nn.Sequential. The forward
    shows which modules of the model run before its blocks. Tensors are nested lists of numbers, or objects such as
    {"shape": [1, 3, 32, 32], "dtype": "float32"}; other objects are dictionaries of such values, and lists of objects
    or texts are lists. The default is the model's property dummy_inputs; without one, what its tokenizer makes of a
    text; without that, token ids."""
    outputs: Literal["loss", "all"] = "loss"
    """What engine(...) returns in training, if the model is no PipelineModule. loss: only the model's loss, once all
    micro-batches of a step are there. all: all outputs, at once, from which the script computes its loss. Stage 3 then
    gathers for the forward of every call."""
    loss_chunk: NonNegativeInt | Literal["auto"] | None = "auto"
    """For how many rows (tokens) at a time head and loss are computed, forward and backward together, so that logits
    and their gradients never exist whole. Holds where torch's cross_entropy gets the result of a linear layer, with
    outputs "loss", and for Megatron-core's GPT, also where ranks have slices of the vocabulary. auto: as many rows as
    have no more logits than all rows have elements of hidden states, but at least 1,024, where that saves memory. 0 or
    null: all at once."""
    activation_dtype: Literal["bf16", "fp8"] | None = None
    """In which type hidden states and their gradients travel between pipeline ranks, if it is narrower than theirs.
    bf16: rounded to 16 bits. fp8: rounded to 8 bits (e4m3), with a scale in fp32 for each block of 128 elements. Only
    tensors that need a gradient and have at least 1,024 elements are rounded, and no masks; evaluation rounds nothing.
    By default everything travels as it is."""
    stochastic_rounding: bool = False
    """true: an update of bf16 weights and moments (bf16.bf16_master_weights_and_grads and bf16_optimizer_states) is
    computed in fp32 and rounded up or down by chance, so that many small ones add up on average. The same weights are
    rounded alike in every layout, and after a checkpoint is loaded. false: to the nearest number, which loses what is
    smaller than a 512th of a weight."""
    offload_activations: Literal["none", "cpu", "nvme"] = "none"
    """cpu: the inputs from which backward passes recompute wait in the host's memory. They leave the device after a
    forward, and come back during the compute before the backward. nvme: they wait on a disk, in the folder nvme_path.
    none: they stay on the device."""
    nvme_path: str | None = None
    """A folder on a disk for offload_activations; by default the nvme_path of offload_optimizer and offload_param."""
    reproducible: bool = False
    """true: random numbers and orders of summation depend only on step, layer, micro-batch and data-parallel rank. In
    fp32 on CPU, a run is then equal to the bit under every schedule, placement, cut into chunks, number of pipeline
    ranks, ZeRO stage, resident_chunks and recompute, for the same number of data-parallel ranks and the same
    data_rank_speeds. At stages 2 and 3, a smaller micro_batch_group sums in another order, and so do shards of a node
    (zero_hpz_partition_size, mics_shard_size)."""
    nonfinite: Literal["skip", "abort", "report"] | None = None
    """What happens after a loss or a gradient that is NaN or infinite; by default nothing looks for one. All three
    values name the first micro-batch, layer and parameter at fault. skip: all ranks leave out the update, which counts
    as skipped. abort: all ranks raise NonfiniteError. report: training goes on. The host learns of it one step late, so
    that it never waits for the device. With fp16, the loss scale takes care of infinite gradients, as always."""
    asynchronous_save: bool = True
    """true: save_checkpoint copies the state to the host's memory, and returns while a thread writes it. The next save,
    a load and the end of the script wait for the thread. false, and wherever state lies on nvme: save_checkpoint
    returns when the checkpoint is on disk."""
    keep_last: PositiveInt | None = None
    """How many checkpoints to keep in a directory; default all."""
    trace: str | None = None
    """A folder in which to record what every rank does in the steps of trace_steps: actions, waits, bytes and memory.
    ``ds_lgamp view`` shows it. Relative to the working directory; all ranks write there."""
    trace_steps: TraceSteps | None = None
    """The first and the last training step that trace records, such as "10:12", which is the default. Steps count from
    1."""
    live_checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """A folder on each node, for this job alone. Each step's state is copied there beside training, so that a job that
    dies loses one step at most: load_checkpoint then makes it a checkpoint, and goes on from it. In /dev/shm it is in
    memory, which outlives processes but not the node. It takes two states, or three if overlap_update or offloading
    updates chunks before the step. A job that ends well leaves none if its last checkpoint is as new. Nothing is copied
    by default."""
    hang_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 600.0
    """How many seconds ranks may wait in a batch for one that stands still. Then all ranks end, and name it. Warnings
    come from 30 seconds on. The first batch may take ten times as long, but 20 minutes at most unless this is more,
    because it may compile. null: ranks only warn, and wait for ever."""

    @property
    def patience(self) -> float:
        """``hang_timeout`` in seconds, infinite if it is null."""
        return math.inf if self.hang_timeout is None else self.hang_timeout

    @property
    def recompute_bytes(self) -> int | None:
        """``recompute_memory`` in bytes, if it is given."""
        given = self.recompute_memory
        return None if given is None else int(parse_quantity("recompute_memory", given, "bytes"))

    @property
    def traced_steps(self) -> tuple[int, int]:
        """The first and the last step of ``trace_steps``."""
        first, last = (self.trace_steps or "10:12").split(":")
        return int(first), int(last)

    @property
    def one_chunk_per_rank(self) -> bool:
        """Whether chunks are DeepSpeed's own pipeline stages."""
        return self.chunks_per_rank == 1 or self.schedule in SINGLE_CHUNK_SCHEDULES

    @property
    def fixed_chunks_per_rank(self) -> int | None:
        """``chunks_per_rank``, or what zbv has; None if layers decide."""
        return 2 if self.schedule == "zbv" else self.chunks_per_rank

    @model_validator(mode="after")
    def _check_combinations(self) -> "LgampConfig":
        if self.chunks_per_rank is not None and self.layers_per_chunk is not None:
            raise ValueError("chunks_per_rank and layers_per_chunk both cut the layers; keep one of them")
        if self.pipeline_rank_speeds is not None and self.layers_per_chunk is not None:
            raise ValueError(
                "pipeline_rank_speeds and layers_per_chunk both size the chunks; keep one of them, or set "
                "chunks_per_rank"
            )
        cuts = self.layers_per_chunk is not None or self.chunks_per_rank not in (None, 1)
        if self.schedule in SINGLE_CHUNK_SCHEDULES and cuts:
            key = "chunks_per_rank" if self.layers_per_chunk is None else "layers_per_chunk"
            raise ValueError(
                f"{key} is {getattr(self, key)}, but schedule '{self.schedule}' has one chunk per pipeline rank; "
                f"remove {key} or use schedule 'layered'"
            )
        if self.model is not None and self.outputs == "loss" and "outputs" in self.model_fields_set:
            raise ValueError(
                "outputs is 'loss', but the code around model computes the loss of its outputs; use 'all', or remove "
                "outputs"
            )
        if self.nvme_path is not None and self.offload_activations != "nvme":
            raise ValueError(
                f"nvme_path is {self.nvme_path!r}, but offload_activations is '{self.offload_activations}'; use "
                "'nvme', or remove nvme_path"
            )
        if self.trace_steps is not None and self.trace is None:
            raise ValueError(f"trace_steps is {self.trace_steps!r}, but there is no trace; set trace to a folder")
        if self.live_checkpoint is not None and self.nonfinite == "abort":
            raise ValueError(
                f"live_checkpoint is {self.live_checkpoint!r}, but nonfinite is 'abort', which finds a bad step when "
                "its state is live already; use 'skip', or remove live_checkpoint"
            )
        if self.schedule != "layered" and self.micro_batch_group != "all":
            raise ValueError(
                f"micro_batch_group is {self.micro_batch_group}, but groups belong to schedule 'layered'; "
                f"remove it or replace schedule '{self.schedule}'"
            )
        if self.schedule == "interleaved_1f1b" and self.placement == "contiguous":
            raise ValueError("placement is 'contiguous', but schedule 'interleaved_1f1b' needs 'modular'; remove it")
        self._check_vee()
        self._check_computing()
        return self

    def _check_computing(self) -> None:
        if self.offload_activations != "none" and self.recompute not in ("full", "auto"):
            raise ValueError(
                f"recompute is '{self.recompute}', but offload_activations stores what recomputation starts from; use "
                "'full' or 'auto', or remove offload_activations"
            )
        if self.recompute_memory is not None and self.recompute != "auto":
            raise ValueError(
                f"recompute_memory is {self.recompute_memory!r}, but recompute is '{self.recompute}'; use 'auto', or "
                "remove recompute_memory"
            )
        if self.activation_dtype is not None and self.reproducible:
            raise ValueError(
                f"activation_dtype is '{self.activation_dtype}', which rounds where pipeline ranks meet, but "
                "reproducible promises the same bits for any number of them; remove one of them"
            )
        if self.compile is not False and self.recompute == "auto":
            raise ValueError(
                f"compile is {self.compile!r}, but recompute is 'auto', which cannot measure compiled code; set "
                "recompute to 'full' or 'none'"
            )
        parts = {
            "compile": "compiles whole backwards",
            "recompute": "measures whole ones",
            "reproducible": "promises the same bits also for weights that are read in other ways",
        }
        exchanges = {
            "compile": "compiles in one thread",
            "split_backward": "keeps parts of backwards apart",
            "offload_activations": "brings inputs back one by one",
            "reproducible": "seeds generators before each layer of a micro-batch",
        }
        for key, reasons in (("split_backward", parts), ("overlap_exchanges", exchanges)):
            for other, reason in reasons.items() if getattr(self, key) else ():
                value = getattr(self, other)
                if value == "auto" if other == "recompute" else value not in (False, "none"):
                    raise ValueError(
                        f"{key} is {getattr(self, key)}, but {other} is {value!r}, which {reason}; remove one of them"
                    )
        if self.compile is not False and self.reproducible:
            raise ValueError(
                f"compile is {self.compile!r}, whose code for the first shapes rounds otherwise than that for others, "
                "but reproducible promises the same bits for any number of pipeline ranks; remove one of them"
            )

    def _check_vee(self) -> None:
        if self.schedule != "zbv" and self.placement == "vee":
            raise ValueError("placement is 'vee', which belongs to schedule 'zbv'; use that, or remove placement")
        allowed = {"chunks_per_rank": 2, "layers_per_chunk": None, "placement": "vee"}
        for key in allowed if self.schedule == "zbv" else ():
            if (value := getattr(self, key)) not in (None, allowed[key]):
                raise ValueError(
                    f"{key} is {value!r}, but schedule 'zbv' has two chunks per pipeline rank, placed as a vee; remove "
                    f"{key} or use schedule 'layered'"
                )


def read_block(config: dict[str, Any]) -> LgampConfig | None:
    """The block of a DeepSpeed configuration; None if there is none or it is not enabled.

    Raises ConfigError for unknown keys, wrong types and impossible combinations.
    """
    _refuse_misspelt_block(config)
    if (block := config.get(BLOCK)) is None:
        return None
    if not isinstance(block, dict) or not all(isinstance(key, str) for key in block):
        raise ConfigError(f"{BLOCK} is {block!r}; it must be an object such as {{}}")
    if block.get("enabled") is False:
        return None
    try:
        return LgampConfig(**block)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _refuse_misspelt_block(config: dict[str, Any]) -> None:
    """Raises ConfigError for a key that looks like a typo of the block, which DeepSpeed would silently ignore."""
    for key in config:
        if key != BLOCK and get_close_matches(str(key).lower().replace("-", "_"), [BLOCK], cutoff=0.8):
            raise ConfigError(f"{key} is no known key; did you mean {BLOCK}? Rename it if it is a key of your own")


def _sentence(error: ValidationError) -> str:
    """The first complaint in one sentence."""
    first = error.errors()[0]
    if not first["loc"]:
        # Complaints about several keys begin with one of them.
        return f"{BLOCK}.{first['msg'].removeprefix('Value error, ')}"
    key = str(first["loc"][0])
    place = f"[{member}]" if isinstance(member := (*first["loc"], None)[1], int) else ""
    if first["type"] == "extra_forbidden":
        nearest = get_close_matches(key, LgampConfig.model_fields, n=1)
        known = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(LgampConfig.model_fields)}"
        return f"{BLOCK}.{key} is no known key; {known}"
    messages = [cause["msg"].removeprefix("Value error, ") for cause in error.errors() if cause["loc"][0] == key]
    causes = {message[0].lower() + message[1:] for message in messages}
    return f"{BLOCK}.{key}{place} is {first['input']!r}: {' or '.join(sorted(causes))}"
