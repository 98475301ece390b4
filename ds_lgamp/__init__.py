"""Layered gradient accumulation and modular pipeline parallelism for DeepSpeed and Megatron-core."""

__version__ = "0.1.0"


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block of the configuration.

    Raises ConfigError if the installed DeepSpeed lacks what the integration builds on.
    """
    from ds_lgamp.integrations.deepspeed.seams import check_seams

    check_seams()
    # Only now: of another DeepSpeed, imports fail.
    from ds_lgamp.integrations.deepspeed.install import install

    install()


def uninstall() -> None:
    """Undoes :func:`install`: no attribute of deepspeed differs afterwards."""
    from ds_lgamp.integrations.deepspeed.install import uninstall

    uninstall()
