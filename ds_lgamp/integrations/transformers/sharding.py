"""What transformers says of the weights while layers compute."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ds_lgamp.integrations.replacing import replace_attribute


@contextmanager
def whole_to_layers() -> Iterator[None]:
    """Inside the block, transformers' ``is_deepspeed_zero3_enabled`` says no: layers get whole weights.

    Code that hears yes, such as the fused heads of trl, asks a weight for the attributes of a ZeRO-3 parameter. In a
    backward pass that is a tensor without them, which autograd makes of a parameter that it saved through hooks.
    """
    with ExitStack() as undo:
        module = sys.modules.get("transformers.integrations.deepspeed")
        if module is not None:
            # What the function reads, which others have imported by name.
            replace_attribute(module, "_hf_deepspeed_config_weak_ref", None, undo)
        yield
