"""What transformers says about weights while layers compute."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ds_lgamp.integrations.hosts import replace_attribute


@contextmanager
def whole_to_layers() -> Iterator[None]:
    """Inside the block, transformers' ``is_deepspeed_zero3_enabled`` returns False, because layers get whole weights.

    If it returned True, code such as the fused heads of trl would read the attributes of a ZeRO-3 parameter from a
    weight. In a backward pass the weight is a tensor without them, which autograd makes of a parameter that it saved
    through hooks.
    """
    with ExitStack() as undo:
        module = sys.modules.get("transformers.integrations.deepspeed")
        if module is not None:
            # What the function reads, which others have imported by name.
            replace_attribute(module, "_hf_deepspeed_config_weak_ref", None, undo)
        yield
