"""LAMB: every tensor's step is as long as its weights are large."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ds_lgamp.optimizers.norms import exact_norms, row_norms
from ds_lgamp.optimizers.tensors import Piece, TensorOptimizer, check_numbers

DEFAULTS = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "corrects": "step",
    "adapts_undecayed": True,
}
"""The options of groups, which are those of DeepSpeed's FusedLamb, and two more."""
_CORRECTIONS = ("step", "moments")


class Lamb(TensorOptimizer):
    """LAMB on shards, from Y. You and others, "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", arXiv 1904.00962.

    With g the gradient, w a tensor and t the number of steps:

        m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
        u = m / (sqrt(v) + eps) + weight_decay w
        ratio = ||w|| / ||u||, within min_coeff and max_coeff; 1 if either norm is 0
        w = w - lr sqrt(1 - beta2^t) / (1 - beta1^t) ratio u

    These are the numbers of DeepSpeed's FusedLamb, its defaults included. ``corrects="moments"`` gives those of the
    paper and of apex's FusedLAMB: m / (1 - beta1^t) and v / (1 - beta2^t) take the places of m and v, and the step is
    lr ratio u. Every tensor of a group has a ratio, vectors too, and ``adapts_undecayed=False`` means that of apex: a
    group without weight decay has ratio 1.

    Neither convention's clipping is here: apex clips by the global norm inside its step, the engine clips before it.

    A step costs one all-reduce of two numbers per tensor over the data-parallel ranks if they share the tensors. If
    there are sliced tensors, it costs another over the tensor-parallel ranks. Reproducible runs need two of each.

    Options of a group, with their defaults:

    - lr 1e-3, betas (0.9, 0.999) of the moments, weight_decay 0, and eps 1e-8, which is added to the root of the second
      moment.
    - bias_correction True: the first steps are corrected for moments that begin at zero. ``corrects`` says what that
      corrects, "step" or "moments".
    - min_coeff 0.01 and max_coeff 10, the smallest and the largest ratio; adapts_undecayed True: tensors without weight
      decay have a ratio.

    Args:
        params: parameters or groups, as torch takes them.
        lr: the learning rate.
        options: of all groups, in place of the defaults.

    Raises TypeError for another option, ValueError if a value is out of its range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        unknown = options.keys() - DEFAULTS.keys()
        if unknown:
            raise TypeError(f"Lamb has no option {min(unknown)}; use {', '.join(DEFAULTS)}")
        defaults = {**DEFAULTS, "lr": lr, **options}
        super().__init__(params, {**defaults, "betas": tuple(defaults["betas"])})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the weights from their gradients. All data-parallel and tensor-parallel ranks call it together."""
        pieces = self.bound_pieces()
        if not pieces:
            return
        of_shard = _by_shard(pieces)
        self._count()
        for group, shard, gradient in self.shards():
            self._follow_gradient(group, shard, gradient)
        ratios = self._ratios(self._exact_norms(of_shard) if self.policy.in_rank_order else self._norms(of_shard))
        for group, shard, _ in self.shards():
            update, step_size = self._update(group, shard), self._step_size(group, shard)
            for index in of_shard.get(shard, ()):
                within = pieces[index].within
                shard[within].addcmul_(update[within], ratios[index], value=-step_size)
            # So that the next one takes its place.
            del update

    def _count(self) -> None:
        """Counts a step of each shard. DeepSpeed leaves out what is frozen, apex counts for a group."""
        for group in self.param_groups:
            for shard in group["params"]:
                if shard.grad is not None or group["corrects"] == "moments":
                    # On the host, because the step size is a number.
                    self.state[shard]["step"] = self.state[shard].get("step", torch.tensor(0.0)) + 1

    def _follow_gradient(self, group: dict[str, Any], shard: Parameter, gradient: torch.Tensor) -> None:
        state, (beta1, beta2) = self.state[shard], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(shard), torch.zeros_like(shard)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _corrections(self, group: dict[str, Any], shard: Parameter) -> tuple[float, float]:
        """Returns by what the moments of ``shard`` fall short of averages."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        step = float(self.state[shard]["step"])
        first, second = (1 - beta**step for beta in group["betas"])
        return first, second

    def _step_size(self, group: dict[str, Any], shard: Parameter) -> float:
        first, second = self._corrections(group, shard) if group["corrects"] == "step" else (1.0, 1.0)
        return float(group["lr"]) * second**0.5 / first

    def _update(self, group: dict[str, Any], shard: Parameter) -> torch.Tensor:
        """Returns u. It is computed twice per step, because keeping it would take as much memory as a moment."""
        state = self.state[shard]
        first, second = self._corrections(group, shard) if group["corrects"] == "moments" else (1.0, 1.0)
        update = state["exp_avg_sq"].sqrt().div_(second**0.5).add_(group["eps"])
        torch.div(state["exp_avg"], update, out=update)
        return update.div_(first).add_(shard, alpha=group["weight_decay"])

    def _norms(self, of_shard: dict[Parameter, list[int]]) -> torch.Tensor:
        """Returns the norms [tensors, 2] of weights and updates over all ranks, in fp64."""
        pieces = self.bound_pieces()
        squares = [torch.zeros(2, dtype=torch.float64, device=self._device)] * len(pieces)
        for group, shard, _ in self.shards():
            update = self._update(group, shard)
            for index in of_shard.get(shard, ()):
                within = pieces[index].within
                squares[index] = torch.stack([_square(shard[within]), _square(update[within])])
            del update
        total = torch.stack(squares)
        self._over_ranks(total, dist.ReduceOp.SUM)
        return total.sqrt()

    def _exact_norms(self, of_shard: dict[Parameter, list[int]]) -> torch.Tensor:
        """Returns the same norms, equal to the bit however tensors are cut. Keeps all updates in memory meanwhile."""
        pieces = self.bound_pieces()
        parts: list[list[torch.Tensor]] = [[] for _ in range(2 * len(pieces))]
        for group, shard, _ in self.shards():
            update = self._update(group, shard)
            for index in of_shard.get(shard, ()):
                within = pieces[index].within
                parts[2 * index].append(shard[within])
                parts[2 * index + 1].append(update[within])
        return exact_norms(parts, self._over_ranks, self._device).view(-1, 2)

    def _over_ranks(self, values: torch.Tensor, operation: Any) -> None:
        """All-reduces values of every tensor, which come one tensor after another, over the ranks that share it."""
        policy, rows = self.policy, values.view(len(self.bound_pieces()), -1)
        if policy.partitioned:
            dist.all_reduce(rows, operation, policy.shard_group)
        sliced = [index for index, piece in enumerate(self.bound_pieces()) if piece.is_sliced]
        if sliced:
            of_slices = torch.stack([rows[index] for index in sliced])
            dist.all_reduce(of_slices, operation, policy.tensor_group)
            for index, row in zip(sliced, of_slices):
                rows[index] = row

    @property
    def _device(self) -> torch.device:
        return self.bound_pieces()[0].part.unit.storage.shard.device

    def _ratios(self, norms: torch.Tensor) -> torch.Tensor:
        """Returns the ratio of every tensor, from its norms [tensors, 2]."""
        weights, updates = norms.unbind(1)
        adapts, ratios = (weights > 0) & (updates > 0), weights / updates
        begin = 0
        for index, group in enumerate(self.param_groups):
            # Pieces are in the order of groups.
            end = begin + sum(piece.group == index for piece in self.bound_pieces())
            ratios[begin:end].clamp_(group["min_coeff"], group["max_coeff"])
            if not (group["adapts_undecayed"] or group["weight_decay"]):
                adapts[begin:end] = False
            begin = end
        return torch.where(adapts, ratios, 1.0).float()


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError if a value of a group is out of its range."""
    check_numbers(group, ("lr", "eps", "weight_decay"))
    if group["corrects"] not in _CORRECTIONS:
        raise ValueError(f"corrects is {group['corrects']!r}; use one of {', '.join(_CORRECTIONS)}")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas are {tuple(group['betas'])}; use two numbers from 0 to below 1")
    smallest, largest = group["min_coeff"], group["max_coeff"]
    if not 0 <= smallest <= largest:
        raise ValueError(f"min_coeff is {smallest} and max_coeff {largest}; use 0 <= min_coeff <= max_coeff")


def _by_shard(pieces: list[Piece]) -> dict[Parameter, list[int]]:
    """Returns the indices of the pieces in every shard."""
    indices: dict[Parameter, list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.shard is not None:
            indices.setdefault(piece.shard, []).append(index)
    return indices


def _square(values: torch.Tensor) -> torch.Tensor:
    """Returns the squared norm in fp64."""
    return torch.cat([*row_norms(values)]).double().square().sum()
