"""Decides which optimizers work on shards, and which class the ``optimizer`` of ds_config.json stands for."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch import nn

from ds_lgamp.config import BLOCK, ConfigError
from ds_lgamp.optimizers.lamb import Lamb
from ds_lgamp.optimizers.muon import MATRIX_OPTIONS, OTHER_OPTIONS, Muon
from ds_lgamp.optimizers.rounding import InEightBits
from ds_lgamp.optimizers.tensors import TensorOptimizer


def takes_norms(args: Any) -> bool:
    """Whether an optimizer of bitsandbytes with these ``args`` scales by norms of whole tensors."""
    return getattr(args, "max_unorm", 0.0) > 0 or getattr(args, "percentile_clipping", 100) < 100


def comes_from(package: str, kind: type) -> bool:
    """Whether ``kind`` or a class that it extends is of ``package``."""
    return any(base.__module__.partition(".")[0] == package for base in kind.__mro__)


def counterpart(kind: type) -> type[TensorOptimizer] | None:
    """Returns LAMB or Muon on shards, if ``kind`` is one of them or an optimizer that :func:`translated` replaces by
    one; None for others."""
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
    return in_place_of(optimizer, made)


def in_place_of(optimizer: torch.optim.Optimizer, made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns ``made`` with groups and hooks of ``optimizer``."""
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


ELEMENTWISE: frozenset[type] = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Adagrad),
        *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
        torch.optim.Rprop,
    }
)
"""torch's optimizers that update each element from that element alone, so that a shard gives the same result as the
whole tensor. Their subclasses are left out, because they may scale by layer."""
_TORCHS = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
ON_CPU: frozenset[type] = frozenset({DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion})
"""DeepSpeed's optimizers of the same kind for parameters on the CPU. Instantiating one may compile it; importing it
does not."""
ON_ACCELERATOR: frozenset[type] = frozenset({FusedAdam, FusedLion})
"""DeepSpeed's optimizers of the same kind for an accelerator. FusedAdam has a kernel for the CPU too."""
_SKIP_BY_THEMSELVES = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
"""torch's optimizers whose fused kernel changes nothing if ``found_inf`` is 1. SGD is left out: if its first step is
skipped, its momentum stays uninitialised."""
UPDATES_HALF: frozenset[type] = frozenset({torch.optim.Adam, torch.optim.AdamW})
"""Optimizers that may update bf16 weights themselves. Others may round every intermediate result."""
WHOLE_TENSORS = {
    "adafactor": "keeps sums over rows and columns of whole matrices",
    "fusedlamb": "scales by the norms of whole tensors",
    "lamb": "scales by the norms of whole tensors",
    "lbfgs": "computes the loss several times in a step",
    "muadam": "scales by the shapes of whole tensors",
    "muadamw": "scales by the shapes of whole tensors",
    "muon": "makes whole matrices orthogonal",
    "muonwithauxadam": "makes whole matrices orthogonal",
    "musgd": "scales by the shapes of whole tensors",
    "onebitadam": "keeps errors of whole tensors, and which DeepSpeed has removed",
    "onebitlamb": "keeps errors of whole tensors, and which DeepSpeed has removed",
    "sparseadam": "takes sparse gradients, which shards do not have",
    "zerooneadam": "keeps errors of whole tensors, and which DeepSpeed has removed",
}
"""Why each optimizer cannot work on shards, by its name in lower case. LAMB and Muon of other origin than
``_COUNTERPARTS`` knows are among them."""
JSON_NAMES = {"adam", "adamw", "adagrad", "lamb", "lion", "muon", "DeepSpeedCPUAdam"} | {
    kind.__name__ for kind in ELEMENTWISE if kind.__name__.lower() not in ("adam", "adamw", "adagrad")
}
"""The values that ``optimizer.type`` may have. DeepSpeed writes the first six in lower case; the other values are
class names."""
_NOT_IN_FUSED_ADAM = {"amsgrad", "foreach", "fused", "maximize", "capturable", "differentiable"}
"""Options of torch's Adam that DeepSpeed's and apex's FusedAdam lack or refuse."""


class Kernels(NamedTuple):
    """The fused optimizers that run on one device without compiling anything."""

    fused: frozenset[type]
    """torch's classes that have a fused kernel for the device."""
    apex_adam: type | None
    """``apex.optimizers.FusedAdam`` of NVIDIA's apex; None without it, and on other devices than CUDA."""


class Choice(NamedTuple):
    """An optimizer class and its options."""

    kind: type
    options: dict[str, Any]

    @property
    def compiles(self) -> bool:
        """Whether instantiating the class may compile it."""
        return self.kind in ON_CPU | ON_ACCELERATOR


def kernels_of(device: torch.device) -> Kernels:
    """Tries out which fused optimizers this machine has for ``device``."""
    apex_adam = _apex_adam() if device.type == "cuda" else None
    return Kernels(frozenset(kind for kind in ELEMENTWISE if _has_fused_kernel(kind, device)), apex_adam)


