"""The virtual tokens of peft's prompt tuning, which peft computes from their parameters while it saves them."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

_ENCODER = "prompt_encoder"


@contextmanager
def prompts_from(state: Mapping[str, Any], model: nn.Module) -> Iterator[None]:
    """Inside the block, the prompt encoder of ``model`` computes with its parameters in ``state``, which is that of the
    whole model: its own may have no elements on this rank. Does nothing for a model without one."""
    encoder = getattr(model, _ENCODER, None)
    with ExitStack() as undo:
        for path, part in encoder.named_modules(prefix=_ENCODER) if isinstance(encoder, nn.Module) else ():
            own = dict(part._parameters)
            undo.callback(part._parameters.update, own)
            values = {name: state[f"{path}.{name}"] for name in own if f"{path}.{name}" in state}
            part._parameters.update({name: nn.Parameter(value, False) for name, value in values.items()})
        yield
