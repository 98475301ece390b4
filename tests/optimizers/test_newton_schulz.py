"""The Newton-Schulz iterations: rounded as torch's and DeepSpeed's, from the smallest input that is exact."""

import pytest
import torch

from ds_lgamp.optimizers.muon import METHODS, NewtonSchulz

SHAPES = [(16, 40), (40, 16), (24, 24), (1, 8)]


def matrix(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_standard_method_is_torchs_to_the_bit(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    own = NewtonSchulz()(matrix(shape))
    assert torch.equal(own, _zeropower_via_newtonschulz(matrix(shape), NewtonSchulz().coefficients, 5, 1e-7))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gram_method_is_deepspeeds(shape):
    from deepspeed.runtime.zero.muon import original_muon

    deepspeeds = original_muon.zeropower_via_gram_newtonschulz
    expected = getattr(deepspeeds, "_torchdynamo_orig_callable", deepspeeds)(matrix(shape), 5).float()
    torch.testing.assert_close(NewtonSchulz("gram")(matrix(shape)).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_become_about_one(method, shape):
    values = torch.linalg.svdvals(NewtonSchulz(method)(matrix(shape)).float())
    assert 0.6 < values.min() and values.max() < 1.3


@pytest.mark.parametrize("method", METHODS)
def test_the_type_that_travels_loses_nothing(method):
    iteration = NewtonSchulz(method)
    for shape in SHAPES:
        sent = matrix(shape).to(iteration.input_dtype)
        result = iteration(sent)
        assert torch.equal(result, iteration(matrix(shape)))
        assert result.dtype == iteration.output_dtype(sent.device)


def test_zero_stays_zero():
    for method in METHODS:
        assert not NewtonSchulz(method)(torch.zeros(4, 6)).any()
