"""Megatron-LM's training loop with the programs of ds_lgamp."""
