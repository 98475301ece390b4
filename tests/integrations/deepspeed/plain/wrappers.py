"""Modules that hold the model with the blocks, and compute the loss around it, with the parameters of heads."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_lgamp
from ds_lgamp.integrations.deepspeed.plain.model_state import whole_state
from ds_lgamp.integrations.deepspeed.plain.wrapper import WrapperEngine
from ds_lgamp.integrations.user_script import finish_engines
from testing.deepspeed_rank import prepare_rank
from tests.integrations.deepspeed.plain.mistakes import note_failure
from tests.integrations.deepspeed.plain.training import MICRO_BATCHES, RATE, STEPS, configuration, initialize

WIDTH, WORDS = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Encoder(nn.Module):
    """The model inside."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


class Wrapper(nn.Module):
    """A wrapper whose heads, teacher and way to call the model inside are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.has_teacher, self.ties, self.is_probe = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.3
        if self.has_teacher:
            self.teacher = Encoder(blocks=5).requires_grad_(False)
        self.parts = nn.ModuleDict({"encoder": Encoder()})
        if self.is_probe:
            self.encoder.requires_grad_(False)
            self.encoder.words.requires_grad_(self.ties)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS, bias=False))
        if self.ties:
            self.head[2].weight = self.encoder.words.weight
        self.scale = nn.Parameter(torch.full((), 0.5))
        self.fixed = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.calls = draw.choice([1, 1, 2, 3])
        self.checkpoints, self.looks_first = draw.random() < 0.5, draw.random() < 0.3
        self.looks_last, self.reenters = draw.random() < 0.5, draw.random() < 0.5

    @property
    def encoder(self) -> Any:
        return self.parts["encoder"]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the loss, and a number that has no gradient."""
        seen = torch.zeros(())
        if self.looks_first:
            with torch.no_grad():
                seen = self.encoder(tokens).square().mean()
        if self.has_teacher:
            with torch.no_grad():
                taught = self.teacher(tokens) * self.fixed
        hidden = [self.encoder(tokens.roll(call, dims=1)) for call in range(self.calls)]
        if self.looks_last:
            with torch.no_grad():
                seen = seen + self.encoder(targets if targets is not None else tokens).square().mean()
        mean = torch.stack(hidden).mean(0) * self.scale
        logits = checkpoint(self.head, mean, use_reentrant=self.reenters) if self.checkpoints else self.head(mean)
        loss = F.cross_entropy(logits.flatten(0, 1), (tokens if targets is None else targets).flatten())
        if self.has_teacher:
            loss = loss + (mean - taught).square().mean()
        return {"loss": loss, "seen": seen}


