#!/bin/bash
# one run
RATE=3e-4
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/wan_train_network.py \
  --task t2v-1.3B --dit weights/wan2.1_t2v_1.3B_bf16.safetensors --vae "weights/vae file.safetensors" \
  --dataset_config dataset.toml --sdpa --mixed_precision bf16 --fp8_base \
  --network_module networks.lora_wan --network_dim=24 --network_args "conv_dim=4" verbose=True \
  --optimizer_type adamw8bit --optimizer_args "weight_decay=0.05" betas=0.9,0.95 --learning_rate ${RATE} \
  --timestep_sampling shift --discrete_flow_shift 5.0 --guidance_scale 1.0 \
  --max_train_epochs 6 --save_every_n_steps 40 --seed 7 --gradient_checkpointing --output_dir out
