"""Layers get tensors with the same memory layout, whatever produced them."""

import torch

from ds_lgamp.runtime.messages import laid_out
from ds_lgamp.runtime.recompute import hashed_seed


def plain(tensor):
    return tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def test_views_are_copied_and_what_is_plain_stays_itself():
    whole = torch.randn(4, 5)
    turned, shifted, same, other = laid_out((whole.T, whole[1:], whole, "text"))
    assert plain(turned) and plain(shifted) and not plain(whole.T) and not plain(whole[1:])
    assert torch.equal(turned, whole.T) and torch.equal(shifted, whole[1:])
    assert same is whole and other == "text"


def test_gradients_become_contiguous_and_aligned():
    leaf, arrived = torch.randn(4, 5, requires_grad=True), []
    made = leaf * 1
    made.grad_fn.register_prehook(lambda gradients: arrived.extend(gradients))
    handed_over = laid_out(made)
    (torch.cat([torch.zeros(1, 4), handed_over.T])[1:] * torch.randn(5, 4)).sum().backward()
    (gradient,) = arrived
    assert plain(gradient)


def test_a_leaf_keeps_no_hook():
    leaf = torch.randn(3, requires_grad=True)
    for _ in range(2):
        laid_out(leaf).sum().backward()
    assert not leaf._backward_hooks and torch.equal(leaf.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        assert torch.equal(laid_out(leaf), leaf)


def test_layers_may_work_in_place():
    leaf = torch.randn(4, requires_grad=True)
    laid_out(laid_out(leaf * 2).relu_()).sum().backward()
    assert torch.equal(leaf.grad, torch.where(leaf > 0, 2.0, 0.0))


def test_seeds_differ_where_a_word_does():
    words = [(1, 23), (12, 3), (1, 2, 3), (3, 2, 1), ("1", 23), (1, 24)]
    seeds = {hashed_seed(*each) for each in words}
    assert len({seed % 2**32 for seed in seeds}) == len(words) and all(0 <= seed < 2**64 for seed in seeds)
    assert hashed_seed(1, 23) == hashed_seed(1, 23)
