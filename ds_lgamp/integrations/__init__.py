"""The hosts: DeepSpeed and Megatron; here, what both integrations share."""
