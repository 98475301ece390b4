"""The parts of a model: its blocks, the list of modules that its forward calls one after another, and what belongs to
no block."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_lgamp.config import BLOCK, ConfigError, LgampConfig
from ds_lgamp.runtime.recompute import RandomSource, undisturbed


class Blocks(NamedTuple):
    """The blocks: the list that contains them, and its name in the model, such as ``model.layers``."""

    path: str
    container: nn.Module

    @property
    def named(self) -> dict[str, nn.Module]:
        """The blocks by their names in the list, such as ``0``, or ``0.1`` if it is one of lists. Those in an
        nn.Sequential are the longest run of one class there, such as the layers between an embedding and a head."""
        return dict(_modules_in(_run_in(self.container)))

    @property
    def beside(self) -> dict[str, nn.Module]:
        """The modules in the list that are no blocks, by their names there."""
        run = _run_in(self.container)
        return {name: each for name, each in self.container.named_children() if name not in run}

    @property
    def kinds(self) -> list[nn.Module]:
        """The first block of every kind. Blocks of one kind have modules of the same classes under the same names."""
        kinds: dict[Any, nn.Module] = {}
        for block in self.named.values():
            kinds.setdefault(kind_of(block), block)
        return [*kinds.values()]

    @property
    def chain(self) -> list[str]:
        """The names of the modules that contain the list, outermost first. The first one is the model, ""."""
        parts = self.path.split(".")
        return [".".join(parts[:depth]) for depth in range(len(parts))]


def kind_of(block: nn.Module) -> Any:
    """Returns what blocks of one kind have in common."""
    return tuple((path, type(module)) for path, module in block.named_modules())


INSIDE = "_ds_lgamp_inside"
"""The attribute of a module that names the model in it that is split. No model's own may have this name."""


def find_blocks(model: nn.Module, chosen: str | None, planned: Collection[str] = ()) -> Blocks:
    """Returns the blocks of ``model``: the list with the ``chosen`` name; by default one with a ``planned`` name, or
    else that with most parameters. A list is an nn.ModuleList that is in no other one, an nn.ModuleDict of modules of
    one class, or an nn.Sequential with a run of such modules.

    Raises ConfigError if there is no list, or not the chosen one.
    """
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"deepspeed.initialize got a model that torch.compile has wrapped, which hides its layers from a {BLOCK} "
            "block; pass the model itself, and call engine.compile(), or set torch_compile=True in TrainingArguments"
        )
    lists = [each for each in _lists(model) if each.named]
    if not any(_elements(each.container) for each in lists):
        if inside := getattr(model, INSIDE, ""):
            raise ConfigError(
                f"{BLOCK}.model is '{inside}', but this {type(model.get_submodule(inside)).__name__} has no list of "
                "blocks in it; name the module whose forward calls them one after another"
            )
        raise ConfigError(
            f"{type(model).__name__} has no list of blocks, so a {BLOCK} block cannot split it; write it as a "
            "PipelineModule or an nn.Sequential, or remove the block"
        )
    if chosen is not None:
        named = {each.path: each for each in lists}
        if chosen not in named:
            raise ConfigError(
                f"{BLOCK}.blocks is '{chosen}', but the lists of {type(model).__name__} are {', '.join(named)}; name "
                "the one whose modules the forward calls one after another"
            )
        return named[chosen]
    for each in lists:
        if each.path.rpartition(".")[2] in planned:
            return each
    return max(lists, key=lambda each: _elements(*each.named.values()))


def _run_in(container: nn.Module) -> Mapping[str, nn.Module]:
    """Returns the modules in ``container`` by their names there: all, but in an nn.Sequential the consecutive ones of
    one class, of which there are several, with most parameters."""
    modules = {name: module for name, module in container._modules.items() if module is not None}
    if not isinstance(container, nn.Sequential):
        return modules
    runs = (dict(run) for _, run in groupby(modules.items(), lambda named: named[1].__class__))
    several = (run for run in runs if len({*run.values()}) > 1)
    return max(several, key=lambda run: _elements(*run.values()), default={})


