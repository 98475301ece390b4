"""Layered gradient accumulation and modular pipeline parallelism for DeepSpeed and Megatron-core."""

from contextlib import AbstractContextManager

from ds_lgamp.version import __version__ as __version__


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block of the configuration.

    Once there are several ranks, an error that the script does not catch ends this one at once, with its traceback, so
    that the launcher ends the job.

    Raises ConfigError if the installed DeepSpeed lacks what the integration builds on.
    """
    from ds_lgamp.integrations.deepspeed.hook.seams import check_seams

    check_seams()
    # Only now: of another DeepSpeed, imports fail.
    from ds_lgamp.integrations.deepspeed.hook.install import install

    install()


def uninstall() -> None:
    """Undoes :func:`install`: no attribute of deepspeed differs afterwards, and errors end the script as ever."""
    from ds_lgamp.integrations.deepspeed.hook.install import uninstall

    uninstall()


def deferred_init() -> AbstractContextManager[None]:
    """Inside this context a ``PipelineModule`` is constructed without memory for the layers its LayerSpecs describe.

    ``deepspeed.initialize`` builds them: on each rank those it keeps, a chunk at a time, which is sharded and freed
    before the next. At ZeRO stage 3 a model may thus be larger than any rank. With ``seed_layers=True`` the weights
    equal those of an ordinary construction; otherwise every layer has a seed of its own, counted from a number drawn
    from torch's generator, and the weights depend neither on the ranks nor on the placement.

    Layers given as modules are kept as they are, and so are those whose LayerSpec passes modules or tensors on to them.
    Before ``deepspeed.initialize``, parameters can be frozen and put into optimizers, but have no values: writing to
    them raises ConfigError. Does what :func:`install` does, and raises what it raises.
    """
    install()
    from ds_lgamp.integrations.deepspeed.model.deferred_init import deferred_init

    return deferred_init()
