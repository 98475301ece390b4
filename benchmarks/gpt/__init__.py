"""GPTs made of Megatron-core's layers on one device, and ways to train them."""
