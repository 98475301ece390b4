"""Megatron-core: its layers under DeepSpeed, and Megatron-LM's own training loop."""
