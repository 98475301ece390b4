"""Messages between pipeline ranks: what crosses a chunk boundary for one micro-batch, as one tensor.

The tensors of a message travel as one, so that a message is one operation on the device. A header has their shapes
and dtypes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ds_lgamp.runtime.chunk import Tensors, as_tuple

HEADER_ELEMENTS = 128
"""Of every header, all int64."""
_TOGETHER = 7
"""How many tensors' kinds, each one byte, are one number of a header."""
_ALIGNMENT = 16
"""In bytes. Every tensor of a message starts at a multiple, which every dtype divides."""
_ALIGNMENT_OF_MEMORY = 64
"""In bytes. torch aligns memory on a CPU to this, and MKL asks for it where results must be reproducible."""
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


class MessageSpec(NamedTuple):
    """The shapes and dtypes of a message: the tensors that cross a chunk boundary for one micro-batch."""

    is_tuple: bool
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, value: Tensors) -> "MessageSpec":
        return cls(isinstance(value, tuple), tuple((tensor.shape, tensor.dtype) for tensor in as_tuple(value)))

    @property
    def shapes(self) -> str:
        """The shapes and dtypes in words."""
        return " and ".join(f"{list(shape)} {dtype}" for shape, dtype in self.tensors)

    def to_header(self) -> torch.Tensor:
        """Returns an int64 tensor of 128 elements on the host, padded with zeros.

        It holds is_tuple, the number of tensors, how many kinds of them there are, then the dtype, number of dimensions
        and sizes of each kind, then the kind of each tensor: blocks may add many tensors of the same kinds. Raises
        TypeError for a dtype that no link carries, ValueError if the tensors do not fit.
        """
        kinds = [*dict.fromkeys(self.tensors)]
        numbers = [int(self.is_tuple), len(self.tensors), len(kinds)]
        for shape, dtype in kinds:
            if dtype not in _DTYPES:
                raise TypeError(f"a chunk returned a tensor of {dtype}, which no link carries; convert it")
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        places = {kind: place for place, kind in enumerate(kinds)}
        own = bytes(places[tensor] for tensor in self.tensors) if len(kinds) <= HEADER_ELEMENTS else b""
        numbers += [int.from_bytes(own[start : start + _TOGETHER], "big") for start in range(0, len(own), _TOGETHER)]
        if len(numbers) > HEADER_ELEMENTS:
            raise ValueError(
                f"{len(self.tensors)} tensors of {len(kinds)} kinds between two chunks are too many for a header; "
                "return fewer"
            )
        numbers += [0] * (HEADER_ELEMENTS - len(numbers))
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @classmethod
    def from_header(cls, header: torch.Tensor) -> "MessageSpec":
        numbers = iter(header.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        kinds = []
        for _ in range(next(numbers)):
            dtype, dimensions = _DTYPES[next(numbers)], next(numbers)
            kinds.append((torch.Size(next(numbers) for _ in range(dimensions)), dtype))
        sizes = (min(_TOGETHER, count - start) for start in range(0, count, _TOGETHER))
        own = b"".join(next(numbers).to_bytes(size, "big") for size in sizes)
        return cls(is_tuple, tuple(kinds[place] for place in own))


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the message that holds ``tensors`` of ``device``: the only one itself, or the bytes of all.

    No device library carries int16, so int16 travels as bytes too.
    """
    if len(tensors) == 1 and tensors[0].dtype is not torch.int16:
        return tensors[0].contiguous()
    message, members = allocate(MessageSpec.of(tuple(tensors)), device)
    for member, tensor in zip(members, tensors):
        member.copy_(tensor)
    return message


def allocate(spec: MessageSpec, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns an uninitialised message and its tensors, which share its memory.

    They are no views of the message, because a view raises if autograd saved it and another view changes in place.
    """
    if len(spec.tensors) == 1 and spec.tensors[0][1] is not torch.int16:
        shape, dtype = spec.tensors[0]
        message = torch.empty(shape, dtype=dtype, device=device)
        return message, [message]
    starts = [0]
    for shape, dtype in spec.tensors:
        size = shape.numel() * dtype.itemsize
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    message = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    storage, members = message.untyped_storage(), []
    for start, (shape, dtype) in zip(starts, spec.tensors):
        flat = torch.empty(0, dtype=dtype, device=device)
        flat.set_(storage, start // dtype.itemsize, (shape.numel(),), (1,))
        members.append(flat.view(shape))
    return message, members


def laid_out(value: Any) -> Any:
    """Returns ``value`` with all its tensors contiguous and aligned, as if another rank had sent them.

    Their gradients get the same layout in the backward pass. A kernel may round differently if a matrix is transposed
    or begins elsewhere. Tensors inside tuples are included; other values are returned as they are.
    """
    if isinstance(value, tuple):
        return tuple(map(laid_out, value))
    if not isinstance(value, torch.Tensor):
        return value
    plain = _plain(value)
    if plain.requires_grad and plain.is_leaf:
        # A hook on a parameter would outlive the forward.
        plain = plain.view_as(plain)
    if plain.requires_grad:
        plain.register_hook(_plain)
    return plain


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_OF_MEMORY == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
