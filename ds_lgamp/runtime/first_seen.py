"""Notes on the device which results of a batch are not finite, so that the host can name the first one later.

A sum over a tensor is finite if all of its elements are. The host reads nothing while a batch runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_lgamp.runtime.batch import LoadMicroBatch

INPUTS, LABELS = -2, -1
"""The places of a micro-batch's inputs and labels, ahead of those of the layers."""


class FirstSeen:
    """Notes sums of the inputs, the labels, every layer's result, and the gradient of every layer's result, by
    micro-batch.

    Args:
        layers: the layers of this rank, by their number in the model.
        device: where the layers compute.
    """

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self._rows = {place: row for row, place in enumerate((INPUTS, LABELS, *layers))}
        self._device = device
        self._sums: torch.Tensor | None = None
        """Sums [2, places, micro-batches]: forward, then backward. None between training batches."""
        self._noted: set[tuple[int, int]] = set()
        """Layers and micro-batches whose forward was noted: recomputation repeats it."""

    def begin(self, micro_batches: int, load: LoadMicroBatch) -> LoadMicroBatch:
        """Begins a training batch. Returns ``load``, which loads a micro-batch, with notes of what it returns."""
        self._sums = torch.zeros(2, len(self._rows), micro_batches, device=self._device)
        self._noted.clear()

        def noting(micro_batch: int) -> tuple[Any, Any]:
            loaded = load(micro_batch)
            for place, value in zip((INPUTS, LABELS), loaded):
                self.after_layer(place, micro_batch, value)
            return loaded

        return noting

    def after_layer(self, layer: int, micro_batch: int, result: Any) -> None:
        """Notes what ``layer`` has computed for ``micro_batch`` and, once it is known, the gradient of that."""
        if self._sums is None or (layer, micro_batch) in self._noted:
            return
        if micro_batch >= self._sums.shape[2]:
            # The script gives the step more micro-batches than it said. The norm still tells whether they are finite.
            return
        self._noted.add((layer, micro_batch))
        forward, backward = self._sums[:, self._rows[layer], micro_batch]
        members = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        hidden = not torch.is_grad_enabled()
        for member in members:
            if isinstance(member, torch.Tensor) and member.is_floating_point():
                # In chunks that go forward only nothing requires gradients, and hidden states come first.
                _note(forward, member, infinity_counts=member.requires_grad or hidden)
                hidden = False
                # A hook on a leaf, which is a parameter, would outlive the batch.
                if member.grad_fn is not None:
                    member.register_hook(partial(_note, backward))

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Notes nothing inside the block, in which the script evaluates between two calls of a batch."""
        sums, self._sums = self._sums, None
        try:
            yield
        finally:
            self._sums = sums

    def end(self) -> torch.Tensor:
        """Ends the batch. Returns its sums [2, places, micro-batches], in the order of :attr:`places`."""
        assert self._sums is not None, "a training batch ends after its begin"
        sums, self._sums = self._sums, None
        return sums

    @property
    def places(self) -> list[int]:
        return list(self._rows)


@torch.no_grad()
def _note(total: torch.Tensor, tensor: torch.Tensor, infinity_counts: bool = True) -> None:
    """Adds the sum of ``tensor`` to ``total``. Where infinity does not count, only NaN does: in masks it is usual."""
    # In fp32, because sums of fp16 numbers leave its range soon.
    found = tensor.sum(dtype=torch.float32)
    total.add_(found if infinity_counts else found.nan_to_num(nan=torch.nan, posinf=0.0, neginf=0.0))
