"""The state of a plain script's own model while its layers are on many ranks: all of it, by the model's own names."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, nn

from ds_lgamp.checkpoint.files import on_first_rank
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run
from ds_lgamp.integrations.deepspeed.model.auto_ep import is_replaced, under_original_names
from ds_lgamp.integrations.deepspeed.model.experts import divided, place_among_experts, with_all_experts
from ds_lgamp.integrations.deepspeed.model.layer_moves import transfer
from ds_lgamp.integrations.deepspeed.model.module import built_layers, over_pipeline, prefix_of, tensors_of
from ds_lgamp.integrations.deepspeed.plain.between_ranks import Next, agree, others_read, without_values
from ds_lgamp.integrations.deepspeed.plain.layers import Elsewhere, replace_method
from ds_lgamp.integrations.split.parts import full_shape
from ds_lgamp.integrations.split.stand_ins import replacing
from ds_lgamp.integrations.split.state import buffers_of
from ds_lgamp.partition.agreement import everyone, host_group, raise_everywhere


class LastRead(NamedTuple):
    """The state of the whole model that was read last."""

    steps: int
    """The number of steps before."""
    state: Callable[[], dict[str, Any] | None]
    """A weak reference."""
    shown: Mapping[str, Any]
    """The state without values; see :func:`without_values`."""
    number: int
    """Of this read, alike on all ranks."""


_NUMBERS = count()
"""Of reads of any engine."""


class Engine(Run, Protocol):
    """An engine, as far as its model's state is concerned."""

    module: Any
    """The model of the script."""
    last_read: LastRead | None
    has_whole_model: bool
    """Whether modules of the model have all their values for now, on this rank alone."""
    elsewhere: Elsewhere

    def note_reading(self) -> None:
        """Called when the script reads the state."""

    def forget_values(self) -> None:
        """Forgets values of the model that were read, because others are loaded."""

    @property
    def num_stages(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class _Tensor(NamedTuple):
    """A tensor of the state, as its pipeline rank describes it to the first one."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def is_spread(engine: Engine) -> bool:
    """Whether this rank lacks current values of the model between two batches, so that reading them needs others, or
    has experts of other names and shapes than the script's."""
    defers = engine.optimizer.partition.frees_weights or engine.lgamp.program_spec.defers_gathers
    return engine.num_stages > 1 or defers or bool(divided(engine.lgamp.placed)) or is_replaced(engine.module)


def give_state(engine: Engine) -> None:
    """Makes ``state_dict``, ``load_state_dict`` and ``save_pretrained`` of the engine's model act on the whole model,
    and ``state_dict`` and ``save_pretrained`` of models inside it on all that they have.

    A model that every rank has whole keeps its own ``state_dict`` and ``save_pretrained``.
    """
    replace_method(engine.module, "load_state_dict", partial(_loads_whole, engine))
    if not is_spread(engine):
        return
    for path, module in engine.module.named_modules():
        saves = hasattr(module, "save_pretrained")
        if saves or not path:
            replace_method(module, "state_dict", partial(_gathering, engine, path))
        if saves:
            replace_method(module, "save_pretrained", partial(_saving, engine, path))


def _loads_whole(engine: Engine, stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise ConfigError(f"load_state_dict has assign=True, but a {BLOCK} block keeps its parameters; remove it")
        return _load(engine, stock, state_dict, strict)

    return load_state_dict


def _gathering(engine: Engine, path: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the ``state_dict`` of the model with this name in the engine's."""

    def state_dict(*positional: Any, **options: Any) -> Any:
        given = signature(stock).bind(*positional, **options).arguments
        if given.get("keep_vars") or engine.has_whole_model:
            return stock(*positional, **options)
        state = _within(path, _read(engine))
        if given.get("destination") is None and not given.get("prefix"):
            return state
        destination = given.get("destination", {})
        destination.update({f"{given.get('prefix', '')}{name}": value for name, value in state.items()})
        return destination

    return state_dict


def _saving(engine: Engine, path: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the ``save_pretrained`` of the model with this name in the engine's. It gathers the state unless it
    is given one, and writes it on the first rank.

    One rank alone may call it while the script holds the state that all ranks have read since the last step, as
    Trainers do whose models take no state.
    """
    model = engine.module.get_submodule(path)

    def save_pretrained(*positional: Any, **options: Any) -> Any:
        if engine.has_whole_model:
            return stock(*positional, **options)
        given = signature(stock).bind(*positional, **options)
        state = given.arguments.get("state_dict", given.arguments.get("kwargs", {}).get("state_dict"))
        if state is None:
            # Empty on all ranks but one.
            last = _last(engine)
            state = _within(path, _read(engine) if last is None else last)
        if dist.get_rank() != 0:
            return None
        if is_replaced(model):
            # Its own names are not those of the layers that AutoEP has replaced.
            options["state_dict"] = state
        with _shown(engine, model, state):
            return stock(*positional, **options)

    return save_pretrained


def _read(engine: Engine) -> dict[str, Any]:
    """Returns the :func:`whole_state`; without values if ranks have read since the last step, and rank 0 does so
    again without the others."""
    read = _since_the_last_step(engine)
    if read is None or others_read(read.number):
        return whole_state(engine)
    return OrderedDict(read.shown)


def _last(engine: Engine) -> dict[str, Any] | None:
    """Returns the whole state that was read last, if there was no step since, and the script still has all of
    it."""
    read = _since_the_last_step(engine)
    state = None if read is None else read.state()
    return state if read is not None and state is not None and len(state) == len(read.shown) else None


def _since_the_last_step(engine: Engine) -> LastRead | None:
    read = engine.last_read
    return read if read is not None and read.steps == engine.global_steps else None


@contextmanager
def _shown(engine: Engine, model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, ``model`` has the tensors that are in its ``state``: its own may have no elements on this
    rank. It can be called there, as by code that writes examples beside weights."""
    tensors = {id(value): value for value in state.values() if isinstance(value, Tensor)}
    shown = {place: nn.Parameter(value, requires_grad=False) for place, value in tensors.items()}
    buffers = buffers_of(model.named_modules())
    places: list[tuple[dict[str, Any], str, Any]] = [(each._buffers, key, own.cpu()) for _, each, key, own in buffers]
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and (name := f"{path}.{key}".removeprefix(".")) in state:
                places.append((module._parameters, key, shown[id(state[name])]))
    engine.has_whole_model = True
    try:
        with replacing(places):
            yield
    finally:
        engine.has_whole_model = False


def _within(path: str, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the ``state`` of a whole model that belongs to the model with this name in it."""
    if not path:
        return state
    prefix = f"{path}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def whole_state(engine: Engine, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """Returns the state of the engine's model by the model's own names, in CPU memory of rank 0. Other ranks get an
    empty dictionary. Collective over all ranks; raises ConfigError on all if one does something else.

    One chunk after another is gathered, on its pipeline rank, and sent layer by layer. So a rank holds at most one
    complete chunk beside what it holds anyway, and the first rank one layer more.
    """
    engine.note_reading()
    agree(Next.READ_STATE)
    broken = engine.optimizer.is_half_updated
    placed, partition = engine.lgamp.placed, engine.optimizer.partition
    complaint = "the last batch failed, and weights are of two steps" if broken else None
    if any(not isinstance(layer, AutoEPMoELayer) for layer in divided(placed)):
        complaint = (
            "the state of the whole model is read, but ranks divide its experts, which have the same names on all of "
            "them; call engine.save_checkpoint, and run zero_to_fp32.py in its folder"
        )
    raise_everywhere(complaint, ConfigError)
    state = _references(engine.module)
    names = {id(tensor): name for name, tensor in reversed(state.items())}
    own = {prefix: _described(layer, names) for prefix, layer in built_layers(placed).items()}
    described = {prefix: tensors for rank in reversed(over_pipeline(placed, own)) for prefix, tensors in rank.items()}
    sends = engine.grid.data_parallel_id == 0
    values: dict[str, Tensor] = {}
    seen: set[str] = set()
    for chunk, owner in enumerate(placed.layout.placement):
        prefixes = [prefix_of(layer, placed._layer_specs[layer]) for layer in placed.layout.layers(chunk)]
        new = [prefix for prefix in dict.fromkeys(prefixes) if prefix in described and prefix not in seen]
        seen.update(new)
        if placed.stage_id == owner:
            with partition.full_parameters(chunk):
                for prefix in new:
                    tensors = [with_all_experts(state[tensor.name]).detach() for tensor in described[prefix]]
                    if not sends:
                        continue
                    if owner == 0:
                        values |= {t.name: _copied(value) for t, value in zip(described[prefix], tensors)}
                    else:
                        transfer(dist.isend, placed, 0, [tensor.contiguous() for tensor in tensors])
        elif placed.stage_id == 0 and sends:
            for prefix in new:
                tensors = [torch.empty(t.shape, dtype=t.dtype, device=engine.device) for t in described[prefix]]
                transfer(dist.irecv, placed, owner, tensors)
                values |= {t.name: _copied(value) for t, value in zip(described[prefix], tensors)}
    whole = OrderedDict[str, Any]()
    if dist.get_rank() == 0:
        named = _under_all_names(state, values, exclude_frozen_parameters)
        whole = OrderedDict(under_original_names(engine.module, named))
    read = LastRead(engine.global_steps, weakref.ref(whole), without_values(whole), next(_NUMBERS))
    engine.last_read = None if exclude_frozen_parameters else read
    return whole


def _references(model: nn.Module) -> dict[str, Any]:
    """Returns the state of ``model`` with its own parameters and buffers. Those of other ranks have no elements."""
    return type(model).state_dict(model, keep_vars=True)


def _described(layer: nn.Module, names: dict[int, str]) -> list[_Tensor]:
    """Returns the tensors of a layer that belong to the state of the model, where their ``names`` are, by id."""
    described = []
    for _, tensor in tensors_of(layer):
        if id(tensor) in names:
            shape = [*full_shape(tensor)]
            if (slices := place_among_experts(tensor)[1]) > 1:
                shape[0] *= slices
            described.append(_Tensor(names[id(tensor)], torch.Size(shape), tensor.dtype))
    return described


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _under_all_names(state: dict[str, Any], values: dict[str, Tensor], exclude_frozen: bool) -> dict[str, Any]:
    """Returns ``state`` with ``values`` in place of its tensors. Tied tensors have several names and one value."""
    by_tensor = {id(state[name]): value for name, value in values.items()}
    for name, tensor in list(state.items()):
        if exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            del state[name]
        elif id(tensor) in by_tensor:
            state[name] = by_tensor[id(tensor)]
        elif isinstance(tensor, Tensor):
            # A buffer beside the layers, which every rank has.
            state[name] = _copied(tensor.detach())
    return state


def _load(engine: Engine, stock: Callable[..., Any], state: dict[str, Any], strict: bool) -> Any:
    """Loads the layers of this rank from the whole ``state``. Collective over all ranks, with the same state, or with
    the first rank's where others have an empty one, as ``state_dict`` returns it to them; raises RuntimeError on all if
    it does not fit one of them."""
    agree(Next.LOAD_STATE)
    given = everyone(bool(state))
    if given[0] and not all(given):
        of_first = [dict(state) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(of_first, src=0, group=host_group())
        state = of_first[0] or {}
    refusal = None
    if divided(engine.lgamp.placed) or is_replaced(engine.module):
        refusal = (
            "load_state_dict is called, but ranks divide the experts of the model, or AutoEP has replaced them; call "
            "engine.load_checkpoint, or load the weights before deepspeed.initialize"
        )
    raise_everywhere(refusal, ConfigError)
    engine.forget_values()
    own = {id(tensor) for layer in built_layers(engine.lgamp.placed).values() for _, tensor in tensors_of(layer)}
    with engine.lgamp.placed.full_parameters(), engine.elsewhere.unguarded():
        mine = dict(state)
        for name, tensor in _references(engine.module).items():
            if name in mine and isinstance(tensor, nn.Parameter) and id(tensor) not in own:
                # The parameter of a layer on another rank takes its own value, which has no elements.
                mine[name] = tensor.detach()
        result, complaint = None, None
        try:
            result = stock(mine, strict=strict)
        except RuntimeError as error:
            complaint = str(error)
        raise_everywhere(complaint, RuntimeError)
        engine.lgamp.placed.adopt_parameters()
    return result


# Methods of the engine, with the names and signatures of DeepSpeedEngine's


def load_module_state_dict(
    engine: Engine, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, **_: Any
) -> None:
    """As DeepSpeedEngine's: loads ``checkpoint["module"]`` as the model's ``load_state_dict`` does."""
    if custom_load_fn is not None:
        raise ConfigError(f"custom_load_fn is given, but a {BLOCK} block does not support it; remove it")
    engine.module.load_state_dict(checkpoint["module"], strict=strict)


def zero3_consolidated_16bit_state_dict(engine: Engine, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """As DeepSpeedEngine's, at every stage; ranks other than 0 get an empty dictionary. See :func:`whole_state`."""
    return whole_state(engine, exclude_frozen_parameters)


def zero_gather_16bit_weights_on_model_save(engine: Engine) -> bool:
    """True: a save of the model always gathers."""
    return True


def save_16bit_model(
    engine: Engine,
    save_dir: str,
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """As DeepSpeedEngine's: writes the whole model, in the dtype of its weights, by the model's own names."""
    state = whole_state(engine, exclude_frozen_parameters)
    if dist.get_rank() == 0:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
    on_first_rank(partial(torch.save, state, Path(save_dir, save_filename)))
    return True
