#!/bin/bash
set -e -x
DATA="examples/run/training.json"
WORLD="--parallel_backend ptd --dp_degree 2"
parallel_cmd=( $WORLD )
model_cmd=(
  --model_name "ltx_video"
  --pretrained_model_name_or_path "Lightricks/LTX-Video"
)
training_cmd=(
  --training_type "lora"
  # --resume_from_checkpoint 300
  --rank 14
  --train_steps 1200
  --gradient_accumulation_steps 3
  --target_modules "transformer_blocks.*(to_q|to_k|to_v|to_out.0)"
  --dataset_config $DATA
  --flow_weighting_scheme "logit_normal"
  --flow_shift 4.0
  --lr 5e-5
)
if [ "$BACKEND" == "accelerate" ]; then
  accelerate launch --config_file x.yaml train.py "${parallel_cmd[@]}" "${model_cmd[@]}" "${training_cmd[@]}"
else
  torchrun --standalone --nproc_per_node=2 train.py \
    "${parallel_cmd[@]}" \
    "${model_cmd[@]}" \
    "${training_cmd[@]}"
fi
echo -ne "-- done --\n"
