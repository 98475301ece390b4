"""Runs Megatron-core and Megatron-LM's scripts on the CPU and gloo, for tests. ``torch.cuda`` stands for the
CPU.

Call ``install()`` before the first import of megatron. As a program, the module installs the shim and then runs the
following words like ``python``::

    torchrun --standalone --nproc_per_node 2 -m testing.cpu_shim /path/to/pretrain_gpt.py FLAGS
    torchrun --standalone --nproc_per_node 2 -m testing.cpu_shim -m ds_lgamp run /path/to/pretrain_gpt.py FLAGS
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def install(everywhere: bool = True) -> None:
    """Lets megatron run in this process. Only the calling thread may then ask for tensors on "cuda".

    Args:
        everywhere: whether the thread may do so from now on. Otherwise only within ``ToCpu()``, because the redirection
            slows down every torch call.
    """
    # Megatron refuses tensor parallelism without the first variable. The second prevents compilation of its fused
    # functions.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_for_the_device()
    run_streams_in_order()
    _share_random_state()
    _keep_sent_tensors()
    _average_as_sums()
    split_by_lists()
    _move_unequal_parts()
    _spawn_without_the_script()
    if everywhere:
        ToCpu().__enter__()
    sys.meta_path.insert(0, _NothingToCompile())


class ToCpu(TorchFunctionMode):
    """Redirects to the CPU what code requests on "cuda" or on a device number."""

    def __torch_function__(
        self, function: Callable, types: Sequence[type], arguments: tuple = (), keywords: dict | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if _is_cuda(keywords.get("device")):
            keywords["device"] = "cpu"
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return arguments[0]
        if function is torch.Tensor.to:
            arguments = tuple("cpu" if _is_cuda(argument) else argument for argument in arguments)
        if function is torch.Tensor.type and len(arguments) == 1:
            # Optimizers and gradient clipping accept only types of "torch.cuda".
            return function(*arguments).replace("torch.", "torch.cuda.")
        return function(*arguments, **keywords)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _answer_for_the_device() -> None:
    """Fakes a device. Megatron checks for it, selects it, queries its memory and empties its caches."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
    cuda.current_device = lambda: "cpu"
    cuda.set_device = lambda device: None
    cuda.synchronize = cuda.empty_cache = lambda *arguments: None
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *arguments: 0
    cuda.memory_reserved = cuda.max_memory_reserved = lambda *arguments: 0
    cuda.LongTensor = torch.LongTensor
    cuda.get_device_properties = lambda *arguments: SimpleNamespace(total_memory=0, major=0)


class Stream:
    """A stream or an event that does nothing, because the CPU has always finished when it is asked."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def _nothing(self, *arguments: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, *arguments: Any) -> "Stream":
        return Stream()

    def query(self) -> bool:
        return True


def run_streams_in_order() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *arguments: Stream()
    cuda.stream = lambda stream: nullcontext()
    # Builds with CUDA would ask a driver, through either of these.
    cuda.is_current_stream_capturing = lambda: False
    torch.accelerator.current_stream = lambda *arguments: SimpleNamespace(is_capturing=lambda: False)


def _share_random_state() -> None:
    """Makes all devices share the CPU's random state."""
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.default_generators = {cuda.current_device(): torch.default_generator}
    cuda._lazy_call = lambda call, **keywords: call()