def choose_optimizer(name: str, options: dict[str, Any], device: torch.device, kernels: Kernels) -> Choice:
    """The class and options that ``optimizer.type`` and ``optimizer.params`` stand for.

    They mean what they mean in DeepSpeed: "Adam" decays weights as AdamW does unless ``adam_w_mode`` is false, and
    ``torch_adam`` selects torch's class. Without ``torch_adam``, DeepSpeed compiles its FusedAdam. Here torch's fused
    kernel, which computes the same, takes its place, or apex's where torch has none for the device, so that nothing is
    compiled. torch has no ``bias_correction: false``; where apex is missing, that option alone still needs DeepSpeed's
    FusedAdam.

    Args:
        name: one of :data:`JSON_NAMES`, or the name of a class in ``torch.optim``.
        device: the device of the shards.

    Raises ConfigError if the optimizer cannot run on ``device``.
    """
    if name in ("adam", "adamw"):
        return _adam(name, dict(options), kernels)
    if name == "lion":
        return Choice(DeepSpeedCPULion if device.type == "cpu" else FusedLion, dict(options))
    if name == "lamb":
        return Choice(Lamb, _with_tuple(options))
    if name == "muon":
        return Choice(Muon, _muon(dict(options), kernels))
    if name == "DeepSpeedCPUAdam":
        return _cpu_adam(dict(options), device)
    kind = torch.optim.Adagrad if name == "adagrad" else getattr(torch.optim, name)
    return Choice(kind, _with_kernel(kind, options, kernels))


def choice_of(config: Any, device: torch.device) -> Choice:
    """Returns the optimizer that a DeepSpeedConfig names, for shards on ``device``."""
    return choose_optimizer(config.optimizer_name, config.optimizer_params or {}, device, kernels_of(device))


def known_kind(config: Any, optimizer: Any, device: torch.device) -> type | None:
    """Returns the class of the optimizer before it is built; None if a function of the user makes it.

    Args:
        optimizer: what the user passed as such; None if the DeepSpeedConfig names it.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer)
    return choice_of(config, device).kind if optimizer is None else None


def try_out(choice: Choice, device: torch.device) -> None:
    """Raises whatever the class raises for these options when it is built or takes its first step. Compiles nothing."""
    if issubclass(choice.kind, TensorOptimizer):
        choice.kind([{"params": [], "use_muon": uses_muon} for uses_muon in (True, False)], **choice.options)
    elif choice.compiles:
        inspect.signature(choice.kind).bind([], **choice.options)
    else:
        _step_one_element(choice, device)


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of ``optimizer`` reads its attribute ``found_inf`` on the device, and changes nothing if it
    is 1."""
    return type(optimizer) in _SKIP_BY_THEMSELVES and all(group.get("fused") for group in optimizer.param_groups)


def check_optimizer_type(name: str, allow_untested: bool) -> None:
    """Does what :func:`check_elementwise` does for an optimizer that ds_config.json names, before instantiating
    compiles it."""
    if name in JSON_NAMES:
        return
    reason = WHOLE_TENSORS.get(name.lower())
    kind = getattr(torch.optim, name, None)
    if reason is None and allow_untested and isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return
    raise ConfigError(
        f"optimizer.type is '{name}', which {reason or 'is unknown or may need whole tensors'}; shards take one of "
        f"{', '.join(sorted(JSON_NAMES, key=str.lower))}"
    )


def check_elementwise(optimizer: torch.optim.Optimizer, allow_untested: bool, device: torch.device) -> None:
    """Raises ConfigError if ``optimizer`` is not known to work on shards on ``device``, and ``allow_untested`` is
    false."""
    kind = type(optimizer)
    if counterpart(kind) is not None:
        return
    name = "lamb" if takes_norms(getattr(optimizer, "args", None)) else kind.__name__.lower()
    if (reason := WHOLE_TENSORS.get(name)) is not None:
        raise ConfigError(f"optimizer is {kind.__name__}, which {reason}; shards take one of {_TORCHS}")
    if kind in ON_CPU and device.type != "cpu":
        raise ConfigError(
            f"optimizer is {kind.__name__}, which takes parameters on the CPU, and they are on {device.type}; "
            f"use one of {_TORCHS}"
        )
    if comes_from("torchao", kind):
        raise ConfigError(
            f"optimizer is torchao's {kind.__name__}, whose scales differ between shards and whole tensors; use "
            "bitsandbytes' AdamW8bit (adamw_8bit)"
        )
    known = kind in ELEMENTWISE | ON_CPU | ON_ACCELERATOR or issubclass(kind, InEightBits)
    known = known or (kind.__module__.startswith("apex.") and kind is _apex_adam())
    if not known and not allow_untested:
        raise ConfigError(
            f"optimizer is {kind.__name__}, which may need whole tensors; shards take one of {_TORCHS}, or "
            "any other that updates each element by itself if zero_allow_untested_optimizer is true"
        )


