"""Quantised weights: parameters that hold packed bytes, and the constants with which layers make numbers of them.

bitsandbytes keeps the constants beside the tensors that torch knows of: in ``Params4bit.quant_state``, in
``Int8Params.SCB`` and, from the first forward on, in ``Linear8bitLt.state``. So the bytes are cut into parts and
gathered as those of every frozen unit, and each rank of a layer has its constants whole. Nothing here imports
bitsandbytes: its classes are told by these attributes.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


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
    parameter: Any = part._parameters.get("weight")
    state: Any = getattr(part, "state", None)
    if not hasattr(parameter, "SCB") or not hasattr(state, "SCB"):
        return None
    return parameter.SCB if parameter.SCB is not None else state.SCB


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
