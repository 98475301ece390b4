"""Muon: matrices step along the orthogonal matrix near their momentum; all other tensors step with AdamW."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from ds_lgamp.cost.muon import Matrix, elements_by_rank, spread
from ds_lgamp.optimizers.tensors import Exchange, Piece, Sharing, TensorOptimizer, check_numbers
from ds_lgamp.partition.zero_partition import ZeroPartition

METHODS = ("standard", "gram")
_RESTART = 2
"""The step of the gram method that begins anew from the matrix, because its products lose digits."""


class NewtonSchulz(NamedTuple):
    """A Newton-Schulz iteration with quintic polynomials: X becomes a X + b (X X^T) X + c (X X^T)^2 X.

    Source: K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    method: str = "standard"
    """standard: in bf16, rounded as in torch.optim.Muon. gram: iterates on X X^T, which is small if X is oblong, and
    multiplies by X at the end; in fp16, or in fp32 on a CPU. It is the default of DeepSpeed's Muon."""
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    steps: int = 5
    eps: float = 1e-7
    """The least norm by which a matrix is divided."""

    @property
    def input_dtype(self) -> torch.dtype:
        """The smallest type of the matrix that leaves the result as it is. The standard method rounds the matrix before
        anything else; the gram method divides it by its norm first."""
        return torch.bfloat16 if self.method == "standard" else torch.float32

    def output_dtype(self, device: torch.device) -> torch.dtype:
        """The type of the result."""
        if self.method == "standard":
            return torch.bfloat16
        return torch.float32 if device.type == "cpu" else torch.float16

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns the orthogonal matrix near ``matrix`` [rows, columns]."""
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        made = (self._standard if self.method == "standard" else self._gram)(wide)
        return made if wide is matrix else made.T

    def _standard(self, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        x = matrix.to(torch.bfloat16)
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x

    def _gram(self, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = self.coefficients
        x = (matrix / (matrix.norm() + self.eps)).to(self.output_dtype(matrix.device))
        gram, factor = x @ x.T, None
        for step in range(self.steps):
            if factor is not None and step == _RESTART:
                x = factor @ x
                gram, factor = x @ x.T, None
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal().add_(a)
            factor = polynomial if factor is None else polynomial @ factor
            if step + 1 not in (_RESTART, self.steps):
                gram = polynomial @ gram @ polynomial
        return x if factor is None else factor @ x


DEFAULTS = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_method": "gram",
    "ns_coefficients": NewtonSchulz().coefficients,
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
    "blocks": 1,
}
"""The options of groups of matrices."""
_OF_OTHERS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
MATRIX_OPTIONS, OTHER_OPTIONS = frozenset(DEFAULTS) - {"eps"}, frozenset(_OF_OTHERS)
"""The options of matrices and of other tensors where both are given together. There eps is AdamW's."""


