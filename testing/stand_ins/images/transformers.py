"""Defines the name that Megatron-DeepSpeed imports for a tokenizer that no run here uses."""

AutoTokenizer = None
