"""The fields of vLLM 0.32's configuration that name a namespace, and why the others do not.

An unlisted field splits the cache. A field is harmless if it changes no byte of KV, or if its
effect is in another fact.
"""

from kvhold.core.naming import Table

MEMORY = "how much memory there is, or where it is; a block holds the same bytes"
SCHEDULING = "which requests run together and when; each computes the same KV"
PLACES = (
    "where a file, port or process is; it differs between the processes or the starts of one engine"
)
LOGS = "what is logged, counted or profiled"
SAMPLING = "what is done with logits, after the KV was computed"
INPUTS = "how a prompt becomes tokens and tensors, which are in the key"
CACHING = "where KV is kept, found and announced, not what it is"
LAUNCHING = (
    "when code is compiled, captured or warmed up, and where it is kept; not what it computes"
)
LOADING = "how fast weights are read; their content is a fact"
ELSEWHERE = "its effect is in other facts"

REASONS = (
    MEMORY,
    SCHEDULING,
    PLACES,
    LOGS,
    SAMPLING,
    INPUTS,
    CACHING,
    LAUNCHING,
    LOADING,
    ELSEWHERE,
)
"""The groups of harmless fields."""

_ALL_HARMLESS_SECTIONS = {
    LOGS: "observability_config logging_config profiler_config",
    SAMPLING: "structured_outputs_config reasoning_config watermark_config",
    CACHING: "kv_events_config",
    PLACES: "instance_id",
    SCHEDULING: "shutdown_timeout",
    ELSEWHERE: "quant_config",
}

