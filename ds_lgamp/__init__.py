"""Layered gradient accumulation and modular pipeline parallelism for DeepSpeed and Megatron-core."""

from contextlib import AbstractContextManager

from ds_lgamp.version import __version__ as __version__


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block of the configuration.

    An import of torch does the same, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0.

    Once it got a block, and if there are several ranks, an error that the script does not catch ends its rank at once,
    with the traceback, so that the launcher ends the job. A rank that dies ends the others.

    Raises ConfigError if the installed DeepSpeed lacks something that the integration builds on.
    """
    from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import check_seams

    check_seams()
    # This import fails with a DeepSpeed that check_seams refuses.
    from ds_lgamp.integrations.deepspeed.hook.initialize import install

    install()


def uninstall() -> None:
    """Undoes :func:`install`. Afterwards every attribute of deepspeed is stock's, errors end the script as before, and
    a block is ignored."""
    from ds_lgamp.integrations.deepspeed.hook.initialize import uninstall

    uninstall()


def deferred_init() -> AbstractContextManager[None]:
    """Inside this context, a ``PipelineModule`` takes no memory for the layers that its LayerSpecs describe.

    Later, ``deepspeed.initialize`` builds on each rank the layers that the rank keeps, one chunk at a time. Each chunk
    is sharded and freed before the next is built, so at ZeRO stage 3 a model may be larger than the memory of any rank.
    With ``seed_layers=True`` the weights equal those of an ordinary construction. Otherwise every layer has its own
    seed, counted from a number that torch's generator draws, and the weights depend neither on ranks nor on placement.

    Layers that are given as modules are built as usual, and so are layers whose LayerSpec passes modules or tensors to
    them. Before ``deepspeed.initialize``, parameters can be frozen and put into optimizers, but they have no values,
    and writing to them raises ConfigError. Calls :func:`install`, and raises what it raises.
    """
    install()
    from ds_lgamp.integrations.deepspeed.model.construction import deferred_init

    return deferred_init()
