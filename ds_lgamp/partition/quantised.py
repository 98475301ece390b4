"""Weights and gradients of few bits: how they travel, and how they are stored.

**Travel.** Weights and gradients travel as small whole numbers in blocks, each with a scale: ``zero_quantized_weights``
and ``zero_quantized_gradients`` of DeepSpeed (ZeRO++, arXiv 2306.10209). A block is as many elements as parameters are
aligned to. So it lies in one parameter and in one shard, wherever chunks and shards are cut: the layout does not change
what is rounded together. Its scale, in bf16, is the largest magnitude divided by the largest whole number. An element
becomes the nearest whole number of scales. Numbers and scales of a part travel together, in one collective. A block
with a number that is not finite arrives as NaN. Nothing here waits for the device.

**Storage.** Parameters of bitsandbytes hold packed bytes, of which layers make numbers by constants. It keeps these
beside the tensors that torch knows of: in ``Params4bit.quant_state``, in ``Int8Params.SCB`` and, from the first forward
on, in ``Linear8bitLt.state``. So the bytes are cut into parts and gathered, exactly, as those of every frozen unit, and
each rank of a layer has its constants whole. Nothing here imports bitsandbytes: its classes are told by these
attributes.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ds_lgamp.cost.units import aligned, packed_bytes
from ds_lgamp.partition.collectives import Finish, start_all_gather, start_all_to_all
from ds_lgamp.partition.memory import in_pool

_LARGEST = {8: 127, 4: 7}
"""By bits. The other end of the range would round asymmetrically."""
_BLOCK = aligned(1)
_SCALE = torch.bfloat16
_TINY = torch.finfo(_SCALE).tiny
"""The least scale, so that nothing is divided by zero."""
_PIECES = 8
"""Parts are rounded in at most so many pieces. Each takes temporary memory in fp32, and kernels of its own."""


def pack(values: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    """Rounds ``values`` [parts, n] and fills ``packed`` [parts, packed_bytes(n)], of bytes: numbers first, then
    scales. n is a multiple of the block."""
    for some, of_some in zip(*map(_pieces, (values, packed))):
        _pack(some, bits, of_some)


def unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    """Fills ``values`` [parts, n] with what :func:`pack` made of others, in the dtype of ``values``."""
    for of_some, some in zip(*map(_pieces, (packed, values))):
        _unpack(of_some, bits, some)


def _pieces(parts: torch.Tensor) -> Sequence[torch.Tensor]:
    return parts.split(-(-len(parts) // _PIECES))


def _pack(values: torch.Tensor, bits: int, packed: torch.Tensor) -> None:
    parts, elements = values.shape
    blocks = values.reshape(-1, _BLOCK).float()
    largest = blocks.abs().amax(1, keepdim=True)
    scales = largest.div_(_LARGEST[bits]).clamp_min_(_TINY).to(_SCALE)
    numbers = (blocks * scales.float().reciprocal_()).round_().to(torch.int8).view(parts, elements)
    if bits == 4:
        # Two to a byte: the first half of a part in the low bits, the second half in the high ones.
        low, high = numbers.view(torch.uint8).chunk(2, 1)
        numbers = (low & 15) | (high << 4)
    end = elements * bits // 8
    packed[:, :end] = numbers.view(torch.uint8)
    packed[:, end:] = scales.view(parts, -1).view(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int, values: torch.Tensor) -> None:
    parts, elements = values.shape
    end = elements * bits // 8
    scales = packed[:, end:].contiguous().view(_SCALE).view(-1, 1)
    numbers = packed[:, :end].view(torch.int8)
    if bits == 4:
        # Shifts of signed numbers keep the sign.
        numbers = torch.cat([numbers << 4 >> 4, numbers >> 4], 1)
    exact = values.dtype in (torch.float32, torch.float64)
    rounded = values if exact else torch.empty_like(values, dtype=torch.float32)
    rounded.copy_(numbers)
    # In fp32, since a whole number times a scale has more digits than half precision has.
    rounded.view(-1, _BLOCK).mul_(scales)
    if not exact:
        values.copy_(rounded)


class RoundedGather:
    """An all-gather under way that fills ``full`` [W * n] with the rounded ``shard`` [n] of every rank, this rank's
    too: all ranks get the same values."""

    def __init__(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, bits: int) -> None:
        self._full, self._bits = full, bits
        # Both live as long as the gather may read and fill them.
        self._own = shard.new_empty(1, packed_bytes(shard.numel(), bits), dtype=torch.uint8)
        pack(shard.view(1, -1), bits, self._own)
        self._packed = in_pool(full.device, partial(self._own.new_empty, group.size(), self._own.numel()))
        self._work = start_all_gather(self._packed.view(-1), self._own.view(-1), group)

    def wait(self) -> None:
        """Fills ``full``, in the device's current stream. Called again, perhaps in another stream, it does so again."""
        self._work.wait()
        unpack(self._packed, self._bits, self._full.view(len(self._packed), -1))


