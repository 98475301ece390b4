"""Messages between pipeline ranks: what crosses a chunk boundary for one micro-batch, as one tensor.

The tensors of a message travel as one, so that a message is one operation on the device. A header has their shapes
and dtypes.

Hidden states and their gradients may travel in fewer bits than they are computed in: rounded to bfloat16, or to
float8_e4m3fn in blocks with a scale each.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ds_lgamp.cost.traffic import narrow_bytes
from ds_lgamp.runtime.chunk import Tensors, as_tuple
from ds_lgamp.schedule.spec import FP8_BLOCK, LEAST_ROUNDED, ActivationType

HEADER_ELEMENTS = 128
"""Of every header, all int64."""
_TOGETHER = 7
"""How many tensors' kinds, each one byte, are one number of a header."""
OF_HIDDEN_STATES: dict[ActivationType, float] = {"bf16": 1e30, "fp8": 1e4}
"""What is larger in the first message is a mask: the lowest number of fp32 would be infinite in bfloat16, and one
number of a mask takes the digits of all others in its block of fp8."""
_LARGEST_SHARED = {torch.float16: 6e4}
"""By type, the largest number that shares a block of fp8 with others; 1e8 for other types."""
_LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn."""
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


class Place(NamedTuple):
    """Which message of a link it is."""

    chunk: int
    micro_batch: int
    answered: bool = True
    """Whether its gradients come back. Without a narrow type, no link asks for that."""


class Way(IntEnum):
    """How a tensor travels, and what comes back."""

    EXACT = 0
    """As it is, and so does its gradient if it is a floating-point tensor."""
    NARROW = 1
    """Rounded, and so is its gradient."""
    CONSTANT = 2
    """As it is. It needs no gradient, and none comes back."""
    ABSENT = 3
    """Not at all: the gradient of a constant."""


_WAYS = 16
"""A header adds this many for each step from one :class:`Way` to the next, which is more than there are dtypes."""


class MessageSpec(NamedTuple):
    """The shapes and dtypes of a message: the tensors that cross a chunk boundary for one micro-batch."""

    is_tuple: bool
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    ways: tuple[Way, ...] = ()
    """How each tensor travels; empty if all do as they are."""

    @classmethod
    def of(cls, value: Tensors, ways: tuple[Way, ...] = ()) -> "MessageSpec":
        tensors = tuple((tensor.shape, tensor.dtype) for tensor in as_tuple(value))
        return cls(isinstance(value, tuple), tensors, ways if any(ways) else ())

    def carried(self, narrow: ActivationType | None) -> "MessageSpec":
        """Returns the shapes and dtypes that travel, if ``narrow`` is how tensors are rounded."""
        if narrow is None or not self.ways:
            return self
        carried = (
            _carried(*tensor, narrow) if way is Way.NARROW else tensor
            for tensor, way in zip(self.tensors, self.ways)
            if way is not Way.ABSENT
        )
        return MessageSpec(self.is_tuple, tuple(carried))

    def restored(self, carried: Iterable[torch.Tensor], narrow: ActivationType | None) -> Iterator[torch.Tensor | None]:
        """Yields the tensors of a message of which ``carried`` has travelled; None for absent ones."""
        if narrow is None or not self.ways:
            yield from carried
            return
        arrived = iter(carried)
        for (shape, dtype), way in zip(self.tensors, self.ways):
            if way is Way.ABSENT:
                yield None
            else:
                yield widened(next(arrived), shape, dtype, narrow) if way is Way.NARROW else next(arrived)

    @property
    def shapes(self) -> str:
        """The shapes and dtypes in words."""
        return " and ".join(f"{list(shape)} {dtype}" for shape, dtype in self.tensors)

    def to_header(self) -> torch.Tensor:
        """Returns an int64 tensor of 128 elements on the host, padded with zeros.

        It holds is_tuple, the number of tensors, how many kinds of them there are, then the dtype and way, number of
        dimensions and sizes of each kind, then the kind of each tensor: blocks may add many tensors of the same kinds.
        Raises TypeError for a dtype that no link carries, ValueError if the tensors do not fit.
        """
        tensors = [*zip(self.tensors, self.ways or [Way.EXACT] * len(self.tensors))]
        kinds = [*dict.fromkeys(tensors)]
        numbers = [int(self.is_tuple), len(tensors), len(kinds)]
        for (shape, dtype), way in kinds:
            if dtype not in _DTYPES:
                raise TypeError(f"a chunk returned a tensor of {dtype}, which no link carries; convert it")
            numbers += [_DTYPES.index(dtype) + _WAYS * way, len(shape), *shape]
        places = {kind: place for place, kind in enumerate(kinds)}
        own = bytes(places[tensor] for tensor in tensors) if len(kinds) <= HEADER_ELEMENTS else b""
        numbers += [int.from_bytes(own[start : start + _TOGETHER], "big") for start in range(0, len(own), _TOGETHER)]
        if len(numbers) > HEADER_ELEMENTS:
            raise ValueError(
                f"{len(tensors)} tensors of {len(kinds)} kinds between two chunks are too many for a header; "
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
            (way, dtype), dimensions = divmod(next(numbers), _WAYS), next(numbers)
            kinds.append(((torch.Size(next(numbers) for _ in range(dimensions)), _DTYPES[dtype]), Way(way)))
        sizes = (min(_TOGETHER, count - start) for start in range(0, count, _TOGETHER))
        own = b"".join(next(numbers).to_bytes(size, "big") for size in sizes)
        tensors, ways = zip(*(kinds[place] for place in own)) if own else ((), ())
        return cls(is_tuple, tensors, ways if any(ways) else ())


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


class Ways:
    """Decides which tensors between chunks travel rounded: those that need a gradient, have at least 1024 elements and
    more bytes each than the ``narrow`` type, and are no masks.

    A mask that is the sum of trained biases needs a gradient, too. It has numbers that no hidden state has. The first
    message tells them apart, since looking waits for the device.
    """

    def __init__(self, narrow: ActivationType) -> None:
        self._narrow = narrow
        self._is_mask: dict[tuple[int, int], bool] = {}
        """By chunk and member."""

    def of(self, chunk: int, value: Tensors) -> tuple[Way, ...]:
        """Returns how each tensor in the result of ``chunk`` travels."""
        return tuple(self._way(chunk, *each) for each in enumerate(as_tuple(value)))

    def _way(self, chunk: int, index: int, member: torch.Tensor) -> Way:
        if not member.is_floating_point():
            return Way.EXACT
        if not member.requires_grad:
            return Way.CONSTANT
        if not could_travel_rounded(member, self._narrow):
            return Way.EXACT
        if (chunk, index) not in self._is_mask:
            self._is_mask[chunk, index] = bool(member.detach().abs().amax() > OF_HIDDEN_STATES[self._narrow])
        return Way.EXACT if self._is_mask[chunk, index] else Way.NARROW


def could_travel_rounded(tensor: torch.Tensor, narrow: ActivationType) -> bool:
    """Whether a ``tensor`` travels rounded unless it is a mask."""
    width = (torch.bfloat16 if narrow == "bf16" else torch.float8_e4m3fn).itemsize
    is_hidden = tensor.is_floating_point() and tensor.requires_grad and tensor.numel() >= LEAST_ROUNDED
    return is_hidden and tensor.element_size() > width


def message_bytes(value: Any, narrow: ActivationType) -> int:
    """Returns the bytes of the tensors in ``value``, of which some require gradients, in a message. Masks count as if
    they travelled rounded."""
    return sum(
        narrow_bytes(tensor.numel(), narrow) if could_travel_rounded(tensor, narrow) else tensor.nbytes
        for tensor in as_tuple(value)
    )


def ways_back(value: Tensors, ways: Sequence[Way]) -> tuple[Way, ...]:
    """Returns how the gradients of floating-point tensors in ``value`` travel, if these travel in ``ways``; empty if
    all do as they are."""
    floating = (way for member, way in zip(as_tuple(value), ways) if member.is_floating_point())
    return tuple(Way.ABSENT if way is Way.CONSTANT else way for way in floating)


def refuse_late_gradients(chunk: int, value: Tensors, ways: Sequence[Way]) -> None:
    """Raises ValueError if a tensor in the result of ``chunk`` needs a gradient, but none comes back."""
    for way, member in zip(ways, as_tuple(value)):
        if way is Way.CONSTANT and member.requires_grad:
            raise ValueError(
                f"chunk {chunk} returned a tensor of {list(member.shape)} that needs a gradient, after one that needed "
                "none, as activation_dtype has it to the end; remove activation_dtype"
            )


def narrowed(tensor: torch.Tensor, narrow: ActivationType | None) -> torch.Tensor:
    """Returns what travels of a floating-point ``tensor`` of any shape, of which :func:`widened` makes a tensor again.

    - bf16: the nearest values in bfloat16.
    - fp8: bytes, for each block of 128 elements its scale in fp32, its largest absolute value divided by 448; then
      each element divided by its scale, in float8_e4m3fn. The last block may be shorter.

    A value that is infinite or no number arrives as such a one, or makes its whole block no numbers. So does one of
    more than 1e8 under fp8, or 6e4 if the tensor is fp16: a block of such a value and of ordinary ones would lose these
    without a word.
    """
    if narrow == "bf16":
        return tensor.to(torch.bfloat16)
    flat = tensor.reshape(-1).float()
    blocks = -(-flat.numel() // FP8_BLOCK)
    padded = torch.nn.functional.pad(flat, (0, blocks * FP8_BLOCK - flat.numel())).view(blocks, FP8_BLOCK)
    largest = padded.abs().amax(dim=1, keepdim=True)
    scales = (largest / _LARGEST_FP8).clamp_min(torch.finfo(torch.float32).tiny)
    scales.masked_fill_(largest > _LARGEST_SHARED.get(tensor.dtype, 1e8), torch.nan)
    values = (padded / scales).to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[: flat.numel()]
    return torch.cat([scales.view(-1).view(torch.uint8), values])


def widened(carried: torch.Tensor, shape: torch.Size, dtype: torch.dtype, narrow: ActivationType) -> torch.Tensor:
    """Returns the tensor of ``shape`` and ``dtype`` of which :func:`narrowed` made ``carried``."""
    if narrow == "bf16":
        return carried.to(dtype)
    elements = shape.numel()
    blocks = -(-elements // FP8_BLOCK)
    head = blocks * torch.float32.itemsize
    values = carried[head:].view(torch.float8_e4m3fn).to(torch.float32)
    padded = torch.nn.functional.pad(values, (0, blocks * FP8_BLOCK - elements)).view(blocks, FP8_BLOCK)
    padded = padded * carried[:head].view(torch.float32).view(blocks, 1)
    return padded.view(-1)[:elements].to(dtype).view(shape)


def _carried(shape: torch.Size, dtype: torch.dtype, narrow: ActivationType) -> tuple[torch.Size, torch.dtype]:
    if narrow == "bf16":
        return shape, torch.bfloat16
    return torch.Size([narrow_bytes(shape.numel(), narrow)]), torch.uint8


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
