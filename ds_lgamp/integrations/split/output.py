"""Outputs that stay on the rank that computed them, or that no rank could compute."""

from typing import Any, NoReturn

from ds_lgamp.config import BLOCK, ConfigError


class MissingOutput(ConfigError, AttributeError):
    """An output that the script does not get. An AttributeError too, so that ``hasattr`` says no."""


class NotInTraining(MissingOutput):
    """An output that stays on the rank that computed it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"with {BLOCK}.outputs 'loss' the output of a training step has only {what}, which "
            "label_smoothing_factor, compute_loss_func, trl's trainers and similar losses need; set it to 'all'"
        )


class NotReturned:
    """Stands in for a tensor that stays on the rank that computed it. Whatever uses it raises MissingOutput."""

    @staticmethod
    def _refusal() -> MissingOutput:
        return NotInTraining("the loss, not its other tensors")

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise cls._refusal()


class NotComputed(NotReturned):
    """Stands in for a tensor that the last layer could not compute."""

    @staticmethod
    def _refusal() -> MissingOutput:
        return MissingOutput(
            "this output of the model depends on more than its last layer has in a call unlike the dummy inputs; set "
            f"{BLOCK}.dummy_inputs to arguments such as this call's"
        )
