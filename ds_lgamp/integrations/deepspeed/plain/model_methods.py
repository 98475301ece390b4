"""What the methods of a plain script's own model do while its layers are on many ranks.

The model's state is the whole one, by the model's own names. Calls of the model that pass by its engine evaluate, as
transformers' Trainer needs. Guards are around the parameters of layers that other pipeline ranks hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import Parameter, ismethod, signature
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_lgamp.checkpoint.files import everywhere
from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.deepspeed.checkpoint.description import Run
from ds_lgamp.integrations.deepspeed.model.layer_moves import transfer
from ds_lgamp.integrations.deepspeed.model.module import built_layers, over_pipeline, prefix_of, tensors_of
from ds_lgamp.integrations.deepspeed.plain.agreement import Next, agree
from ds_lgamp.integrations.transformers.models import prompts_from
from ds_lgamp.partition.agreement import raise_everywhere
from ds_lgamp.partition.guard import Guards, NotGatheredError


def release(module: nn.Module, own: Collection[int]) -> None:
    """Frees the parameters of ``module`` that are not in ``own``, which holds ids."""
    for parameter in module.parameters():
        if id(parameter) not in own:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


class Elsewhere:
    """Guards released parameters: functions that need their values raise NotGatheredError.

    Args:
        model: has these parameters and others.
        own: the ids of the others.
    """

    def __init__(self, model: nn.Module, own: Collection[int]) -> None:
        released = [(name, each) for name, each in model.named_parameters() if id(each) not in own]
        self._names = {id(parameter): name for name, parameter in released}
        self._guards = Guards((parameter for _, parameter in released), self._refuse)
        self._guards.put()

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Inside the block they are parameters without elements."""
        self._guards.lift()
        try:
            yield
        finally:
            self._guards.put()

    def _refuse(self, parameter: torch.Tensor | None) -> NoReturn:
        name = self._names.get(id(parameter), "of the model")
        raise NotGatheredError(
            f"parameter {name} belongs to a layer on another pipeline rank and has no elements on this rank; leave out "
            "parameters without ds_id, or call model.state_dict() on all ranks, which gives rank 0 all values"
        )


class Engine(Run, Protocol):
    """An engine, as far as its model's state is concerned."""

    module: Any
    """The model of the script."""
    elsewhere: Elsewhere

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
    """Whether this rank lacks current values of the model between two batches, so that reading them needs others."""
    return engine.num_stages > 1 or engine.optimizer.partition.frees_weights or engine.lgamp.program_spec.defers_gathers


def give_state(engine: Engine) -> None:
    """Makes ``state_dict``, ``load_state_dict`` and ``save_pretrained`` of the engine's model act on the whole model.

    A model that every rank has whole keeps its own ``state_dict`` and ``save_pretrained``.
    """
    model = engine.module
    replace_method(model, "load_state_dict", partial(_loads_whole, engine))
    if is_spread(engine):
        replace_method(model, "state_dict", partial(_gathers, engine))
        if hasattr(model, "save_pretrained"):
            replace_method(model, "save_pretrained", partial(_first_rank_saves, engine))


