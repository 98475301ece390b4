"""What torch calls at the end of its own import, in every process of an environment that has ds_lgamp: the entry point
of the group ``torch.backends``. From then on a block is heeded, whoever starts the process.

This module imports nothing but the standard library. A finder waits for the imports of the hosts; where none comes,
nothing else happens. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch from calling this.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "DS_LGAMP_BLOCK"
"""The variable of the environment that holds a block as JSON, or names a file with one, for scripts that make their
configuration themselves."""
CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""The variable in which ``accelerate launch`` names the file of DeepSpeed's configuration."""
_HOSTS = {
    "deepspeed.runtime.engine": "ds_lgamp.integrations.deepspeed.hook.notice",
    "deepspeed.runtime.pipe.module": "ds_lgamp.integrations.deepspeed.hook.notice",
    "accelerate.state": "ds_lgamp.integrations.deepspeed.hook.notice",
    "megatron.training.training": "ds_lgamp.integrations.megatron.loop.run_script",
}
"""Modules of the hosts, each with the module of ds_lgamp whose ``imported`` is called with it once it is imported."""


def wait_for_hosts() -> None:
    """From now on ``deepspeed.initialize`` and Megatron-LM's training loop look for a block."""
    watch_imports()
    if os.environ.get(VARIABLE) or os.environ.get(CONFIG_FILE):
        import_module("ds_lgamp.integrations.deepspeed.hook.notice").expect_an_engine()
    for name in _HOSTS:
        if name in sys.modules:
            _imported(sys.modules[name])


def watch_imports() -> None:
    """From now on hosts look for a block once they are imported."""
    if not waits():
        sys.meta_path.insert(0, _Finder())


def waits() -> bool:
    """Whether this process waits for hosts."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def wait_for_no_host() -> None:
    """From now on imports of hosts are nothing to wait for, because the caller installs a block itself."""
    sys.meta_path[:] = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))


def _imported(module: ModuleType) -> None:
    import_module(_HOSTS[module.__name__]).imported(module)


class _Finder(MetaPathFinder):
    """Finds modules of the hosts where others find them, and has them loaded with a call at the end."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _HOSTS:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _imported)
        return spec


class _Loader(Loader):
    """Loads as ``stock`` does, and then calls ``after`` with the module, which keeps ``stock`` as its loader."""

    def __init__(self, stock: Loader, after: Callable[[ModuleType], None]) -> None:
        self._stock, self._after = stock, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._stock.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "module is being imported"
        module.__spec__.loader = module.__loader__ = self._stock
        self._stock.exec_module(module)
        self._after(module)
