"""Lets Megatron-core 0.16 build several chunks on one pipeline rank.

Megatron-core refuses a virtual pipeline on one rank (``parallel_state``). Without that refusal, it would silently give
all layers to every chunk (``transformer_block``), and number the layers of every chunk from the first
(``transformer_layer``). In a model with tied embeddings, both ends would have a weight of their own. The patches in
patches/ mend all four.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig, transformer_block, transformer_layer
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import unwrap_model

from ds_lgamp.config import BLOCK, ConfigError

_stock_initialize = parallel_state.initialize_model_parallel
_stock_layers = transformer_block.get_num_layers_to_build
_stock_offset = transformer_layer.get_transformer_layer_offset


@wraps(_stock_initialize)
def initialize_model_parallel(*positional: Any, **arguments: Any) -> None:
    bound = signature(_stock_initialize).bind(*positional, **arguments)
    bound.apply_defaults()
    chunks = bound.arguments["virtual_pipeline_model_parallel_size"]
    if chunks is None or bound.arguments["pipeline_model_parallel_size"] > 1:
        _stock_initialize(*positional, **arguments)
        return
    bound.arguments["virtual_pipeline_model_parallel_size"] = None
    _stock_initialize(*bound.args, **bound.kwargs)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)


@wraps(_stock_layers)
def get_num_layers_to_build(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    if _on_one_rank(config):
        return _layer_count(config, _known(vp_stage))
    return _stock_layers(config, vp_stage, pp_rank)


@wraps(_stock_offset)
def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    if _on_one_rank(config):
        return sum(_layer_count(config, stage) for stage in range(_known(vp_stage)))
    return _stock_offset(config, vp_stage, pp_rank)


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    _stock_initialize: initialize_model_parallel,
    _stock_layers: get_num_layers_to_build,
    _stock_offset: get_transformer_layer_offset,
}


def host_cuts_one_rank() -> bool:
    """Whether Megatron-core itself cuts the layers of one pipeline rank into chunks. With patches/ it does."""
    config = TransformerConfig(
        num_layers=2, hidden_size=1, num_attention_heads=1, virtual_pipeline_model_parallel_size=2
    )
    return _stock_layers(config, vp_stage=0, pp_rank=0) == 1


def share_embedding(models: Sequence[torch.nn.Module]) -> None:
    """Lets the last chunk of a rank compute with the embedding of the first, if the model ties them.

    Call it before the chunks go to DistributedDataParallel. The gradients of the first chunk then include both uses.
    """
    first, last = unwrap_model(models[0]), unwrap_model(models[-1])
    if not has_two_embeddings(models):
        return
    if hasattr(last, "share_embedding_of"):
        last.share_embedding_of(first)
    else:
        last.output_layer.register_parameter("weight", None)
        # The weight is looked up at every call, because building on the meta device replaces parameters.
        last.shared_embedding_or_output_weight = lambda: first.embedding.word_embeddings.weight
        # A checkpoint takes the weight from the first chunk.
        last.tie_embeddings_and_output_weights_state_dict = lambda *positional, **arguments: None


def has_two_embeddings(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the chunks of a model with one tied embedding have two weights for it."""
    last = unwrap_model(models[-1])
    tied = getattr(last, "share_embeddings_and_output_weights", False)
    return len(models) > 1 and tied and last.output_layer.weight is not None


def refuse_common(models: Sequence[torch.nn.Module], may: Callable[[torch.nn.Parameter], bool], reason: str) -> None:
    """Raises ConfigError with ``reason`` if two chunks of a rank have a parameter in common that they ``may`` not."""
    owners: dict[torch.nn.Parameter, int] = {}
    for number, model in enumerate(models):
        for name, parameter in unwrap_model(model).named_parameters():
            owner = owners.setdefault(parameter, number)
            if owner != number and not may(parameter):
                raise ConfigError(
                    f"{name} of chunk {number} on this rank is also a parameter of chunk {owner}, but {reason}; put "
                    "modules that share parameters into one chunk"
                )


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """Returns the device of a rank's chunks; Megatron-core's if none of them has parameters."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device(torch.cuda.current_device())


def check_layers(models: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigError unless every layer of the model is in exactly one chunk."""
    members = [unwrap_model(model) for model in models]
    built = sum(len(layers_of(member)) for member in members)
    wanted = members[0].config.num_layers
    if built != wanted:
        raise ConfigError(
            f"the chunks of one pipeline rank have {built} layers, but num_layers is {wanted}: "
            f"{type(members[0]).__name__} ignores vp_stage; use more pipeline ranks, or set chunks_per_rank to 1"
        )


def layers_of(model: Any) -> list[torch.nn.Module]:
    """Returns the layers of a chunk. GPTModel has them in ``decoder``, BertModel in ``encoder``, T5Model in both."""
    blocks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    return [layer for block in blocks for layer in getattr(block, "layers", ())]


