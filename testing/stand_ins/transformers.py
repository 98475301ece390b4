"""Megatron-DeepSpeed imports this name, and uses it for a tokenizer that no run here asks for."""

AutoTokenizer = None
