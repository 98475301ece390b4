"""Outputs that stay on the rank that computed them."""

from typing import Any, NoReturn

from ds_lgamp.config import BLOCK, ConfigError


class NotInTraining(ConfigError, AttributeError):
    """An output that stays on the rank that computed it. An AttributeError too, so that ``hasattr`` says no."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"with {BLOCK}.outputs 'loss' the output of a training step has only {what}, which "
            "label_smoothing_factor, compute_loss_func, trl's trainers and similar losses need; set it to 'all'"
        )


class NotReturned:
    """Stands in for a tensor that stays on the rank that computed it. Whatever uses it raises NotInTraining."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotInTraining("the loss, not its other tensors")

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotInTraining("the loss, not its other tensors")
