"""Layered gradient accumulation and modular pipeline parallelism for DeepSpeed and Megatron-core."""

__version__ = "0.1.0"


def install() -> None:
    """From now on ``deepspeed.initialize`` heeds the ``ds_lgamp`` block of the configuration."""
    from ds_lgamp.integrations.deepspeed.install import install

    install()


def uninstall() -> None:
    """Undoes :func:`install`: no attribute of deepspeed differs afterwards."""
    from ds_lgamp.integrations.deepspeed.install import uninstall

    uninstall()
