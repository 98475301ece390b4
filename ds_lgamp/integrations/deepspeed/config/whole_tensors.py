"""Gives the optimizers that need whole tensors their counterparts that work on shards."""

from collections.abc import Callable
from typing import Any

import torch

from ds_lgamp.config import ConfigError
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import Muon
from ds_lgamp.optimizers.tensors import TensorOptimizer


def works_on_shards(kind: type) -> bool:
    """Whether ``kind`` is LAMB or Muon on shards, or an optimizer that :func:`translated` replaces by one."""
    return counterpart(kind) is not None


def counterpart(kind: type) -> type[TensorOptimizer] | None:
    """Returns the class that takes the place of ``kind`` on shards, which may be itself; None if there is none."""
    return kind if issubclass(kind, TensorOptimizer) else _COUNTERPARTS.get(_name(kind), (None, None))[0]


def translated(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the counterpart of ``optimizer`` that works on shards: LAMB for DeepSpeed's FusedLamb and apex's
    FusedLAMB, Muon for torch's and for DeepSpeed's MuonWithAuxAdam. Any other optimizer is returned as it is.

    The counterpart has the same groups, so that schedulers act on it, and the same hooks. The classes are known by
    their names, because importing some of them compiles.

    Raises ConfigError if ``optimizer`` has an option that the counterpart lacks.
    """
    if _name(type(optimizer)) not in _COUNTERPARTS:
        return optimizer
    _, translate = _COUNTERPARTS[_name(type(optimizer))]
    try:
        made = translate(optimizer)
    except ValueError as error:
        raise ConfigError(f"optimizer is {type(optimizer).__name__}, but {error}") from None
    # The list too, not only the groups in it.
    made.param_groups = optimizer.param_groups
    made._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    made._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    # A scheduler of ``optimizer`` would warn that it never steps.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return made


def _muon_of_torch(optimizer: torch.optim.Optimizer) -> Muon:
    for group in optimizer.param_groups:
        group.update(use_muon=True, ns_method="standard")
    return Muon(optimizer.param_groups)


def _muon_of_deepspeed(optimizer: torch.optim.Optimizer) -> Muon:
    auxiliary = getattr(optimizer, "aux_optimizer", None)
    if not all(getattr(each, "adam_w_mode", True) for each in (optimizer, auxiliary)):
        raise ConfigError("optimizer is MuonWithAuxAdam with adam_w_mode False; here its Adam is AdamW, set it to True")
    if not all(group.get("bias_correction", True) for group in optimizer.param_groups):
        raise ConfigError(
            "optimizer is MuonWithAuxAdam with bias_correction False; here its Adam corrects its bias, set it to True"
        )
    return Muon(optimizer.param_groups)


def _lamb_of_deepspeed(optimizer: torch.optim.Optimizer) -> Lamb:
    if getattr(optimizer, "eps_mode", 1) == 0:
        raise ConfigError("optimizer is FusedLamb with eps_inside_sqrt, which shards do not take; set it to False")
    _refuse_own_clipping(optimizer)
    return Lamb(optimizer.param_groups)


def _lamb_of_apex(optimizer: torch.optim.Optimizer) -> Lamb:
    for key, value, there in (
        ("adam_w_mode", 1, int(optimizer.adam_w_mode)),  # type: ignore[attr-defined]
        ("grad_averaging", 1, min(int(group["grad_averaging"]) for group in optimizer.param_groups)),
    ):
        if there != value:
            raise ConfigError(f"optimizer is FusedLAMB with {key} False, which shards do not take; set it to True")
    _refuse_own_clipping(optimizer)
    adapts = bool(optimizer.use_nvlamb)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group.update(corrects="moments", min_coeff=0.0, max_coeff=float("inf"), adapts_undecayed=adapts)
    return Lamb(optimizer.param_groups)


def _refuse_own_clipping(optimizer: torch.optim.Optimizer) -> None:
    limits = {group["max_grad_norm"] for group in optimizer.param_groups}
    if limits - {0, None}:
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__} with max_grad_norm {max(limits)}; set it to 0, and write "
            f'"gradient_clipping": {max(limits)} into the configuration'
        )


_COUNTERPARTS: dict[str, tuple[type[TensorOptimizer], Callable[[Any], TensorOptimizer]]] = {
    "torch.optim.Muon": (Muon, _muon_of_torch),
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": (Muon, _muon_of_deepspeed),
    "deepspeed.ops.lamb.fused_lamb.FusedLamb": (Lamb, _lamb_of_deepspeed),
    "apex.optimizers.fused_lamb.FusedLAMB": (Lamb, _lamb_of_apex),
}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