class Muon(TensorOptimizer):
    """Muon on shards (K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024), and AdamW
    for everything but hidden matrices.

    With G the gradient of a matrix W, the numbers are those of torch.optim.Muon:

        B = momentum B + (1 - momentum) G
        O = NewtonSchulz((1 - momentum) G + momentum B), or NewtonSchulz(B) without nesterov
        W = W - lr weight_decay W - lr ratio O

    where ratio is sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)) with "match_rms_adamw".

    Every matrix is made orthogonal once per batch, on one data-parallel and one tensor-parallel rank. The ranks share
    the matrices by the work these cost. Matrices travel there and back once, in the type in which the iteration begins
    and in that of its result. So a step costs two all-to-alls over the data-parallel ranks, or one all-gather if these
    have whole matrices, and two all-to-alls over the tensor-parallel ranks if there are sliced matrices.

    Each group of ``params`` says with ``use_muon`` whether it has matrices. Options and their defaults, as in
    DeepSpeed's MuonWithAuxAdam:

    - of matrices: lr 0.02, momentum 0.95, weight_decay 0, ns_method "gram" (:class:`NewtonSchulz`), and those of
      torch.optim.Muon: nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn. ``blocks`` is the number of matrices
      that each parameter stacks along its first dimension, 3 for joint queries, keys and values. Each is made
      orthogonal by itself.
    - of others: lr 3e-4, betas (0.9, 0.95), eps 1e-10, weight_decay 0, and those of torch.optim.AdamW.

    Args:
        params: the groups.
        matrices: options of groups of matrices, in place of the defaults.
        others: options of other groups, in place of the defaults.

    Raises ValueError for a group without ``use_muon``, an unknown option, a value out of its range, or a tensor that is
    no matrix in a group of matrices.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        matrices: Mapping[str, Any] | None = None,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        unknown = sorted((matrices or {}).keys() - DEFAULTS.keys())
        if unknown:
            raise ValueError(f"groups of matrices have no option {unknown[0]}; use {', '.join(DEFAULTS)}")
        self._of_matrices = {**DEFAULTS, **(matrices or {})}
        self._adam = torch.optim.AdamW([torch.empty(0)], **{**_OF_OTHERS, **(others or {})})
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "use_muon" not in param_group:
            raise ValueError("a parameter group has no use_muon; write whether its parameters are hidden matrices")
        defaults = self._of_matrices if param_group["use_muon"] else self._adam.defaults
        for key, value in defaults.items():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)
        if param_group["use_muon"]:
            _check(param_group)

    def bind(self, partition: ZeroPartition) -> None:
        super().bind(partition)
        of_method: dict[str, list[Piece]] = {}
        for piece in self.bound_pieces():
            group = self.param_groups[piece.group]
            if group["use_muon"]:
                of_method.setdefault(group["ns_method"], []).append(piece)
        self._matrices = [Matrices(of_method[method], self.param_groups) for method in sorted(of_method)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the weights from their gradients. All data-parallel and tensor-parallel ranks call it together."""
        self.bound_pieces()
        self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adam.state = self.state
        self._adam.step()
        directions = {
            shard: self._direction(group, shard, gradient)
            for group, shard, gradient in self.shards()
            if group["use_muon"]
        }
        for matrices in self._matrices:
            updates = matrices.orthogonal(directions)
            for piece, update in zip(matrices.pieces, updates):
                if piece.shard is not None and piece.shard in directions:
                    step_size = _step_size(self.param_groups[piece.group], piece)
                    piece.shard[piece.within].add_(update, alpha=-step_size)

    def _direction(self, group: dict[str, Any], shard: Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Lets the momentum follow the gradient, decays the weights, and returns what is made orthogonal."""
        state = self.state[shard]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(shard)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        direction = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        return direction.to(newton_schulz(group).input_dtype)


class Matrices:
    """The matrices that one method makes orthogonal, and how the ranks share them.

    Args:
        pieces: of these matrices, at least one.
        groups: the optimizer's parameter groups.
    """

    def __init__(self, pieces: Sequence[Piece], groups: list[dict[str, Any]]) -> None:
        self.pieces, self._groups = pieces, groups
        policy = pieces[0].part.unit.policy
        group, order = policy.shard_group, policy.shard_order
        ranks, tensor_ranks = group.size(), 1 if policy.tensor_group is None else policy.tensor_group.size()
        work = [_work(piece, groups[piece.group]["blocks"]) for piece in pieces]
        workers = spread(work, ranks * tensor_ranks)
        owners = [worker // tensor_ranks for worker in workers]
        self._data: Exchange | Sharing
        if policy.partitioned:
            self._data = Exchange([_held(piece, ranks, order) for piece in pieces], owners, group, order)
        else:
            self._data = Sharing([piece.part.shape.numel() for piece in pieces], owners, group)
        self._sliced = [index for index in self._data.own if pieces[index].is_sliced]
        self._slices: Exchange | None = None
        if self._sliced and policy.tensor_group is not None:
            self._slices = Exchange(
                [[pieces[index].part.shape.numel()] * tensor_ranks for index in self._sliced],
                [workers[index] % tensor_ranks for index in self._sliced],
                policy.tensor_group,
            )

    def orthogonal(self, directions: Mapping[Parameter, torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's piece of every orthogonal matrix, from the shards of what is made orthogonal. All
        data-parallel and tensor-parallel ranks call it together."""
        device = self.pieces[0].part.unit.storage.shard.device
        iteration = newton_schulz(self._groups[self.pieces[0].group])
        parts = [_part_of(piece, directions, iteration.input_dtype) for piece in self.pieces]
        made_of = iteration.output_dtype(device), device
        results = dict(zip(self._data.own, self._data.collect(parts)))
        if self._slices is not None:
            slices = self._slices.collect([results[index] for index in self._sliced])
            own = [self._sliced[number] for number in self._slices.own]
            made = [self._of_slices(index, flat) for index, flat in zip(own, slices)]
            results.update(zip(self._sliced, self._slices.distribute(made, *made_of)))
        for index in self._data.own:
            if not self.pieces[index].is_sliced:
                results[index] = self._orthogonal(index, results[index].view(self.pieces[index].part.shape)).flatten()
        return self._data.distribute([results[index] for index in self._data.own], *made_of)

    def _of_slices(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Returns the slices of the orthogonal matrix one after another, from the slices of the matrix."""
        part = self.pieces[index].part
        dimension = next(number for number in (0, 1) if part.shape[number] != part.whole_shape[number])
        slices = flat.view(-1, *part.shape)
        made = self._orthogonal(index, torch.cat(slices.unbind(), dimension))
        return torch.cat([piece.flatten() for piece in made.chunk(len(slices), dimension)])

    def _orthogonal(self, index: int, matrix: torch.Tensor) -> torch.Tensor:
        group = self._groups[self.pieces[index].group]
        return torch.cat([newton_schulz(group)(block) for block in matrix.chunk(group["blocks"])])


def _part_of(piece: Piece, directions: Mapping[Parameter, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Returns the direction of a piece: zeros if the matrix is frozen, because ranks exchange that, too."""
    if piece.shard is not None and piece.shard in directions:
        return directions[piece.shard][piece.within]
    return torch.zeros(piece.part.numel, dtype=dtype, device=piece.part.unit.storage.shard.device)


def newton_schulz(group: dict[str, Any]) -> NewtonSchulz:
    """Returns the iteration of a group of matrices."""
    return NewtonSchulz(group["ns_method"], tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])


def _work(piece: Piece, blocks: int) -> int:
    rows, columns = piece.part.whole_shape
    return Matrix(rows, columns, 0, rows * columns, blocks).work


def _held(piece: Piece, ranks: int, order: Sequence[int]) -> list[int]:
    """Returns how many elements of a matrix each rank holds. ``order`` has the ranks in the order of their shards."""
    part = piece.part
    held = elements_by_rank(part.in_flat.start, part.shape.numel(), part.unit.storage.shard.numel(), ranks)
    return [held[order.index(rank)] for rank in range(ranks)]


def _step_size(group: dict[str, Any], piece: Piece) -> float:
    rows, columns = piece.part.whole_shape
    rows //= group["blocks"]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return group["lr"] * 0.2 * max(rows, columns) ** 0.5
    return group["lr"] * max(1.0, rows / columns) ** 0.5


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError for an option or a parameter that a group of matrices cannot have."""
    check_numbers(group, ("lr", "eps", "weight_decay"))
    allowed = {"ns_method": METHODS, "adjust_lr_fn": (None, "original", "match_rms_adamw")}
    for key, values in allowed.items():
        if group[key] not in values:
            raise ValueError(f"{key} is {group[key]!r}; use one of {', '.join(map(str, values))}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum is {group['momentum']}; use a number from 0 to below 1")
    for parameter in group["params"]:
        if not parameter.requires_grad:
            continue
        if parameter.numel() and (parameter.dim() != 2 or parameter.shape[0] % group["blocks"]):
            raise ValueError(
                f"a group with use_muon and {group['blocks']} blocks holds a parameter of shape "
                f"{list(parameter.shape)}; give it matrices whose rows are a multiple of the blocks"
            )
