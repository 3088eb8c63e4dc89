#!/bin/sh
# The trainer: needs a GPU, and verl 0.8 with vLLM as Agent Lightning's installation guide has it. Call it at the root
# of the checkout, beside a running agl-server and agl-controller (README.md); arguments KEY=VALUE change settings.
set -eu
folder=examples/agentlightning_v1

exec python -m ctxguard.integrations.agentlightning_v1 \
    agentlightning.agl_base_url="${AGL_BASE_URL:-http://localhost:8080}" \
    agentlightning.agl_key="${AGL_KEY:-example-key}" \
    agentlightning.local.agent_class=examples.agentlightning_v1.agent:LogReader \
    agentlightning.local.env_map.TASK=input.task \
    agentlightning.local.env_map.ANSWER=input.answer \
    agentlightning.k8s.job_template_path="$folder/job.yaml" \
    agentlightning.trace_aggregator.trajectory_max_prompt_length=12288 \
    agentlightning.trace_aggregator.trajectory_max_response_length=8192 \
    ctxguard.failure_handling=exclude \
    data.train_files="$folder/tasks.jsonl" \
    data.val_files="$folder/tasks.jsonl" \
    data.train_batch_size=4 \
    data.max_prompt_length=12288 \
    data.max_response_length=8192 \
    algorithm.adv_estimator=grpo \
    critic.enable=false \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B}" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_model_len=20480 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.engine_kwargs.vllm.enable_auto_tool_choice=true \
    actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser=hermes \
    trainer.n_gpus_per_node=1 \
    trainer.logger='[console]' \
    "$@"
