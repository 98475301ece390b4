"""Megatron-core's layers for DeepSpeed's PipelineModule."""
