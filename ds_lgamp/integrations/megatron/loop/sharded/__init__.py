"""ZeRO stages 2 and 3 inside Megatron-LM's training loop: ds_lgamp's partition under Megatron-core's interfaces."""
