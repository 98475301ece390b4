"""Flags of Megatron that are not refused, by how each is treated beside a ``ds_lgamp`` block: the rest of those that
decide how gradients are reduced and scaled, and how parameters are updated."""

HONOURED = """
    overlap_grad_reduce overlap_param_gather align_param_gather align_grad_reduce use_distributed_optimizer
    num_distributed_optimizer_instances check_for_large_grads context_parallel_size expert_model_parallel_size
    sequence_parallel pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm
    clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay log_num_zeros_in_grad fp16 bf16
    params_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
    overlap_param_gather_with_optimizer_step gradient_accumulation_fusion calculate_per_token_loss
    defer_embedding_wgrad_compute grad_norm_skip_threshold
""".split()
"""With these, losses and gradients equal those of Megatron-core's own schedules (``test_flags.py``)."""
HONOURED_ARGUMENTS = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "grad_reduce_in_bf16": "grad_reduce_in_fp32",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "ddp_bucket_size": "bucket_size",
    "ddp_num_buckets": "bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "param_name_patterns_for_fp32_local_accumulation",
    "use_tp_pp_dp_mapping": "order",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""The same for arguments of Megatron-LM with other names than Megatron-core's."""
OUTSIDE = """
    cp_comm_type distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init local_rank
    model_parallel_size scatter_gather_tensors_in_pipeline overlap_p2p_comm wgrad_deferral_limit barrier_with_L1_time
    timers config_logger_dir no_weight_decay_cond_type lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples
    lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init warmup
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay
    weight_decay_incr_style attention_softmax_in_fp32 fp16_lm_cross_entropy enable_experimental spec
    hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern hybrid_layer_pattern num_buckets
    use_gloo_process_groups disable_jit_fuser mamba_training_ssm_states_dtype flight_recorder_dump_path
    flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
    flight_recorder_include_only_active flight_recorder_extra_dump_on_exec
""".split()
"""These act before or after a batch, where ds_lgamp does nothing."""
UNREAD = """
    data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer gradient_reduce_div_fusion
    suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache fsdp_manual_registration
    torch_fsdp2_reshard_after_forward enable_full_sharding_in_hsdp disable_symmetric_registration sharp_enabled_group
    muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode
    muon_extra_scale_factor store_param_remainders main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
    pin_cpu_params fp8_recipe use_layer_wise_distributed_optimizer use_layer_wise_param_layout muon_nesterov
    muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency
    soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps
    fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync megatron_fsdp_main_params_dtype
    megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad
    megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
""".split()
"""Megatron reads these only beside a flag that is refused."""
ARGUMENTS = [*HONOURED, *HONOURED_ARGUMENTS, *OUTSIDE, *UNREAD]
"""All of these, by their names in Megatron-LM's arguments."""
NAMES = {*HONOURED, *HONOURED_ARGUMENTS.values(), *OUTSIDE, *UNREAD}
"""All of these, by their names in Megatron-core's configurations."""