def batch_of(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    tokens, targets = torch.randint(WORDS, (2, 2, 4 + step), generator=draw)
    return tokens, targets


def make(seed: int, values: int = 0, wrapper: type[Wrapper] = Wrapper) -> Wrapper:
    torch.manual_seed(seed + values)
    return wrapper(seed)


def train_alone(seed: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in this process with the micro-batches of all ranks. Returns the losses of all, the numbers beside them,
    the losses of evaluation with the weights after it and with others, and the state after it."""
    model, losses = make(seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                result = model(*batch_of(step, rank, number))
                (result["loss"] / (ranks * MICRO_BATCHES)).backward()
                losses += [result["loss"].item(), result["seen"].item()]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for each in (model, make(seed, values=1)):
            losses.append(each.eval()(*batch_of(STEPS, 0, 0))["loss"].item())
    return losses, model.state_dict()


def train_on_rank(cases: list[tuple[int, int, dict[str, Any]]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Trains on this rank, one case after another: a seed, a ZeRO stage and a block. Returns of each what
    :func:`train_alone` does, with the rank's own losses, and the state on rank 0."""
    prepare_rank()
    ds_lgamp.install()
    return [_train(*case) for case in cases]


def _train(seed: int, stage: int, block: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = initialize(make(seed), configuration(stage, {"model": "parts.encoder", **block}))
    assert isinstance(engine, WrapperEngine)
    losses = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            result = engine(*batch_of(step, dist.get_rank(), number))
            with torch.no_grad():
                # The backward pass that follows must not find what this call has found.
                engine(*batch_of(STEPS, 0, 0))
            engine.backward(result["loss"])
            engine.step()
            losses += [result["loss"].item(), result["seen"].item()]
    engine.eval()
    with torch.no_grad():
        losses.append(engine(*batch_of(STEPS, 0, 0))["loss"].item())
        state = whole_state(engine)
        engine.module.load_state_dict(make(seed, values=1).state_dict())
        losses.append(engine(*batch_of(STEPS, 0, 0))["loss"].item())
    finish_engines()
    return losses, state


class SavedEncoder(Encoder):
    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder, "encoder.bin"))


class Saved(Wrapper):
    """Saves what is in it as sentence-transformers does: its method takes no state, and computes an example."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.parts["encoder"] = SavedEncoder()
        self.head[0].bias.requires_grad_(False)

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.head.state_dict(), Path(folder, "head.bin"))
        self.encoder.save_pretrained(folder)
        torch.save({"loss": self.example(self)}, Path(folder, "example.bin"))

    def example(self, compute: Callable[..., Any]) -> Tensor:
        """Returns the loss of a batch in evaluation."""
        self.eval()
        with torch.no_grad():
            loss = compute(*batch_of(0, 0, 0))["loss"]
        self.train()
        return loss


PREFIXES = {"head.bin": "head.", "encoder.bin": "parts.encoder.", "example.bin": "example."}
"""How the names of tensors in the files begin in the whole model."""
WAYS = [
    "all ranks",
    "the first rank",
    "all ranks, which hold the state",
    "all ranks, which hold a part",
    "the model inside",
]


def saved(stage: int, folder: str) -> dict[str, dict[str, list[str]]]:
    """Trains on two pipeline ranks, and saves in all ways. Returns by way what is wrong in which file."""
    prepare_rank()
    ds_lgamp.install()
    torch.manual_seed(0)
    engine = initialize(Saved(0), configuration(stage, {"model": "parts.encoder", "pipeline_ranks": 2}))
    model, files = engine.module, {}
    for way in WAYS:
        for number in range(MICRO_BATCHES):
            engine.backward(engine(*batch_of(0, dist.get_rank(), number))["loss"])
            engine.step()
        own = Path(folder, way)
        own.mkdir(exist_ok=True)
        if way == "all ranks":
            model.save_pretrained(own)
        elif way == "the model inside":
            model.encoder.save_pretrained(own)
        part = whole_state(engine, exclude_frozen_parameters=True)
        if way == "all ranks, which hold a part":
            model.save_pretrained(own)
        del part
        state = model.state_dict()
        if way == "all ranks, which hold the state" or (way == "the first rank" and dist.get_rank() == 0):
            model.save_pretrained(own)
        state["example.loss"] = model.example(engine)
        # Before the next step, which changes the weights.
        files[way] = _differences(own, state)
    finish_engines()
    return files


def _differences(folder: Path, state: dict[str, Tensor]) -> dict[str, list[str]]:
    """Returns, on rank 0, which tensors of the whole model each file lacks, or has with another value."""
    found: dict[str, list[str]] = {}
    for file in folder.iterdir() if dist.get_rank() == 0 else ():
        prefix, values = PREFIXES[file.name], torch.load(file)
        wanted = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        found[file.name] = [
            name for name, value in wanted.items() if name not in values or not torch.allclose(values[name], value)
        ]
    return found


class Fixed(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": (self.encoder(tokens) * self.fixed).square().mean()}


class Early(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        self.head(torch.rand(1, WIDTH))
        return super().forward(tokens, targets)


class Cast(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens, targets)


class Lost(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        with torch.no_grad():
            hidden = self.encoder(tokens)
        return {"loss": self.head(hidden).square().mean() + super().forward(tokens, targets)["loss"]}


class Recomputed(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        return checkpoint(super().forward, tokens, targets, use_reentrant=False)


class Clips(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        result = super().forward(tokens, targets)
        with torch.no_grad():
            self.head[0].weight.clamp_(-0.1, 0.1)
        return result


class ClipsData(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        result = super().forward(tokens, targets)
        self.head[0].weight.data.clamp_(-0.1, 0.1)
        return result


class Averages(Wrapper):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        result = super().forward(tokens, targets)
        self.head[0].bias.data = self.head[0].bias.data * 0.5
        return result


def mistakes(pipeline_ranks: int) -> dict[str, str]:
    """Makes mistakes, each with an engine of its own. Returns the errors."""
    prepare_rank()
    ds_lgamp.install()
    errors: dict[str, str] = {}
    fails = partial(note_failure, errors)
    config = configuration(0, {"pipeline_ranks": pipeline_ranks, "model": "parts.encoder"})
    fails("no such model", initialize, make(0), configuration(0, {"model": "encoder"}))
    fails("no blocks", initialize, make(0), configuration(0, {"model": "head.0"}))
    fails("the list", initialize, make(0), configuration(0, {"model": "parts.encoder.blocks"}))
    fails("early", partial(initialize(Early(0), config), *batch_of(0, 0, 0)))
    fails("autocast", partial(initialize(Cast(0), config), *batch_of(0, 0, 0)))
    for wrapper in (Lost, Recomputed, Clips, Averages):
        fails(wrapper.__name__, partial(_train_once, initialize(wrapper(0), config)))
    fails("ClipsData", partial(_train_a_step, initialize(ClipsData(0), config)))
    _after(fails, config, "unfrozen", lambda model: model.fixed.requires_grad_())
    _after(fails, config, "replaced", lambda model: setattr(model.encoder, "forward", model.encoder.norm))
    return errors


def _train_once(engine: Any) -> None:
    engine.backward(engine(*batch_of(0, 0, 0))["loss"])


def _train_a_step(engine: Any) -> None:
    for _ in range(MICRO_BATCHES):
        _train_once(engine)
        engine.step()


def _after(fails: Callable[..., None], config: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    engine = initialize(make(0), config)
    change(engine.module)
    fails(name, partial(engine, *batch_of(0, 0, 0)))


def follows_changes() -> tuple[float, float]:
    """Lets the script change a frozen parameter that stage 3 has partitioned. Returns the loss of one batch, and that
    of one process whose parameter has changed likewise."""
    prepare_rank()
    ds_lgamp.install()
    engine, alone = (
        initialize(make(0, wrapper=Fixed), configuration(3, {"model": "parts.encoder"})),
        make(0, wrapper=Fixed),
    )
    losses = []
    for model, compute in ((engine.module, engine), (alone, alone)):
        model.eval()
        with torch.no_grad():
            compute(*batch_of(0, 0, 0))
            with GatheredParameters([model.fixed], modifier_rank=0) if model is engine.module else nullcontext():
                model.fixed.data.mul_(3)
            losses.append(compute(*batch_of(0, 0, 0))["loss"].item())
    return losses[0], losses[1]


class Steady(Wrapper):
    def train(self, mode: bool = True) -> "Steady":
        super().train(mode)
        self.encoder.eval()
        return self


def training_modules() -> list[str]:
    """Returns which modules train after ``engine.train()`` where the wrapper keeps the model inside in evaluation."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(make(0, wrapper=Steady), configuration(0, {"model": "parts.encoder", "pipeline_ranks": 2}))
    engine.train()
    return [path for path, module in engine.module.named_modules() if module.training]


class Named(Wrapper):
    """Has modules with names that the package uses for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for name in ("model", "wrapper", "places", "trained", "frozen"):
            self.add_module(name, nn.ModuleDict({"inner": nn.Linear(WIDTH, WIDTH)}))
        self.frozen.requires_grad_(False)
        self.model["encoder"] = self.parts.pop("encoder")

    @property
    def encoder(self) -> Any:
        return self.model["encoder"] if "model" in self._modules else super().encoder

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.encoder(tokens)
        for each in (self.model, self.wrapper, self.places, self.trained, self.frozen):
            hidden = each["inner"](hidden)
        return {"loss": hidden.square().mean()}


def with_names(names: type[Wrapper], path: str) -> tuple[float, float]:
    """Returns the loss of a wrapper on two pipeline ranks, and in one process."""
    prepare_rank()
    ds_lgamp.install()
    engine = initialize(make(0, wrapper=names), configuration(0, {"model": path, "pipeline_ranks": 2}))
    with torch.no_grad():
        one, other = (compute(*batch_of(0, 0, 0))["loss"] for compute in (engine, make(0, wrapper=names)))
    return one.item(), other.item()
