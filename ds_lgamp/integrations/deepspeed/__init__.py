"""The DeepSpeed integration: instructions, module, engine and optimizer behind unchanged ``deepspeed.initialize``."""
