"""Bytes that one micro-batch takes on every chunk of a model, measured with fake tensors: nothing is computed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from ds_lgamp.config import LgampConfig
from ds_lgamp.cost.activations import ActivationBytes, ChunkBytes
from ds_lgamp.integrations.deepspeed.config.precision import accumulation_dtype, input_dtype, parameter_dtype
from ds_lgamp.integrations.deepspeed.model.construction import places_of_tensors
from ds_lgamp.integrations.deepspeed.model.module import function_of
from ds_lgamp.integrations.deepspeed.model.recomputation import layer_sources, switch_on, switches_of
from ds_lgamp.partition.quantised import is_packed
from ds_lgamp.partition.shards import ACCUMULATES_IN_OTHER_DTYPES
from ds_lgamp.runtime.chunk import Chunk, as_leaves, cloned, differentiable, passed_on, tensors_in
from ds_lgamp.runtime.graph import backpropagate, begin_graph, end_graph, on_this_thread, own_loss
from ds_lgamp.runtime.logits import defer_logits
from ds_lgamp.runtime.measure import CollectiveCounter, PeakMemory
from ds_lgamp.runtime.messages import laid_out, message_bytes
from ds_lgamp.runtime.recompute import SavedTensors, read_states, undisturbed
from ds_lgamp.runtime.split_backward import SecondParts, splitting
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
        switch_on(_modules(layers))
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
            kept = Way(recompute=False)
            taken = replace(taken, kept=measure(way=kept))
            whole.switches = switches_of(whole.state.modules)
            with whole.selectively(nullcontext()):
                taken = replace(taken, selective=measure(way=kept) if whole.switches else None)
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


class Way(NamedTuple):
    """How a backward runs."""

    recompute: bool
    """Whether it computes the chunk again."""
    split: bool = False
    """Whether it has two parts."""


def chunk_bytes(
    compute: Callable[[Any], Any],
    inputs: Any,
    gradients: Sequence[torch.Tensor] | None,
    existing: Iterable[torch.Tensor],
    result_bytes: int,
    is_first: bool,
    way: Way,
) -> ChunkBytes:
    """Runs a forward and a backward as the executor does, and returns the bytes they take. If tensors are fake, these
    are the bytes that real ones would take.

    Args:
        compute: returns the chunk's result for its inputs; of the last chunk, the loss.
        inputs: the chunk's inputs.
        gradients: the gradients of the floating-point members of the result; of the last chunk, of the loss. None if
            the chunk has no backward.
        existing: what is in memory beside the inputs: parameters, their gradients, buffers and labels.
        result_bytes: what the next chunk gets; 0 for the last chunk.
        way: how the backward runs.
    """
    existing = [*existing, *(gradients or ()), *tensors_in(inputs)]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in existing)
    with PeakMemory(existing, is_fake) as memory, on_this_thread():
        before = memory.live()
        if gradients is None:
            with torch.no_grad():
                compute(inputs)
            return ChunkBytes(result_bytes, memory.peak - before, 0)
        parts = SecondParts()
        first_part: FirstPart = partial(parts.first, 0, 0) if way.split else _whole
        run = _Run(partial(_split, compute) if way.split else compute, inputs, gradients, result_bytes, is_first)
        taken = (_bytes_recomputed if way.recompute else _bytes_kept)(run, memory, first_part)
        if not way.split:
            return taken
        waiting, base, memory.peak = parts.nbytes(), memory.live(), 0
        parts.run(0, 0)
        return replace(taken, waiting=waiting, second_part=max(0, memory.peak - base))


FirstPart = Callable[[list[Any]], AbstractContextManager[None]]
"""Returns a context for a backward from some ends, which may leave something out."""


class _Run(NamedTuple):
    """A forward and a backward of a chunk."""

    compute: Callable[[Any], Any]
    inputs: Any
    gradients: Sequence[torch.Tensor]
    result_bytes: int
    is_first: bool

    @property
    def is_last(self) -> bool:
        return self.result_bytes == 0

    def ends(self, result: Any) -> list[Any]:
        """Returns where the backward begins."""
        return [own_loss(result)] if self.is_last else end_graph(result)


def _whole(_ends: list[Any]) -> AbstractContextManager[None]:
    return nullcontext()


def _split(compute: Callable[[Any], Any], inputs: Any) -> Any:
    with splitting():
        return compute(inputs)


def _bytes_recomputed(run: _Run, memory: PeakMemory, first_part: FirstPart) -> ChunkBytes:
    """Measures a chunk whose backward, or the first part of it, computes the chunk again."""
    before, saved = memory.live(), SavedTensors()
    with saved.dropped(), torch.jit.optimized_execution(False):
        result = run.compute(run.inputs if run.is_first else as_leaves(run.inputs))
    forward = memory.peak - before
    ends = run.ends(result)
    del result
    memory.peak = 0
    with torch.jit.optimized_execution(False):
        saved.restore(partial(run.compute, run.inputs if run.is_first else as_leaves(run.inputs)), completely=False)
    with first_part(ends):
        backpropagate(ends, run.gradients)
    return ChunkBytes(run.result_bytes, forward, memory.peak - before)


def _bytes_kept(run: _Run, memory: PeakMemory, first_part: FirstPart) -> ChunkBytes:
    """Measures a chunk that keeps what autograd saves."""
    before, copy = memory.live(), cloned(run.inputs)
    # The leaves receive gradients, and so they live until the end.
    leaves, followers = (None, copy) if run.is_first else begin_graph(copy)
    del copy
    result = run.compute(followers)
    forward = memory.peak - before - sum(tensor.nbytes for tensor in tensors_in(run.inputs))
    ends = run.ends(result)
    del followers
    with_result = memory.live()
    del result
    held, memory.peak = memory.live() - before, 0
    keeps_result = not run.is_last and before + held == with_result
    with first_part(ends):
        backpropagate(ends, run.gradients)
    by_autograd = held - run.result_bytes if keeps_result else held
    return ChunkBytes(run.result_bytes, forward, memory.peak - before - held, by_autograd, keeps_result)
