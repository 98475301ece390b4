"""Parameters whose values are not current. Operations that depend on values settle them first, others do not."""

import copy
import io

import pytest
import torch
from torch import nn

from ds_lgamp.partition.guard import NotGatheredError, guarded
from ds_lgamp.runtime.measure import PeakMemory

SHAPE = (2, 3)


class Values:
    """A parameter whose values arrive when it is settled. They are ones."""

    def __init__(self, kind=nn.Parameter):
        self.parameter = kind(torch.zeros(SHAPE))
        self.kind, self.settled, self.asked = kind, 0, []
        self.parameter.__class__ = guarded(kind, self.settle)

    def settle(self, parameter):
        self.asked.append(parameter)
        if parameter is not None and parameter is not self.parameter:
            # Raises instead of asserting, because pytest would print the parameter and so settle it again.
            raise LookupError("settled for a parameter of another unit")
        self.settled += 1
        self.parameter.__class__ = self.kind
        self.parameter.data.fill_(1.0)


class Absent(Values):
    """A parameter whose values cannot arrive."""

    def settle(self, parameter):
        raise NotGatheredError("not here")


def saved(value):
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def compiled_sum(parameter):
    return torch.compile(lambda tensor: tensor.sum(), backend="eager")(parameter)


READS = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "item": lambda p: p[0, 0].item(),
    "list": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "iteration": lambda p: [*p],
    "an operator": lambda p: p + 0,
    "a function": lambda p: nn.functional.linear(torch.eye(3), p).T,
    "among others": lambda p: torch.stack([torch.zeros(SHAPE), p])[1],
    "a keyword": lambda p: torch.mul(torch.ones(SHAPE), other=p),
    "torch.ops": lambda p: torch.ops.aten.clone(p),
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(SHAPE),
    "lerp": lambda p: torch.zeros(SHAPE).lerp_(p, 1.0),
    "copy": lambda p: torch.zeros(SHAPE).copy_(p),
    "comparison": lambda p: p == 1,
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist()[3::4]) / 63,
    "address": lambda p: p.data_ptr(),
    "another type": lambda p: p.double(),
    "deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "pickle": saved,
    "nn.Parameter": nn.Parameter,
    "nn.Parameter without gradient": lambda p: nn.Parameter(p, requires_grad=False),
    "text": lambda p: repr(p),
    "formatted": lambda p: f"{p}",
    "compiled": compiled_sum,
}
WRITES = {
    "in place": lambda p: p.mul_(2),
    "an element": lambda p: p.__setitem__((0, 0), 5.0),
    "out": lambda p: torch.add(torch.ones(SHAPE), 1, out=p),
    "foreach in place": lambda p: torch._foreach_mul_([p], 3.0),
    "other data": lambda p: setattr(p, "data", torch.full(SHAPE, 7.0)),
}
METADATA = {
    "shape": lambda p: (p.shape, p.size(), p.dim(), p.ndim, p.numel(), torch.numel(p), len(p), p.stride()),
    "type": lambda p: (p.dtype, p.device, p.layout, p.is_floating_point(), p.element_size(), p.is_cpu, p.is_meta),
    "gradient": lambda p: (p.grad, p.requires_grad, p.is_leaf, p.grad_fn),
    "setting a gradient": lambda p: setattr(p, "grad", torch.ones(SHAPE)),
    "freezing": lambda p: p.requires_grad_(False),
    "hooks": lambda p: (p.register_hook(print), p.register_post_accumulate_grad_hook(print)),
    "identity": lambda p: (hash(p), id(p), {p: 1}[p], isinstance(p, nn.Parameter)),
    "attributes": lambda p: (setattr(p, "mark", 1), hasattr(p, "absent")),
    "an optimizer": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(),
    "a module": lambda p: linear(p).zero_grad(),
    "a conversion to the same": lambda p: linear(p).to("cpu").float().to(torch.float32).to(torch.ones(1)),
}


def linear(parameter):
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = parameter
    return layer


def as_tensor(value):
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        return torch.stack(value)
    return torch.as_tensor(value) if not isinstance(value, (str, int)) else torch.ones(SHAPE)


@pytest.mark.parametrize("read", READS)
def test_what_is_read_are_settled_values(read):
    values = Values()
    result = READS[read](values.parameter)
    assert values.settled == 1 and type(values.parameter) is nn.Parameter
    if isinstance(result, str):
        assert "1., 1., 1." in result
    elif read == "compiled":
        assert result == 6
    else:
        assert (as_tensor(result) == 1).all()
    kind = nn.Parameter if read.startswith(("nn.", "pickle", "deepcopy", "copy.")) else None
    assert kind is None or type(result) is kind


@pytest.mark.parametrize("read", ["clone", "among others", "a keyword", "foreach", "deepcopy", "text"])
def test_who_settles_is_told_which_parameter_is_read(read):
    """The error names the parameter."""
    values = Values()
    READS[read](values.parameter)
    assert len(values.asked) == 1 and values.asked[0] is values.parameter


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_written_to_settled_values(write):
    values, ordinary = Values(), nn.Parameter(torch.ones(SHAPE))
    with torch.no_grad():
        for parameter in (values.parameter, ordinary):
            WRITES[write](parameter)
    assert values.settled == 1 and torch.equal(values.parameter, ordinary)


@pytest.mark.parametrize("case", METADATA)
def test_what_has_no_values_waits_for_nothing(case):
    values = Absent()
    METADATA[case](values.parameter)
    assert type(values.parameter) is not nn.Parameter


def test_parameters_whose_values_cannot_come_are_counted_by_their_addresses():
    first, second = Absent().parameter, Absent().parameter
    assert len({first.data_ptr(), second.data_ptr(), first.data_ptr(), 0}) == 3


@pytest.mark.parametrize("case", [*(case for case in READS if case not in ("detach", "address")), *WRITES])
def test_values_that_cannot_come_are_refused(case):
    values = Absent()
    if case in ("text", "formatted"):
        assert READS[case](values.parameter) == "<not here>"
        return
    with pytest.raises(RuntimeError, match="not here"), torch.no_grad():
        {**READS, **WRITES}[case](values.parameter)


@pytest.mark.parametrize("case", [*READS, *WRITES])
def test_a_state_lists_parameters_whose_values_cannot_come_and_refuses_to_be_read(case):
    (weight,) = linear(Absent().parameter).state_dict().values()
    assert (weight.shape, weight.dtype, weight.requires_grad) == (SHAPE, torch.float32, False)
    if case in ("text", "formatted"):
        assert READS[case](weight) == "<not here>"
        return
    with pytest.raises(RuntimeError, match="not here"), torch.no_grad():
        {**READS, **WRITES}[case](weight)


def test_parameters_of_several_units_settle_each():
    first, second = Values(), Values()
    assert torch.equal(first.parameter + second.parameter, torch.full(SHAPE, 2.0))
    assert (first.settled, second.settled) == (1, 1)


def test_a_class_of_the_users_is_kept_and_asked():
    class Named(nn.Parameter):
        asked = []

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            cls.asked.append(function)
            return super().__torch_function__(function, types, arguments, options or {})

    values = Values(Named)
    assert isinstance(values.parameter, Named) and values.parameter.shape == SHAPE
    assert Named.asked == [torch.Tensor.shape.__get__]
    assert values.parameter.sum() == 6 and type(values.parameter) is Named


def test_measuring_memory_waits_for_no_values():
    values = Absent()
    with PeakMemory([values.parameter]) as memory:
        assert memory.live() == 2 * 3 * 4
    assert type(values.parameter) is not nn.Parameter
