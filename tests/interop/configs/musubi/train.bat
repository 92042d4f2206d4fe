@echo off
rem one run
set RATE=3e-4
accelerate launch hv_train_network.py ^
  --dit "C:\models\hunyuan video\dit.safetensors" --dataset_config dataset.toml ^
  --network_module networks.lora --learning_rate %RATE% --guidance_scale 6 --blocks_to_swap 20