def _loads_whole(engine: Engine, stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            raise ConfigError(f"load_state_dict has assign=True, but a {BLOCK} block keeps its parameters; remove it")
        return _load(engine, stock, state_dict, strict)

    return load_state_dict


def _gathers(engine: Engine, stock: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict(*positional: Any, **options: Any) -> Any:
        given = signature(stock).bind(*positional, **options).arguments
        if given.get("keep_vars"):
            return stock(*positional, **options)
        state = whole_state(engine)
        if given.get("destination") is None and not given.get("prefix"):
            return state
        destination = given.get("destination", {})
        destination.update({f"{given.get('prefix', '')}{name}": value for name, value in state.items()})
        return destination

    return state_dict


def _first_rank_saves(engine: Engine, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``save_pretrained`` that gathers the state unless it is given one, and writes it on the first rank."""

    def save_pretrained(*positional: Any, **options: Any) -> Any:
        given = signature(stock).bind(*positional, **options)
        state = given.arguments.get("state_dict", given.arguments.get("kwargs", {}).get("state_dict"))
        if state is None:
            state = options["state_dict"] = whole_state(engine)
        if dist.get_rank() != 0:
            return None
        with prompts_from(state, engine.module):
            return stock(*positional, **options)

    return save_pretrained


def whole_state(engine: Engine, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
    """Returns the state of the engine's model by the model's own names, in CPU memory of rank 0. Other ranks get an
    empty dictionary. Collective over all ranks; raises ConfigError on all if one does something else.

    One chunk after another is gathered, on its pipeline rank, and sent layer by layer. So a rank holds at most one
    complete chunk beside what it holds anyway, and the first rank one layer more.
    """
    agree(Next.READ_STATE)
    broken = engine.optimizer.is_half_updated
    raise_everywhere("the last batch failed, and weights are of two steps" if broken else None, ConfigError)
    placed, partition = engine.lgamp.placed, engine.optimizer.partition
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
                for prefix in new if sends else []:
                    tensors = [state[tensor.name].detach() for tensor in described[prefix]]
                    if owner == 0:
                        values |= {t.name: _copied(value) for t, value in zip(described[prefix], tensors)}
                    else:
                        transfer(dist.isend, placed, 0, [tensor.contiguous() for tensor in tensors])
        elif placed.stage_id == 0 and sends:
            for prefix in new:
                tensors = [torch.empty(t.shape, dtype=t.dtype, device=engine.device) for t in described[prefix]]
                transfer(dist.irecv, placed, owner, tensors)
                values |= {t.name: _copied(value) for t, value in zip(described[prefix], tensors)}
    return _under_all_names(state, values, exclude_frozen_parameters) if dist.get_rank() == 0 else {}


def _references(model: nn.Module) -> dict[str, Any]:
    """Returns the state of ``model`` with its own parameters and buffers. Those of other ranks have no elements."""
    return type(model).state_dict(model, keep_vars=True)


def _described(layer: nn.Module, names: dict[int, str]) -> list[_Tensor]:
    """Returns the tensors of a layer that belong to the state of the model.

    Args:
        names: their names in the model, by id.
    """
    return [
        _Tensor(names[id(tensor)], torch.Size(getattr(tensor, "ds_shape", tensor.shape)), tensor.dtype)
        for _, tensor in tensors_of(layer)
        if id(tensor) in names
    ]


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
    """Loads the layers of this rank from the whole ``state``. Collective over all ranks, with the same state; raises
    RuntimeError on all if it does not fit one of them."""
    agree(Next.LOAD_STATE)
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
    everywhere(partial(torch.save, state, Path(save_dir, save_filename)) if dist.get_rank() == 0 else lambda: None)
    return True


_ENGINE = "the engine that deepspeed.initialize or accelerator.prepare returned"


def evaluate_direct_calls(engine: Callable[..., Any], model: Any, is_spread: bool) -> Callable[[], None]:
    """Lets the ``engine`` evaluate when ``model`` is called and its layers are ``is_spread`` over ranks.

    Calls that train raise ConfigError: their backward pass would not be a part of the program. See :func:`guide_calls`.
    """
    stock = model.forward
    compute = _forward(_without_hooks(engine, model) if is_spread else stock, model)
    return guide_calls(model, compute, is_spread)


def guide_calls(model: Any, compute: Callable[..., Any], is_spread: bool) -> Callable[[], None]:
    """Lets ``compute`` do what calls of ``model`` do.

    ``generate`` of a model that is spread raises ConfigError, because the engine keeps no keys and values. Returns a
    function that raises ConfigError if the model has another ``forward`` by then.
    """
    replace_method(model, "forward", lambda _: compute)
    if is_spread and hasattr(model, "generate"):
        replace_method(model, "generate", lambda _: _refuse_generate)
    guided = model.forward

    def check() -> None:
        if model.forward is not guided:
            raise ConfigError(
                f"the forward of the {type(model).__name__} was replaced after deepspeed.initialize, as Lightning's "
                f"Trainer does, but with a {BLOCK} block the engine computes the one that it had; replace it earlier"
            )

    return check


def _forward(compute: Callable[..., Any], model: Any) -> Callable[..., Any]:
    def forward(*positional: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and model.training:
            raise ConfigError(
                f"the model is called directly in training, but with a {BLOCK} block {_ENGINE} trains it; call that, "
                "or switch the model to evaluation"
            )
        return compute(*positional, **named)

    return forward


def _without_hooks(engine: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns what calls the engine for a call of ``model``, which runs its hooks around that. The engine must not run
    them again."""

    def evaluate(*positional: Any, **named: Any) -> Any:
        own = model._forward_pre_hooks, model._forward_hooks
        model._forward_pre_hooks, model._forward_hooks = OrderedDict(), OrderedDict()
        try:
            return engine(*positional, **named)
        finally:
            model._forward_pre_hooks, model._forward_hooks = own

    return evaluate


def _refuse_generate(*positional: Any, **named: Any) -> Any:
    raise ConfigError(
        f"model.generate is called, but with a {BLOCK} block the weights of the model are spread over several ranks; "
        "save the model with save_pretrained, and generate with the model that from_pretrained loads"
    )


def replace_method(model: Any, name: str, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets ``model`` have what ``replacement`` returns for the method ``name`` that it has.

    A copy of the model (``copy.deepcopy``), such as an average of its weights or a frozen reference, has the method as
    it was. So the replacement is a bound method: Python binds that of a copy to the copy.
    """
    stock = getattr(model, name)
    own, new = stock.__func__ if ismethod(stock) else getattr(type(model), name, None), replacement(stock)
    if own is None:
        setattr(model, name, new)
        return

    @wraps(own)
    def method(self: Any, *positional: Any, **named: Any) -> Any:
        return new(*positional, **named) if self is model else own(self, *positional, **named)

    # The Trainer looks at the signature of a model's forward.
    shown = signature(stock)
    itself = Parameter("self", Parameter.POSITIONAL_ONLY)
    method.__signature__ = shown.replace(parameters=[itself, *shown.parameters.values()])  # type: ignore[attr-defined]
    setattr(model, name, MethodType(method, model))
