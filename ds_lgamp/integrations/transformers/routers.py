"""The logits of routers, which models of transformers collect by hooks for the loss that balances their experts.

This loss is E * sum_e f_e * p_e (arXiv 2101.03961, equations 4 to 6), over the tokens of all layers: f_e is the share
of them that chose expert e, and p_e the mean probability of e. So in training only sums travel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature, unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.integrations.split.parts import ByproductRecorder, model_of
from ds_lgamp.integrations.split.stand_ins import Placeholder, replacing

_KEY, _LOSS, _MASK = "router_logits", "load_balancing_loss_func", "attention_mask"


class RouterLogits(ByproductRecorder):
    """Records the logits of routers.

    Raises ConfigError if this transformers collects them in another way.
    """

    def __init__(self, model: Any) -> None:
        try:
            # Here, because importing transformers takes seconds, and only its models need it.
            from transformers.models.mixtral import modeling_mixtral
            from transformers.utils.output_capturing import _active_collector, maybe_install_capturing_hooks
        except ImportError:
            raise ConfigError(
                f"output_router_logits is on in the config of {type(model_of(model)).__name__}, whose transformers "
                f"collects them in a way that a {BLOCK} block does not know; install transformers 5, or switch it off"
            ) from None
        self._collector = _active_collector
        self._model = model_of(model)
        # Its first forward would, and the trial takes back what forwards do to the model.
        maybe_install_capturing_hooks(self._model)
        self._names = list(signature(model.forward).parameters)
        self._globals: dict[str, Any] = getattr(unwrap(type(self._model).forward), "__globals__", {})
        # trl's forwards call Mixtral's loss for all models.
        self._known = {id(each): each for each in (self._globals, vars(modeling_mixtral))}.values()
        """The variables of modules whose loss the forward may call."""
        self._replaced: list[dict[str, Any]] = []
        """Those among them whose loss needs only ``balance``."""
        self._balance: Balance | None = None
        """What the loss needs; None if that is all logits."""
        self._given: list[Tensor] = []
        """What stands for the logits of all blocks, in a forward that needs only ``balance``."""

    def records(self) -> bool:
        return _KEY in (self._collector.get() or ())

    @contextmanager
    def recording(self, records: bool) -> Iterator[list[Tensor]]:
        recorded: list[Tensor] = []
        if not records:
            yield recorded
            return
        token = self._collector.set({_KEY: recorded})
        try:
            yield recorded
        finally:
            self._collector.reset(token)

    def give(self, made: list[Tensor]) -> None:
        self._given += made
        self._collector.get()[_KEY].extend(made)

    @contextmanager
    def learning(self) -> Iterator[None]:
        # Until then it gets all.
        function = self._globals.get(_LOSS)
        # Encoder and decoder have a loss each, with a mask of its own.
        both = getattr(self._model.config, "is_encoder_decoder", False)
        if function is None or both or not getattr(self._model, "router_aux_loss_coef", 0):
            yield
            return
        seen: set[Balance] = set()

        def loss(*positional: Any, **named: Any) -> Any:
            seen.add(_Asked.of(function, positional, named).balance)
            return function(*positional, **named)

        with replacing([(self._globals, _LOSS, loss)]):
            yield
        if len(seen) == 1 and (balance := seen.pop()).is_computed_by(function):
            self._balance = balance
            self._replaced = [each for each in self._known if balance.is_computed_by(each[_LOSS])]

    @property
    def sums(self) -> tuple[int, int]:
        experts = None if self._balance is None else self._balance.experts
        return (0, 0) if experts is None else (4 * experts + 4 * (experts + 1), 4 * experts)

    def reduces(self, arguments: Any) -> bool:
        mask = self._mask(arguments)
        return self._balance is not None and (mask is None or mask.dim() == 2)

    def _mask(self, arguments: Any) -> Tensor | None:
        positional, named = arguments
        return {**dict(zip(self._names, positional)), **named}.get(_MASK)

    def reduced(self, arguments: Any, carried: Sequence[Tensor], made: list[Tensor]) -> list[Tensor]:
        assert self._balance is not None, "it reduces"
        for logits in made:
            carried = self._balance.with_layer(carried, logits, self._mask(arguments))
        return [*carried]

    @contextmanager
    def needing_only(self, arguments: Any, carried: Sequence[Tensor]) -> Iterator[None]:
        function, mask = self._globals[_LOSS], self._mask(arguments)
        self._given = []

        def loss(*positional: Any, **named: Any) -> Any:
            asked = _Asked.of(function, positional, named)
            if not any(isinstance(each, Placeholder) for each in asked.logits):
                # Routers outside the blocks.
                return function(*positional, **named)
            of_all = [*map(id, asked.logits)] == [*map(id, self._given)]
            if asked.balance != self._balance or asked.mask is not mask or not of_all:
                raise ConfigError(
                    f"{type(self._model).__name__} balances its experts by another mask than the argument {_MASK}, by "
                    "other numbers of experts than for its dummy inputs, or by the routers of some blocks alone, which "
                    f"a {BLOCK} block cannot follow; pass that mask, leave the numbers, and balance all blocks"
                )
            return self._balance.loss(*carried)

        with replacing([(variables, _LOSS, loss) for variables in self._replaced]):
            yield


class Balance(NamedTuple):
    """The loss that balances experts, by sums over tokens and layers.

    Sums are two tensors: for every expert that of its probabilities, in fp32, and for every expert how many tokens
    chose it, followed by the number of all tokens.
    """

    experts: int | None
    chosen: int | None
    """How many experts each token chooses."""

    def with_layer(self, sums: Sequence[Tensor], logits: Tensor, mask: Tensor | None) -> list[Tensor]:
        """Returns the sums after one more layer, in the order in which transformers adds.

        Args:
            sums: those of layers before it; none if it is the first.
            logits: those of its router, of shape (tokens, experts).
            mask: 1 for tokens that count, of as many elements; None if all do.
        """
        assert self.experts is not None and self.chosen is not None, "the loss got both"
        weights = torch.nn.functional.softmax(logits, dim=-1)
        probabilities = weights.float()
        counts = torch.ones(len(logits), device=logits.device)
        if mask is not None:
            counts = mask.reshape(-1).to(counts)
            probabilities = probabilities * counts.unsqueeze(-1)
        with torch.no_grad():
            experts = torch.topk(weights, self.chosen, dim=-1).indices.reshape(-1)
            choices = torch.zeros(self.experts + 1, device=logits.device)
            choices.scatter_add_(0, experts, counts.repeat_interleave(self.chosen))
            choices[-1] = counts.sum()
        made = [probabilities.sum(dim=0), choices]
        return [before + own for before, own in zip(sums, made, strict=True)] if sums else made

    def loss(self, probabilities: Tensor, choices: Tensor) -> Tensor:
        """Returns the loss of all layers by their sums."""
        assert self.experts is not None, "the loss got them"
        return torch.sum(choices[:-1] / choices[-1] * (probabilities / choices[-1]).unsqueeze(0)) * self.experts

    def is_computed_by(self, function: Callable[..., Tensor]) -> bool:
        """Whether a model's own loss of all logits is this one."""
        if self.experts is None or self.chosen is None:
            return False
        generator = torch.Generator().manual_seed(0)
        logits = [torch.randn(6, self.experts, generator=generator).requires_grad_() for _ in range(2)]
        mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
        with suppress(Exception), torch.enable_grad():
            return all(self._agrees(function, logits, each) for each in (None, mask))
        return False

    def _agrees(self, function: Callable[..., Tensor], logits: list[Tensor], mask: Tensor | None) -> bool:
        sums: list[Tensor] = []
        for each in logits:
            sums = self.with_layer(sums, each, mask)
        losses = self.loss(*sums), function(tuple(logits), self.experts, self.chosen, mask)
        own, other = ([loss.detach(), *torch.autograd.grad(loss, logits)] for loss in losses)
        return all(map(torch.allclose, own, other))


class _Asked(NamedTuple):
    """What a call of the loss that balances experts computes."""

    logits: Sequence[Tensor]
    balance: Balance
    mask: Any

    @classmethod
    def of(cls, function: Callable[..., Any], positional: Any, named: Any) -> "_Asked":
        call = signature(function).bind(*positional, **named)
        call.apply_defaults()
        given = call.arguments
        balance = Balance(given.get("num_experts"), given.get("top_k"))
        return cls(next(iter(given.values())) or (), balance, given.get(_MASK))