def check_updates_alone(kind: type, cause: str = f"{BLOCK}.overlap_update is true") -> None:
    """Raises ConfigError if an optimizer of ``kind`` is not known to give the same result where it steps for one unit
    after another: it may keep numbers of its own per step.

    Args:
        cause: the setting that asks for such steps, and its value.
    """
    setting = cause.partition(" is ")[0].split(".", 1)[1]
    if counterpart(kind) is not None:
        raise ConfigError(f"{cause}, but {kind.__name__} steps on all tensors of a rank together; remove {setting}")
    if kind not in ELEMENTWISE | ON_CPU | ON_ACCELERATOR and not issubclass(kind, InEightBits):
        raise ConfigError(
            f"{cause}, but {kind.__module__}.{kind.__name__} may count a step for all its parameters together; use one "
            f"of torch's {_TORCHS} (torch_adam in optimizer.params), or remove {setting}"
        )


def _adam(name: str, options: dict[str, Any], kernels: Kernels) -> Choice:
    decoupled = bool(options.pop("adam_w_mode", True)) or name == "adamw"
    torch_kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    # FusedAdam always keeps its states for the fp32 master weights.
    options.pop("fp32_optimizer_states", None)
    if options.pop("torch_adam", False):
        return Choice(torch_kind, options)
    bias_correction = bool(options.get("bias_correction", True))
    prefers_apex = kernels.apex_adam is not None and torch_kind not in kernels.fused
    if not bias_correction or prefers_apex and _NOT_IN_FUSED_ADAM.isdisjoint(options):
        return Choice(kernels.apex_adam or FusedAdam, {**options, "adam_w_mode": decoupled})
    for key in ("bias_correction", "set_grad_none"):
        options.pop(key, None)
    # torch's AdamW decays by 0.01 by default; FusedAdam does not decay.
    options.setdefault("weight_decay", 0.0)
    return Choice(torch_kind, _with_kernel(torch_kind, _with_tuple(options), kernels))


def _muon(options: dict[str, Any], kernels: Kernels) -> dict[str, Any]:
    """Returns the options of groups of matrices and of other groups."""
    for key, value, fix in (("adam_w_mode", True, "true"), ("per_head_muon", False, "groups with blocks")):
        if options.pop(key, value) is not value:
            raise ConfigError(f"optimizer.params.{key} is {not value}, which Muon on shards does not take; use {fix}")
    options.pop("fp32_optimizer_states", None)
    kinds = {"matrices": (MATRIX_OPTIONS, "muon_lr"), "others": (OTHER_OPTIONS, "adam_lr")}
    torch_adam = options.pop("torch_adam", False)
    unknown = sorted(options.keys() - {"muon_lr", "adam_lr"} - MATRIX_OPTIONS - OTHER_OPTIONS)
    if unknown:
        raise ConfigError(f"optimizer.params.{unknown[0]} is no option of Muon; remove it")
    chosen = {}
    for kind, (keys, rate) in kinds.items():
        chosen[kind] = {key: options[key] for key in keys & options.keys()}
        chosen[kind] |= {"lr": options[rate]} if rate in options else {}
    others = _with_tuple(chosen["others"])
    return {**chosen, "others": others if torch_adam else _with_kernel(torch.optim.AdamW, others, kernels)}


def _with_tuple(options: dict[str, Any]) -> dict[str, Any]:
    """Returns ``options`` with betas as torch takes them; JSON has lists, and may have whole numbers."""
    return {**options, "betas": tuple(map(float, options["betas"]))} if "betas" in options else dict(options)


def _cpu_adam(options: dict[str, Any], device: torch.device) -> Choice:
    if device.type != "cpu":
        raise ConfigError(
            f"optimizer.type is 'DeepSpeedCPUAdam', which takes parameters on the CPU, and they are on {device.type}; "
            "write AdamW"
        )
    if "adam_w_mode" in options:
        options["adamw_mode"] = options.pop("adam_w_mode")
    return Choice(DeepSpeedCPUAdam, options)


def _with_kernel(kind: type, options: dict[str, Any], kernels: Kernels) -> dict[str, Any]:
    """Adds ``fused`` to ``options`` if there is a fused kernel, unless they choose an implementation themselves."""
    decided = not {"fused", "foreach", "differentiable"}.isdisjoint(options)
    return {**options, "fused": True} if kind in kernels.fused and not decided else dict(options)


def _has_fused_kernel(kind: type, device: torch.device) -> bool:
    try:
        _step_one_element(Choice(kind, {"fused": True}), device)
    except (TypeError, RuntimeError):
        return False
    return True


def _step_one_element(choice: Choice, device: torch.device) -> None:
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    choice.kind([parameter], **choice.options).step()


def _apex_adam() -> type | None:
    """FusedAdam of NVIDIA's apex if its kernels can be imported. PyPI has another project of the name apex."""
    try:
        import_module("amp_C")
        return import_module("apex.optimizers").FusedAdam
    except Exception:
        # As in ds_lgamp env: whatever is wrong with apex, it cannot be used.
        return None
