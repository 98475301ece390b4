"""Shards parameters, gradients and master weights over the data-parallel ranks, in flat units of one chunk each."""