def _modules_in(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields ``modules`` by their names, also out of lists among them, which nobody can call."""
    for name, module in modules.items():
        if type(module) in (nn.ModuleList, nn.ModuleDict):
            yield from ((f"{name}.{inner}", each) for inner, each in _modules_in(_run_in(module)))
        else:
            yield name, module


def _lists(model: nn.Module) -> Iterator[Blocks]:
    seen: list[str] = []
    inside = getattr(model, INSIDE, "")
    for path, module in model.get_submodule(inside).named_modules(prefix=inside):
        if path == inside:
            continue
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in seen):
            seen.append(path)
            yield Blocks(path, module)
        elif isinstance(module, nn.ModuleDict | nn.Sequential) and _is_alike(module):
            yield Blocks(path, module)


def _is_alike(module: nn.Module) -> bool:
    """Whether a module contains several others of one class, and, unless it calls them in turn, nothing else."""
    children = {*_run_in(module).values()}
    return len(children) > 1 and len({type(child) for child in children}) == 1


def _elements(*modules: nn.Module) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(full_shape(parameter).numel() for parameter in parameters)


def full_shape(tensor: Tensor) -> torch.Size:
    """Returns the shape of a tensor, also of a parameter that deepspeed.zero.Init has left without elements."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


class ByproductRecorder:
    """Where a host collects by-products of blocks while a model runs, as transformers does by hooks. This one collects
    nothing."""

    def learning(self) -> AbstractContextManager[None]:
        """Finds out, from the forwards that run inside, what the loss needs of by-products."""
        return nullcontext()

    def records(self) -> bool:
        """Whether the forward that runs collects any."""
        return False

    def recording(self, records: bool) -> AbstractContextManager[list[Tensor]]:
        """Yields the list of those of a block that runs inside, which stays empty unless the forward ``records``."""
        return nullcontext([])

    @property
    def sums(self) -> tuple[int, int]:
        """The bytes that travel of them per micro-batch in training, forward and back, if that is always the same."""
        return 0, 0

    def reduces(self, arguments: Any) -> bool:
        """Whether the loss of a call with these arguments needs less than all by-products."""
        return False

    # Of those that collect:

    def give(self, made: list[Tensor]) -> None:
        """Gives the forward that runs those of a block."""
        raise NotImplementedError

    def reduced(self, arguments: Any, carried: Sequence[Tensor], made: list[Tensor]) -> list[Tensor]:
        """Returns what it needs of those of all blocks up to one, which has ``made`` some. ``carried`` is what it needs
        of those before."""
        raise NotImplementedError

    def needing_only(self, arguments: Any, carried: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Lets the code after the blocks compute with what was ``carried`` inside."""
        raise NotImplementedError


class Original(NamedTuple):
    """A model that becomes layers."""

    model: nn.Module
    blocks: Blocks
    random_sources: Sequence[RandomSource]
    """Generators that the model may draw from."""
    settings: LgampConfig
    """The block."""
    recorder: ByproductRecorder = ByproductRecorder()

    @property
    def only_loss(self) -> bool:
        """Whether a training step needs no other output than the loss."""
        return self.settings.outputs == "loss"

    @property
    def on_several_ranks(self) -> bool:
        """Whether layers may be on several ranks."""
        return (self.settings.pipeline_ranks or 1) > 1

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed(self.random_sources)

    def seed(self, number: int) -> None:
        for source in self.random_sources:
            source.seed(number)

    @contextmanager
    def evaluating(self, training: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Switches the model to evaluation inside the block, so that it drops nothing at random. Modules in
        ``training`` train, and so do the modules that contain the blocks: their forward may compute a loss in training
        only."""
        with restored_modes(self.model):
            self.model.eval()
            for module in [*training, *(self.model.get_submodule(path) for path in self.blocks.chain)]:
                module.training = True
            yield


Part = nn.Module | nn.Parameter


class Result(NamedTuple):
    """A floating-point tensor that a part returns; a part that is a parameter is its own only result."""

    path: str
    call: int = 0
    """Counts the calls of the part in one forward."""
    number: int = 0
    """Counts the tensors of one call."""


ShapesOfCalls = Mapping[tuple[str, int], Any]
"""What calls of parts before the blocks return, with shapes for tensors, by the names of the parts and the numbers of
the calls of each in one forward."""


class Attribute(NamedTuple):
    """An attribute of a module in a block, whose ``path`` is "" for the block itself."""

    path: str
    name: str


class Sides(NamedTuple):
    """The parts of a model, by their names in it."""

    before: Mapping[str, Part]
    """The parts that run before the blocks."""
    after: Mapping[str, Part]
    """All other parts."""
    are_shared: bool
    """Whether what follows the blocks computes with parameters of parts before them, too."""

    @classmethod
    def of(cls, model: nn.Module, before: Iterable[str], after: Iterable[str], are_shared: bool) -> "Sides":
        """Returns the parts with these names. They are shared also where both sides hold the same parameter."""
        places = ({path: place_of(model, path) for path in paths} for paths in (before, after))
        first, last = ({path: holder[name] for path, (holder, name) in side.items()} for side in places)
        parameters = {id(each) for each in parameters_of(first.values())}
        return cls(first, last, are_shared or not parameters.isdisjoint(map(id, parameters_of(last.values()))))

    @property
    def of_last_layer(self) -> Mapping[str, Part]:
        """The parts that the last layer holds."""
        return {**self.before, **self.after} if self.are_shared else self.after

    def own_modules(self, original: Original) -> list[nn.Module]:
        """Returns the modules of the model that belong neither to a block nor to another part: those that contain the
        blocks, and those without parameters, whose code runs wherever the model's own forward does."""
        parts = [part for part in (*self.before.values(), *self.after.values()) if isinstance(part, nn.Module)]
        others = {id(module) for part in (*parts, *original.blocks.named.values()) for module in part.modules()}
        return [module for module in original.model.modules() if id(module) not in others]


def model_of(model: Any) -> Any:
    """Returns the model inside ``model``, which peft may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def modules_in(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model, each as often as it has names. Runs before every batch, so it makes no names, as
    ``model.modules()`` does."""
    found = [model]
    # The list grows.
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def own_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters that ``modules`` themselves have, each as often as it has names there."""
    return [each for module in modules for each in module._parameters.values() if each is not None]


def place_of(model: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Returns in which of a module's dictionaries the part lies, and under which name."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    return (module._parameters if name in module._parameters else module._modules), name


def parts_of(model: nn.Module, blocks: Blocks) -> Iterator[tuple[str, Part]]:
    """Yields what belongs to no block, in the order of the model: parameters of the modules that contain the blocks,
    and the largest modules with parameters or buffers that contain no block."""
    parents = [*blocks.chain, blocks.path]
    for parent in parents:
        prefix, module = f"{parent}." if parent else "", model.get_submodule(parent)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}{name}", parameter
        for name, child in (blocks.beside if parent == blocks.path else dict(module.named_children())).items():
            if f"{prefix}{name}" not in parents:
                yield from _called(f"{prefix}{name}", child)


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yields the module, or, of one that only holds others and is never called, what it holds."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", parameter
        for name, child in module.named_children():
            yield from _called(f"{path}.{name}", child)
    elif any(True for _ in chain(module.parameters(), module.buffers())):
        yield path, module


def parameters_of(parts: Iterable[Part]) -> Iterator[nn.Parameter]:
    """Yields the parameters of all parts. One that is in several parts comes several times."""
    for part in parts:
        yield from [part] if isinstance(part, nn.Parameter) else part.parameters()


@contextmanager
def restored_modes(module: nn.Module) -> Iterator[None]:
    """Restores after the block whether ``module`` and the modules in it train or evaluate."""
    before = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in before:
            each.training = mode


class Tree(nn.Module):
    """Holds parts of a model under their dotted names in it, so that their parameters keep their names."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        for path, part in parts.items():
            *parents, name = path.split(".")
            holder: nn.Module = self
            for parent in parents:
                if parent not in holder._modules:
                    holder.add_module(parent, nn.Module())
                holder = holder._modules[parent]  # type: ignore[assignment]
            setattr(holder, name, part)