TABLES: dict[str, Table] = {
    "VllmConfig": Table.of(
        "model_config cache_config parallel_config scheduler_config device_config "
        "load_config offload_config attention_config"
        " aux_output_config engram_config mamba_config kernel_config lora_config "
        "speculative_config diffusion_config compilation_config"
        " kv_transfer_config ec_transfer_config ec_manager_config additional_config "
        "optimization_level performance_mode"
        " weight_transfer_config",
        _ALL_HARMLESS_SECTIONS,
    ),
    "ModelConfig": Table.of(
        "runner convert trust_remote_code dtype hf_config hf_text_config "
        "is_submodel_config word_embeddings_untied_by_checkpoint"
        " code_revision quantization quantization_config allow_deprecated_quantization "
        "enforce_eager disable_sliding_window"
        " disable_cascade_attn model_class_overrides model_impl pooler_config "
        "multimodal_config spec_target_max_model_len"
        " enable_trace_replay _architecture _model_info attention_chunk_size "
        "encoder_config runner_type"
        " convert_type model_arch_config",
        {
            PLACES: "model tokenizer hf_config_path served_model_name hf_token "
            "allowed_local_media_path allowed_media_domains",
            INPUTS: "tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin "
            "renderer_num_workers enable_prompt_embeds"
            " hf_image_processor_config",
            SAMPLING: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
            "logits_processors generation_config"
            " override_generation_config",
            MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph"
            " enable_nccl_comm_suspend enable_cumem_allocator",
            ELSEWHERE: "model_weights revision _hf_config_revision config_format hf_overrides "
            "config_updated seed max_model_len"
            " original_max_model_len is_diffusion is_encoder_decoder",
        },
    ),
    "PreTrainedConfig": Table.of(
        "",
        {
            PLACES: "_name_or_path _commit_hash transformers_version",
            SAMPLING: "id2label label2id problem_type",
            # vLLM uses its own
            ELSEWHERE: "_attn_implementation_internal _experts_implementation_internal",
        },
    ),
    "CacheConfig": Table.of(
        "block_size cache_dtype kv_cache_layout sliding_window kv_cache_dtype_skip_layers "
        "mamba_block_size mamba_cache_dtype"
        " mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm"
        " use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay is_attention_free "
        "mamba_page_size_padded skip_page_size_padded",
        {
            MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens"
            " kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size "
            "kv_offloading_backend",
            CACHING: "enable_prefix_caching prefix_caching_hash_algo "
            "prefix_cache_retention_interval prefix_match_unit hash_block_size"
            " cache_hit_alignment_tokens",
            ELSEWHERE: "user_specified_block_size _block_size_resolved "
            "effective_attention_block_size",
        },
    ),
    "ParallelConfig": Table.of(
        "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
        "data_parallel_size is_moe_model enable_hc_sp"
        " enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
        "expert_placement_strategy all2all_backend"
        " disable_custom_all_reduce enable_elastic_ep elastic_ep_max_dp_size enable_dbo "
        "ubatch_size dbo_decode_token_threshold"
        " dbo_prefill_token_threshold worker_cls worker_extension_cls nnodes "
        "decode_context_parallel_size"
        " dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
        "cp_kv_cache_interleave_size",
        {
            PLACES: "data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_master_ip data_parallel_rpc_port"
            " data_parallel_master_port data_parallel_backend data_parallel_external_lb "
            "data_parallel_hybrid_lb master_addr master_port"
            " node_rank rank data_parallel_index _api_process_count _api_process_rank "
            "_data_parallel_master_port_list _coord_store_port"
            " distributed_executor_backend ray_workers_use_nsight ray_runtime_env "
            "placement_group assigned_physical_gpu_ids"
            " numa_bind numa_bind_nodes numa_bind_cpus",
            SCHEDULING: "dp_sync_interval disable_nccl_for_dp_synchronization "
            "distributed_timeout_seconds"
            " cpu_distributed_timeout_seconds enable_fault_tolerance fault_tolerance_config",
            SAMPLING: "enable_batch_sharded_sampling",
            MEMORY: "enable_shm_tensor_arena",
            LOADING: "max_parallel_loading_workers",
            ELSEWHERE: "world_size _allow_auto_resolve_cp_interleave_size",
        },
    ),
    "EPLBConfig": Table.of(
        "window_size step_interval num_redundant_experts policy communicator use_async "
        "enable_migration_batching",
        {LOGS: "log_balancedness log_balancedness_interval"},
    ),
    "SchedulerConfig": Table.of(
        "runner_type enable_chunked_prefill is_multimodal_model disable_hybrid_kv_cache_manager",
        {
            SCHEDULING: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
            "max_num_active_seqs long_prefill_token_threshold"
            " long_prefill_token_threshold_adaptive max_num_queued_reqs "
            "max_num_queued_tokens max_num_encoder_input_tokens"
            " encoder_cache_size policy disable_chunked_mm_input scheduler_cls "
            "scheduler_reserve_full_isl watermark"
            " prefill_schedule_interval async_scheduling stream_interval",
        },
    ),
    "DeviceConfig": Table.of("device_type", {PLACES: "device"}),
    "LoadConfig": Table.of(
        "load_format model_loader_extra_config ignore_patterns",
        {
            PLACES: "download_dir device pt_load_map_location",
            LOADING: "safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size use_tqdm_on_load",
        },
    ),
    "OffloadConfig": Table.of("offload_backend uva prefetch"),
    "UVAOffloadConfig": Table.of("cpu_offload_params", {MEMORY: "cpu_offload_gb"}),
    "PrefetchOffloadConfig": Table.of(
        "offload_params",
        {MEMORY: "offload_group_size offload_num_in_group", LAUNCHING: "offload_prefetch_step"},
    ),
    "AttentionConfig": Table.of(
        "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
        "flash_attn_max_num_splits_for_cuda_graph"
        " tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention "
        "disable_flashinfer_q_quantization"
        " mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits hisparse_config use_non_causal"
        " sparse_mla_force_mqa sparse_mla_prefill_workspace_factor flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size"
        " flex_attn_kv_block_size"
    ),
    "HiSparseConfig": Table.of("device_buffer_size eager_host_mirror"),
    "AuxOutputConfig": Table.of("enable_return_routed_experts", {MEMORY: "max_bytes"}),
    "EngramConfig": Table.of(
        "cpu_offload embedding_across_dp", {MEMORY: "dp_shared_memory use_thp"}
    ),
    "MambaConfig": Table.of(
        "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"
    ),
    "KernelConfig": Table.of(
        "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
        "moe_backend sparse_indexer_topk_backend"
        " linear_backend linear_backend_per_quant",
        {LAUNCHING: "enable_cutedsl_warmup enable_jit_warmup"},
    ),
    "IrOpPriorityConfig": Table.of("rms_norm fused_add_rms_norm gelu_and_mul_sparse"),
    "LoRAConfig": Table.of(
        "max_lora_rank max_loras fully_sharded_loras lora_dtype target_modules "
        "default_mm_loras enable_tower_connector_lora"
        " specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        {MEMORY: "max_cpu_loras", SAMPLING: "max_lora_cls_labels"},
    ),
    "MultiModalConfig": Table.of(
        "language_model_only enable_mm_embeds mm_processor_kwargs mm_device_do_normalize "
        "mm_encoder_only mm_encoder_tp_mode"
        " mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "video_pruning_rate video_pruning_method"
        " allow_missing_mm_embeddings interleave_mm_strings",
        {
            SCHEDULING: "limit_per_prompt",
            INPUTS: "media_io_kwargs",
            MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "skip_mm_profiling mm_tensor_ipc"
            " mm_ipc_gpu_memory_gb",
            CACHING: "mm_hasher_algorithm",
            PLACES: "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        },
    ),
    "SpeculativeConfig": Table.of(
        "enforce_eager num_speculative_tokens model method draft_tensor_parallel_size "
        "tensor_parallel_size quantization moe_backend"
        " attention_backend kv_cache_dtype max_model_len revision code_revision "
        "index_share_for_mtp_iteration"
        " disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
        "use_heterogeneous_vocab prompt_lookup_max"
        " prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size "
        "suffix_decoding_max_tree_depth"
        " suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
        "enable_adaptive_verification dspark_draft_topk",
        {
            ELSEWHERE: "target_model_config target_parallel_config draft_model_config "
            "draft_parallel_config",
            LOADING: "draft_load_config",
            MEMORY: "suffix_decoding_max_cached_requests",
            SAMPLING: "rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length draft_sample_method",
        },
    ),
    "DiffusionConfig": Table.of("canvas_length max_denoising_steps"),
    "CompilationConfig": Table.of(
        "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
        "cudagraph_mode compile_sizes"
        " inductor_compile_config inductor_passes use_inductor_graph_partition pass_config "
        "dynamic_shapes_config fast_moe_cold_start"
        " cudagraph_specialize_lora",
        {
            LOGS: "debug_dump_path compilation_time encoder_compilation_time",
            LAUNCHING: "cache_dir local_cache_dir compile_cache_save_format "
            "cudagraph_num_of_warmups "
            "cudagraph_capture_sizes"
            " cudagraph_copy_inputs max_cudagraph_capture_size cudagraph_mm_encoder "
            "encoder_cudagraph_token_budgets"
            " encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay"
            " decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
            "traced_files static_forward_context"
            " static_all_moe_layers",
            SCHEDULING: "compile_ranges_endpoints",  # follows max_num_batched_tokens
            ELSEWHERE: "enabled_custom_ops disabled_custom_ops",
        },
    ),
    "PassConfig": Table.of(
        "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms "
        "enable_qk_norm_rope_fusion"
        " fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm "
        "fuse_rope_kvcache fuse_qk_norm_rope_kvcache"
        " rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb"
    ),
    "DynamicShapesConfig": Table.of("type evaluate_guards assume_32_bit_indexing"),
    "KVTransferConfig": Table.of(
        "enable_permute_local_kv",
        {
            CACHING: "kv_connector kv_role kv_connector_module_path kv_load_failure_policy "
            "kv_connector_extra_config",
            PLACES: "engine_id kv_buffer_device kv_port",
        },
    ),
    "ECTransferConfig": Table.of(
        "ec_connector ec_role ec_connector_extra_config ec_connector_module_path "
        "mm_encoder_output_widths",
        {PLACES: "engine_id ec_ip ec_port", MEMORY: "ec_buffer_device ec_buffer_size"},
    ),
    "EncoderCacheManagerConfig": Table.of("encoder_cache_manager_cls manager_config"),
    "PoolerConfig": Table.of(
        "task pooling_type seq_pooling_type tok_pooling_type use_activation "
        "enable_flash_late_interaction dimensions"
        " enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id "
        "returned_token_ids"
    ),
    "QuantizationConfigArgs": Table.of("linear moe ignore targets"),
    "QuantSpec": Table.of("weight activation"),
    "WeightTransferConfig": Table.of("backend"),
    "ModelArchitectureConfig": Table.of(
        "architectures model_type text_model_type hidden_size total_num_hidden_layers "
        "total_num_attention_heads head_size vocab_size"
        " total_num_kv_heads num_experts num_experts_per_token quantization_config "
        "is_deepseek_mla is_mm_prefix_lm rswa_window"
        " per_layer_overrides",
        {ELSEWHERE: "derived_max_model_len_and_key"},
    ),
    "KVCacheConfig": Table.of(
        "kv_cache_groups kv_cache_layout kv_tp_replicas",
        {
            MEMORY: "num_blocks kv_cache_tensors hisparse_host_num_blocks "
            "hisparse_host_block_stride hisparse_shared_host_pool",
            CACHING: "prefix_cache_retention_interval hash_block_size cache_hit_alignment_tokens",
        },
    ),
    "KVCacheGroupSpec": Table.of(
        "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer role"
    ),
}
"""Tables by class name. All fields of a `KVCacheSpec` (or subclass) are named."""

WHOLE_HARMLESS = Table.of(
    "ObservabilityConfig LoggingConfig ProfilerConfig StructuredOutputsConfig "
    "ReasoningConfig WatermarkConfig KVEventsConfig"
    " FaultToleranceConfig BaseDummyOptions AudioDummyOptions ImageDummyOptions "
    "VideoDummyOptions SpeechToTextConfig SpeechToTextParams"
    " Range"
).named
"""Classes that only harmless fields contain, or that are not in an engine's configuration."""
