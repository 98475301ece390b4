"""A DeepSpeed script that ends once its ranks are connected."""

import sys

if "--install" in sys.argv:
    import ds_lgamp

    ds_lgamp.install()

import deepspeed  # noqa: E402 as a user would, after install

deepspeed.init_distributed("gloo", verbose=False)
print("INITIALISED", flush=True)