def start_rounded_sum(full: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, bits: int) -> Finish:
    """Launches the sum over the group of ``full`` [W * n], rounded once on every rank. The result is this rank's part
    [n] in ``dtype``, which adds the ranks' parts in their order. ``full`` may be freed at once."""
    ranks = group.size()
    elements = full.numel() // ranks
    make = partial(full.new_empty, ranks, packed_bytes(elements, bits), dtype=torch.uint8)
    sent, received = in_pool(full.device, make), in_pool(full.device, make)
    pack(full.view(ranks, elements), bits, sent)
    work = start_all_to_all(received, sent, group)

    def finish() -> torch.Tensor:
        work.wait()
        total = torch.empty(1, elements, dtype=dtype, device=received.device)
        unpack(received[:1], bits, total)
        part = torch.empty_like(total) if ranks > 1 else total
        for other in received[1:].split(1):
            unpack(other, bits, part)
            total.add_(part)
        # Threads of gloo may keep both a little longer.
        for tensor in (sent, received):
            tensor.untyped_storage().resize_(0)
        return total.view(-1)

    return finish


def is_packed(parameter: Parameter) -> bool:
    """Whether the elements of ``parameter`` are bytes that no cast must change, whatever dtype they are stored in."""
    stored_as_numbers = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    return not stored_as_numbers or getattr(parameter, "quant_state", None) is not None


def own_constants(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the constants of the quantised parameters of ``part`` alone, by the names that bitsandbytes saves them
    under. They are the tensors that the layer computes with, so that they can be written to, but ``quant_state.*``: a
    copy of what has no tensor, which says how the bytes are packed."""
    for key, parameter in part._parameters.items():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            found = {"absmax": state.absmax, "quant_map": state.code, "nested_offset": state.offset}
            if state.state2 is not None:
                found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
            yield from ((f"{key}.{name}", tensor) for name, tensor in found.items() if tensor is not None)
    scales = _scales(part)
    if scales is not None:
        yield "SCB", scales


def constants(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what :func:`own_constants` yields of all parts of ``layer``."""
    for path, part in layer.named_modules():
        for name, tensor in own_constants(part):
            yield f"{path}.{name}".removeprefix("."), tensor


def way_of_packing(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields, as bitsandbytes saves it, what beside constants says how the bytes of ``part`` are packed. It leaves out
    a constant that is yielded already, whose text would have another length for other weights."""
    for key, parameter in part._parameters.items():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            for name, tensor in state.as_dict(packed=True).items():
                if name.startswith("quant_state."):
                    described = json.loads(bytes(tensor.tolist()))
                    described.pop("nested_offset", None)
                    yield f"{key}.{name}", torch.tensor([*json.dumps(described).encode()], dtype=torch.uint8)


def free_constants(part: Any) -> None:
    """Frees the constants of ``part`` that grow with its weights, and lets go of these."""
    if _scales(part) is not None:
        part.state.CB = None
    for name, tensor in own_constants(part):
        if name.endswith(("absmax", "SCB")):
            tensor.data = tensor.data.new_empty(0)


def as_stored(model: nn.Module) -> None:
    """Brings the quantised weights of ``model`` into the form in which they are saved, which every rank and every mode
    of the model shares.

    For evaluations on a CPU with AVX512-BF16, a 4 bit layer packs its bytes in another way, for good, and computes in
    bf16. From now on it does not. The first forward of an 8 bit layer moves its constants; they move here.

    Raises ValueError for a layer of bitsandbytes that is not quantised yet.
    """
    part: Any
    for path, part in model.named_modules():
        for key, parameter in part._parameters.items():
            waits = getattr(parameter, "bnb_quantized", True) is False
            if waits or (hasattr(parameter, "has_fp16_weights") and parameter.dtype != torch.int8):
                raise ValueError(
                    f"parameter {path}.{key} is a {type(parameter).__name__} that bitsandbytes has not quantised; move "
                    "the model to its device before deepspeed.initialize, with has_fp16_weights=False for 8 bits"
                )
            if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
                part.state_dict()
        if hasattr(part, "support_avx512bf16_for_cpu"):
            part.support_avx512bf16_for_cpu = False
        if _scales(part) is not None and part.weight.CB is not None:
            # As its first forward would do.
            part.init_8bit_state()


def _scales(part: Any) -> Tensor | None:
    """Returns the scales of an 8 bit layer; None for other modules."""
    # TorchScript's container of parameters has no get.
    parameter: Any = part._parameters["weight"] if "weight" in part._parameters else None
    if not hasattr(parameter, "SCB") or not hasattr(getattr(part, "state", None), "SCB"):
        return None
    return parameter.SCB if parameter.SCB is not None else part.state.SCB


def compute_with_parameters(model: nn.Module) -> None:
    """Lets the 8 bit layers of ``model`` compute with the memory that their parameters have now."""
    part: Any
    for part in model.modules():
        if _scales(part) is not None:
            part.state.CB = part.weight.data


class PackedPlaces:
    """Where the packed parameters of a model are."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{path}.{key}".removeprefix("."), part._parameters, key, parameter)
            for path, part in model.named_modules()
            for key, parameter in part._parameters.items()
            if parameter is not None and is_packed(parameter)
        ]

    def refuse_others(self) -> None:
        """Raises ValueError if a layer has another parameter now."""
        for name, parameters, key, parameter in self._places:
            if parameters[key] is not parameter:
                raise ValueError(
                    f"parameter {name} was replaced since the engine was built, as merging an adapter into quantised "
                    "weights does; merge after training, or into a model that is loaded from the saved adapter"
                )
