"""Bytes that one micro-batch takes on every chunk of a model, measured with fake tensors: nothing is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, input_dtype, parameter_dtype
from ds_lgamp.integrations.deepspeed.model.construction import places_of_tensors
from ds_lgamp.integrations.deepspeed.model.module import function_of
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources, switch_on
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.partition.shards import ACCUMULATES_IN_OTHER_DTYPES
from ds_lgamp.runtime.chunk import Chunk, cloned, differentiable, passed_on
from ds_lgamp.runtime.chunk_memory import Way, chunk_bytes
from ds_lgamp.runtime.logits import defer_logits
from ds_lgamp.runtime.measure import CollectiveCounter
from ds_lgamp.runtime.messages import laid_out, message_bytes
from ds_lgamp.runtime.recompute import read_states, undisturbed
from ds_lgamp.schedule.spec import ProgramSpec


class UnknownActivations(Exception):
    """The bytes of activations cannot be known; the message is a clause that says why."""


def first_micro_batch(training_data: Any, collate_fn: Callable[[list], Any] | None, samples: int) -> tuple[Any, Any]:
    """Returns inputs and labels of a micro-batch of ``samples``, as DeepSpeed's loader makes it of the first ones.

    Raises UnknownActivations if there are no data, or if they cannot be asked by index.
    """
    if training_data is None:
        raise UnknownActivations("deepspeed.initialize got no training_data")
    try:
        chosen = [training_data[index % len(training_data)] for index in range(samples)]
        inputs, labels = (collate_fn or default_collate)(chosen)[:2]
    except Exception as error:
        raise UnknownActivations(f"the first samples of training_data failed ({_first_line(error)})") from None
    return inputs, labels


def measure_activations(
    module: PipelineModule,
    layers: Sequence[Any],
    bounds: Sequence[int],
    micro_batch: tuple[Any, Any],
    spec: ProgramSpec,
    settings: LgampConfig,
    config: Any,
) -> ActivationBytes:
    """Runs one micro-batch forward and backward through every chunk, in training mode.

    Args:
        layers: those of the whole model as built, with memory or without. They stay as they are, but for the switch of
            selective recomputation.
        bounds: the first layer of every chunk, then the number of layers.
        micro_batch: inputs and labels.
        config: the DeepSpeedConfig.

    Raises UnknownActivations if a layer does not work on tensors without values.
    """
    device = torch.device(get_accelerator().current_device_name())
    sources = layer_sources(device)
    states = [leaf for leaf in tree_leaves(read_states(sources)) if isinstance(leaf, torch.Tensor)]
    inputs, labels = micro_batch
    if settings.recompute == "selective":
        switch_on(nn.ModuleList(_modules(layers)))
    defer_logits(_modules(layers), module.loss_fn, settings.loss_chunk)
    try:
        with undisturbed(sources), FakeTensorMode(allow_non_fake_inputs=True), faked(layers, config, device):
            fake = _fake_data(inputs, device, input_dtype(config)), _fake_data(labels, device)
            with _Draws() as draws:
                measured = _chunks(module, layers, bounds, fake, spec, settings)
                chunks, flops, all_to_all = map(list, zip(*measured))
    except Exception as error:
        raise UnknownActivations(f"a layer does not work on tensors without values ({_first_line(error)})") from None
    on_host = device.type == "cpu" and not settings.reproducible
    return ActivationBytes(
        inputs=_bytes_of(inputs),
        labels=_bytes_of(labels),
        chunks=chunks,
        random_states=sum(state.nbytes for state in states) if on_host else 0,
        draws=draws.any,
        flops=flops,
        all_to_all=all_to_all,
    )


def _chunks(
    module: PipelineModule,
    layers: Sequence[Any],
    bounds: Sequence[int],
    data: tuple[Any, Any],
    spec: ProgramSpec,
    settings: LgampConfig,
) -> Iterator[tuple[ChunkBytes, int, int]]:
    """Yields the bytes of every chunk, the floating-point operations of its forward, and the bytes that its all-to-alls
    send."""
    functions = [function_of(spec, layer) for spec, layer in zip(module._layer_specs, layers)]
    last, (inputs, labels) = len(bounds) - 2, data
    between_layers = laid_out if settings.reproducible else None
    for chunk in range(last + 1):
        own = slice(bounds[chunk], bounds[chunk + 1])
        whole = Chunk(functions[own], bounds[chunk], between_layers=between_layers)
        compute = partial(_computed, whole, module.loss_fn if chunk == last else None, labels)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = compute(inputs)
        gradients = [torch.ones_like(member) for member in differentiable(result)]
        with CollectiveCounter() as sent:
            measure = partial(
                chunk_bytes,
                compute,
                inputs,
                gradients if chunk >= spec.first_trained else None,
                [*_memory_of(layers[own]), *tree_leaves(labels)],
                0 if chunk == last else _bytes_of(result),
                is_first=chunk == 0,
            )
            taken = measure(way=Way(chunk in spec.recomputed_chunks, chunk in spec.split_chunks))
        if settings.recompute == "auto" and chunk in spec.recomputed_chunks:
            taken = replace(taken, kept=measure(way=Way(recompute=False)))
        if settings.activation_dtype is not None and spec.first_trained <= chunk < last:
            with torch.enable_grad():
                result = passed_on(compute(cloned(inputs)), None, marks=True)
            taken = replace(taken, sent=message_bytes(result, settings.activation_dtype))
        yield taken, counter.get_total_flops(), sent.bytes_sent["all_to_all"]
        inputs = result


def _computed(layers: Chunk, loss_fn: Callable[[Any, Any], Any] | None, labels: Any, inputs: Any) -> Any:
    """Returns the result of a chunk; with ``loss_fn``, the loss."""
    result = layers(inputs, 0)
    return result if loss_fn is None else loss_fn(result, labels)


@contextmanager
def faked(layers: Sequence[Any], config: Any, device: torch.device) -> Iterator[dict[int, torch.Tensor]]:
    """Replaces parameters and buffers by fake ones inside the block, in the types that DeepSpeed casts them to. Yields
    the fake ones by the ids of those that they replace."""
    buffer_type = None if config.buffer_dtype is None else DtypeEnum(config.buffer_dtype).value
    replaced: dict[int, torch.Tensor] = {}
    places = places_of_tensors(_modules(layers))
    try:
        for tensors, name, tensor in places:
            if id(tensor) not in replaced:
                data_type = parameter_dtype(config) if isinstance(tensor, nn.Parameter) else buffer_type
                data_type = None if isinstance(tensor, nn.Parameter) and is_packed(tensor) else data_type
                replaced[id(tensor)] = _fake_weight(tensor, data_type, accumulation_dtype(config), device)
            tensors[name] = replaced[id(tensor)]
        yield replaced
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor


def _fake_weight(
    tensor: torch.Tensor, data_type: torch.dtype | None, gradient_type: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns a fake tensor of the same kind. A parameter that trains has a gradient already, as it has in every
    micro-batch but the first."""
    cast = data_type if data_type is not None and tensor.is_floating_point() else tensor.dtype
    values = torch.empty(tensor.shape, dtype=cast, device=device)
    if not isinstance(tensor, nn.Parameter):
        return values
    parameter = nn.Parameter(values, tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    if tensor.requires_grad:
        if ACCUMULATES_IN_OTHER_DTYPES and cast != gradient_type:
            # As the partition does: autograd adds to a gradient of any type.
            parameter.grad_dtype, cast = None, gradient_type
        parameter.grad = torch.zeros_like(values, dtype=cast)
    return parameter


def _fake_data(value: Any, device: torch.device, data_type: torch.dtype | None = None) -> Any:
    """Returns what the engine makes of a micro-batch: tensors on ``device``, floating-point ones in ``data_type``,
    and tuples for lists."""
    if isinstance(value, torch.Tensor):
        cast = data_type if data_type is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=cast, device=device)
    if isinstance(value, (list, tuple)):
        return tuple(_fake_data(member, device, data_type) for member in value)
    return value


def _modules(layers: Sequence[Any]) -> list[nn.Module]:
    """Returns every module of ``layers`` once."""
    return list(dict.fromkeys(part for layer in layers if isinstance(layer, nn.Module) for part in layer.modules()))


def _memory_of(layers: Sequence[Any]) -> list[torch.Tensor]:
    """Returns parameters, gradients and buffers of ``layers``."""
    tensors = [tensor for _, _, tensor in places_of_tensors(_modules(layers))]
    return [*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)]


class _Draws(TorchDispatchMode):
    """Whether an operation drew random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            names = [argument.name for argument in function._schema.arguments]
            given = {**dict(zip(names, args)), **(kwargs or {})}
            # Attention has the tag even where it drops nothing.
            self.any = self.any or "dropout_p" not in names or given.get("dropout_p", 0.0) != 0
        return function(*args, **(kwargs or {}))


def _bytes_of(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
