"""Megatron-core layers for pipelines."""
