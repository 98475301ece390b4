"""In a training step the host does not wait for the device, unless the optimizer cannot skip a step by itself.

Nothing waits on the CPU, so the tests count the operations that would wait on an accelerator.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lgamp.integrations.deepspeed.engine import data as loading
from ds_lgamp.integrations.deepspeed.engine.data import to_device
from testing.deepspeed_rank import prepare_rank
from testing.imagined_gpu import accelerator as imagined_gpu
from testing.imagined_gpu import border
from testing.imagined_gpu.accelerator import BACKEND
from testing.imagined_gpu.device import AVAILABLE, DEVICE
from testing.ranks import run_on_ranks
from tests.integrations.deepspeed.linear import batches, build, engine_of, linears

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
"""Operations whose result, or its shape, the host needs. ``item``, ``bool`` and ``float`` use the first one."""
COPIES = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
"""Functions that copy to the host. The dispatcher does not see them for tensors that are on the host already."""


class Reads(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        # Excludes bytes: these are states of the host's generators, which recomputation compares.
        if name in READS and args[0].dtype != torch.uint8:
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        blocking = function is torch.Tensor.to and not (kwargs or {}).get("non_blocking")
        if function in COPIES or (blocking and any(isinstance(argument, torch.device) for argument in args)):
            self.calls[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def to_meta(tensor):
    return tensor.to(torch.device("meta"))


BF16 = {"bf16": {"enabled": True}}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
OVERLAP = {"ds_lgamp": {"overlap_update": True}}
CASES = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "clipping": (3, {"gradient_clipping": 0.1}),
    "bf16": (3, UNCHECKED),
    "overflow": (3, BF16),
    "overflow, SGD": (3, BF16, torch.optim.SGD),
    "overflow, on the host": (3, {**BF16, "zero_optimization": {"stage": 3, **ON_HOST}}),
    "overlapped": (3, {**UNCHECKED, **OVERLAP}),
    "overlapped, clipping": (2, {**UNCHECKED, **OVERLAP, "gradient_clipping": 0.1}),
    "overlapped, overflow": (3, {**BF16, **OVERLAP}),
    "reported": (3, {**UNCHECKED, "ds_lgamp": {"nonfinite": "report"}}, torch.optim.SGD),
    "aborted": (1, {"ds_lgamp": {"nonfinite": "abort"}}, torch.optim.SGD),
    "skipped": (2, {"ds_lgamp": {"nonfinite": "skip"}}),
    "skipped, SGD": (2, {"ds_lgamp": {"nonfinite": "skip"}}, torch.optim.SGD),
}
"""ZeRO stage, further settings and optimizer."""


def calls_in_cases():
    prepare_rank()
    # Removes the agreement that every rank has data. It runs between hosts, before the batch.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "largest", lambda *numbers: list(numbers))
        return {name: calls_in_a_batch(*case) for name, case in CASES.items()}


def calls_in_a_batch(stage, settings, optimizer=torch.optim.AdamW):
    """Returns the calls of the third step. By then the engine knows shapes and which buffers change."""
    module = build(linears(4))
    engine = engine_of(module, {}, stage, optimizer(module.parameters(), lr=0.1, fused=True), **settings)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    calls = Counter()
    for step in range(3):
        data = iter([(inputs.to(dtype), labels) for inputs, labels in batches(2, start=step)])
        with Reads(calls) if step == 2 else nullcontext(), Copies(calls) if step == 2 else nullcontext():
            engine.train_batch(data)
    return dict(calls)


@pytest.fixture(scope="module")
def calls():
    return run_on_ranks(4, calls_in_cases)


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_device_only_where_the_host_decides_to_skip_it(calls, name):
    expected = {"_local_scalar_dense": 1} if name in ("overflow, SGD", "skipped, SGD") else {}
    assert [rank[name] for rank in calls] == [expected] * 4


def moved_to_an_imagined_gpu():
    """Moves tensors of a script in page-locked and in other memory. Returns whether a copy to the device reads them."""
    read = []

    def noted(source, *arguments):
        read.extend(source is each for each in given)
        check_move(source, *arguments)

    check_move = border._check_move
    with border.imagine(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(border, "_check_move", noted)
        given = [border.pinned(torch.ones(2)), torch.ones(4)[::2]]
        with DEVICE.step():
            moved = to_device(given, torch.device("gpu:0"))
    return [str(each.device) for each in moved], read


@pytest.mark.skipif(not AVAILABLE, reason="this torch has no devices that Python describes")
def test_a_micro_batch_moves_while_the_host_goes_on_and_the_script_uses_its_tensors_again():
    (found,) = run_on_ranks(1, moved_to_an_imagined_gpu, before_init=imagined_gpu.prepare_rank, backend=BACKEND)
    assert found == (["gpu:0"] * 2, [False] * 4)


@pytest.mark.parametrize(
    "call",
    [torch.Tensor.item, bool, float, int, torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.nonzero, to_meta],
)
def test_what_would_wait_is_counted(call):
    calls = Counter()
    with Reads(calls), Copies(calls):
        call(torch.ones(()))
    assert calls.total() == 1