def constructor_without_chunks(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor for a model that takes no ``vp_stage`` and cuts its layers evenly, such as MambaModel.

    It raises ConfigError if the configuration asks for another cut, which the model would ignore.
    """

    @wraps(stock)
    def __init__(self: Any, config: Any, *positional: Any, **options: Any) -> None:
        chunks, layout = config.virtual_pipeline_model_parallel_size, config.pipeline_model_parallel_layout
        if chunks is not None or layout is not None:
            raise ConfigError(
                f"{type(self).__name__} takes no vp_stage, so it has no chunks; set {BLOCK}.chunks_per_rank to 1, and "
                "a number of layers that the pipeline ranks divide"
            )
        stock(self, config, *positional, **options)

    return __init__


def constructor_by_pattern(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of a model that a pattern of layers cuts, such as HybridModel.

    It raises ConfigError unless the pattern has one part for every chunk. The model would leave out layers.
    """

    @wraps(stock)
    def __init__(self: Any, *positional: Any, **options: Any) -> None:
        given = signature(stock).bind(self, *positional, **options).arguments
        config, pattern = given["config"], given.get("hybrid_layer_pattern") or ""
        on_rank, parts = config.virtual_pipeline_model_parallel_size, pattern.partition("/")[0].count("|") + 1
        if on_rank is not None:
            _known(given.get("vp_stage"))
        chunks = config.pipeline_model_parallel_size * (on_rank or 1)
        # Without chunks, the model itself divides a pattern without parts among the pipeline ranks.
        if parts != chunks and (parts > 1 or on_rank is not None):
            raise ConfigError(
                f"hybrid_layer_pattern is {pattern!r}, which has {parts} parts for {chunks} chunks; write '|' between "
                "the layers of two chunks"
            )
        stock(self, *positional, **options)

    return __init__


def _known(stage: int | None) -> int:
    if stage is None:
        raise ConfigError("the model does not say which of a rank's chunks it builds; pass it vp_stage")
    return stage


def _on_one_rank(config: Any) -> bool:
    return config.pipeline_model_parallel_size == 1 and config.virtual_pipeline_model_parallel_size is not None


def _layer_count(config: Any, stage: int) -> int:
    """Returns the number of layers of a chunk, counted as Megatron-core does on several pipeline ranks."""
    if config.pipeline_model_parallel_layout is not None:
        return config.pipeline_model_parallel_layout.layout[0][stage].count(LayerType.decoder)
    chunks = config.virtual_pipeline_model_parallel_size
    first, last = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    layers, rest = divmod(config.num_layers + first + last, chunks)
    if rest:
        raise ConfigError(
            f"num_layers is {config.num_layers}, which {chunks} chunks on one pipeline rank cannot share equally; set "
            "pipeline_model_parallel_layout, or another number of chunks"
        )
    return layers - (first and stage == 0) - (last and stage == chunks - 1)


class Chunks(list[torch.nn.Module]):
    """The chunks of one pipeline rank. Megatron-LM takes them for one model, and sets its ``model_type``."""

    @property
    def model_type(self) -> Any:
        return self[0].model_type

    @model_type.setter
    def model_type(self, value: Any) -> None:
        for model in self:
            model.model_type = value


def chunks_provider(provider: Callable[..., torch.nn.Module], count: int) -> Callable[..., Chunks]:
    """Returns a provider that builds ``count`` chunks where ``provider`` would build the whole model of a single
    pipeline rank.

    Raises ConfigError if the model cannot be built in chunks.
    """
    parameters = signature(provider).parameters.values()
    if not any(parameter.name == "vp_stage" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigError(
            "the script's model_provider takes no vp_stage, so its model has no chunks; set "
            f"{BLOCK}.chunks_per_rank to 1"
        )

    def provide(pre_process: bool = True, post_process: bool = True, **options: Any) -> Chunks:
        chunks = Chunks()
        for stage in range(count):
            first, last = pre_process and stage == 0, post_process and stage == count - 1
            model: Any = provider(pre_process=first, post_process=last, vp_stage=stage, **options)
            model.vp_stage = stage
            chunks.append(model)
        check_layers(chunks)
        share_embedding(chunks)
        return chunks

    return provide


def builder_of_one_rank(stock: Callable[..., Any], begin: Callable[[], None]) -> Callable[..., Any]:
    """Returns ``build_virtual_pipeline_stages``, which otherwise builds one chunk on one pipeline rank."""

    @wraps(stock)
    def build(*positional: Any, **options: Any) -> list[torch.nn.Module]:
        begin()
        call = signature(stock).bind(*positional, **options)
        call.apply_defaults()
        given = call.arguments
        if given["vp_size"] is None or given["pg_collection"].pp.size() > 1:
            return stock(*positional, **options)
        chunks = chunks_provider(partial(given["build_model_func"], given["pg_collection"]), given["vp_size"])()
        chunks.model_type = given["model_type"]
        return chunks

    return build