def _keep_sent_tensors() -> None:
    """Keeps the storage of sent tensors.

    Megatron's schedules free an output when its send has begun. This is correct on a GPU's stream, but gloo reads the
    output later. A separate tensor keeps the storage.
    """
    send = dist.isend

    def isend(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return send(tensor.detach(), *arguments, **keywords)

    dist.isend = dist.distributed_c10d.isend = isend


def _average_as_sums() -> None:
    """Replaces averages by sums, because gloo has only sums."""
    for name, reduced in (("all_reduce", 0), ("reduce_scatter_tensor", 1)):
        setattr(dist, name, _summing(getattr(dist, name), reduced))


def _summing(collective: Callable[..., Any], reduced: int) -> Callable[..., Any]:
    """Wraps ``collective``. A requested average divides argument number ``reduced`` first and then sums."""

    @wraps(collective)
    def summing(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("op") == dist.ReduceOp.AVG:
            arguments[reduced].div_(dist.get_world_size(keywords.get("group")))
            keywords["op"] = dist.ReduceOp.SUM
        return collective(*arguments, **keywords)

    return summing


def split_by_lists() -> None:
    """Lets tensors say how an all-to-all splits. Megatron moves them to the host as arrays, but only from a GPU."""
    exchange = dist.all_to_all_single

    def all_to_all_single(*arguments: Any, **keywords: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(keywords.get(name), torch.Tensor):
                keywords[name] = keywords[name].tolist()
        return exchange(*arguments, **keywords)

    dist.all_to_all_single = all_to_all_single


def _move_unequal_parts() -> None:
    """Lets ranks gather and reduce parts of unequal length, such as the tokens of experts, which gloo does not know."""
    gather = dist.all_gather

    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, **keywords: Any) -> Any:
        longest = max(map(len, tensors))
        if longest == min(map(len, tensors)):
            return gather(tensors, tensor, **keywords)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in tensors]
        gather(found, padded, **keywords)
        for part, whole in zip(tensors, found):
            part.copy_(whole[: len(part)])

    def reduce_scatter(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(tensors)
        dist.all_reduce(whole, group=group)
        output.copy_(whole.split([*map(len, tensors)])[dist.get_rank(group)])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _spawn_without_the_script() -> None:
    """Keeps spawned processes from importing the script again, which would run without the shim. Processes that write
    checkpoints do not need the script."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = get_preparation_data


class _NothingToCompile(importlib.abc.MetaPathFinder):
    """Prevents compilation at import.

    Megatron-LM's tree compiles an index builder, which the installed package has in compiled form. It also asks nvcc
    for its version and imports Triton kernels.
    """

    index_builder = "megatron.core.datasets.helpers_cpp"
    compilers = {
        "megatron.core.datasets.utils": "compile_helpers",
        "megatron.legacy.fused_kernels": "load",
        # pretrain_bert.py imports it and calls it only for Transformer Engine.
        "megatron.core.models.bert.bert_layer_specs": "bert_layer_with_transformer_engine_spec",
    }
    # Modules that ask for a name whether or not Transformer Engine has brought it.
    names = {"megatron.core.transformer.moe.moe_utils": "te_general_gemm"}
    kernels = {
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron.core.inference.contexts.fused_kv_append_kernel",
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        find = importlib.machinery.PathFinder.find_spec
        if name == self.index_builder:
            return find(name, [str(Path(folder, *name.split(".")[:-1])) for folder in sys.path])
        if name in self.kernels:
            return importlib.machinery.ModuleSpec(name, _Absent())
        if name not in self.compilers | self.names:
            return None
        spec = find(name, path)
        if spec is not None and name in self.compilers:
            spec.loader = _With(spec.loader, self.compilers[name], lambda *arguments: None)
        elif spec is not None:
            spec.loader = _With(spec.loader, self.names[name], None)
        return spec


class _Absent(importlib.abc.Loader):
    """Loads a module whose functions can be imported but not called."""

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: None


class _With(importlib.abc.Loader):
    """Loads a module and gives one of its names a value."""

    def __init__(self, loader: Any, name: str, value: Any) -> None:
        self.loader, self.name, self.value = loader, name, value

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        setattr(module, self.name, self.value)


def main(words: list[str]) -> None:
    """Runs ``[-m] NAME ARGUMENTS...`` like ``python``."""
    # A launcher puts its own options first. They belong to the script.
    launcher_words = []
    while words[0].startswith("--local_rank"):
        launcher_words.append(words.pop(0))
    if words[0] == "-m":
        sys.argv = [words[1], *launcher_words, *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [words[0], *launcher_words, *words[1:]]
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    install()
    main(sys.argv[1:])
