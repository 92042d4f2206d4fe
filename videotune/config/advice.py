"""Of each key: its unit, why its default is what it is, what the training guide advises, and our reading of that."""

from __future__ import annotations

UNITS = {
    "backup_after": "minutes",
    "dataloader_threads": "threads",
    "expert_period": "steps",
    "gradient_accumulation_steps": "forward passes per step",
    "max_grad_norm": "norm of the gradient",
    "probe_budget": "share of the time of training steps",
    "resolution": "pixels",
    "ruler_after": "steps",
    "sample.resolution": "pixels",
    "sample_after": "steps",
    "save_every": "steps",
    "video_config.frames": "pixel frames",
    "video_config.max_duration": "seconds",
    "video_config.max_frames": "pixel frames",
    "video_config.min_frames": "pixel frames",
    "video_config.spatial_compression_ratio": "pixels per latent cell",
    "video_config.target_fps": "frames per second",
    "video_config.temporal_compression_ratio": "frames per latent frame",
    "video_config.window_stride": "pixel frames",
    "warmup_steps": "steps",
}

REASONS = {
    "backup_after": "half an hour is the most that a crash should cost",
    "batch_size": "one sample is what fits first; accumulation makes the step larger at no memory",
    "caption_dropout": "guidance needs a model that also knows the empty caption; one sample in ten keeps it",
    "dataloader_threads": "two keep up with a GPU on short clips; more only where the bar says that it waits",
    "datasets.repeats": "every window counts alike unless you say otherwise",
    "ema.decay": "it costs memory; without one the last weights are used",
    "ema.device": "an average on the device costs no copies; the host is for runs that do not fit otherwise",
    "expert_period": "loading an expert is paid once in so many steps",
    "gradient_accumulation_steps": "a larger step costs time in proportion",
    "gradient_checkpointing": "videos rarely fit without; a block is computed twice for it",
    "learning_rate": "usual for adapters under AdamW; whole weights take a tenth of it",
    "learning_rate_cycles": "one descent is COSINE itself",
    "learning_rate_power": "1 is a straight line",
    "learning_rate_scheduler": "a constant rate lets a run be prolonged without becoming another one",
    "lora.alpha": "alpha = rank, so that another rank does not change the size of updates",
    "lora.rank": "16 holds a subject or a style of a few dozen clips; files and memory grow with it",
    "lora.targets": "attention alone is the usual choice, and half of what linear trains",
    "loss_weighting": "plain error is what the models were trained with",
    "loss_weighting_gamma": "5 is the paper's (Hang et al. 2023)",
    "max_grad_norm": "1 only touches steps that are out of the ordinary",
    "optimizer.beta1": "every Adam's own",
    "optimizer.beta2": "0.99 forgets in 100 steps, which suits runs of a few thousand; Adam's own 0.999 in 1,000",
    "optimizer.masters": "float32 copies lose nothing; without them weights get noise of bf16's step",
    "optimizer.name": "AdamW is what published rates are for",
    "optimizer.step_in_backward": "off: whole gradients can be clipped together, summed over passes, and refused as a whole",
    "optimizer.weight_decay": "0.01 is AdamW's own",
    "probe.encoder": "none is downloaded for you; the default compares edges, light and colour",
    "probe.samples": "enough for a Vendi score, few enough to be paid at checkpoints",
    "probe_budget": "a twentieth of the time buys readings; a short run is not measured",
    "resolution": "the family's own; activations grow with the number of pixels",
    "ruler_after": "often enough to see a turn within a few thousand steps; `videotune plan` says what it costs",
    "sample_after": "a look now and then; the picture before training is step 0; `videotune plan` says what it costs",
    "save_every": "disk for a choice of results",
    "seed": "any number will do",
    "shuffle": "an order of the disk would be learnt",
    "steps": "the videos' views decide more: see `videotune plan`",
    "timestep_distribution": "the family's own, which its base was trained with",
    "timestep_scale": "1, and 1.29 is the one that Esser et al. 2024 report for MODE",
    "timestep_shift": "the family's own",
    "timestep_stratified": "off: published recipes draw each sample by itself; with one sample a step it changes nothing",
    "train_dtype": "bfloat16 on a GPU; on a CPU it is some twelve times slower than float32",
    "validation_fraction": "a tenth held out, where there are enough source videos to spare them",
    "video_config.frame_dropout_probability": "off: it takes from what is learnt",
    "video_config.frame_sample_strategy": "even spacing keeps motion at its speed",
    "video_config.max_duration": "the guide's",
    "video_config.max_frames": "the guide's; it becomes the nearest count that the model takes",
    "video_config.target_fps": "the model's own rate, whatever the guide says for all of them: speed is learnt too",
    "video_config.temporal_augmentation": "off: it changes motion",
    "video_config.temporal_consistency_weight": "0: it changes the published objective, so it acts only when named",
    "video_config.use_temporal_attention": "a video model without it learns pictures",
    "video_config.variants": "four views of what varies, for four times the cache",
    "video_config.video_batch_size_multiplier": "the guide's; it acts only where images and videos are mixed",
    "weight_dtype": "rounding buys room with quality, so it acts only when named; the figures are in docs/memory.md",
    "warmup_steps": "a few steps let Adam's means settle; 5 % of a short run is enough",
}

GUIDE: dict[str, tuple[str, str]] = {
    "batch_size": (
        "Start with 1 for video; by memory 1 (8 GB), 2 (16 GB), 4 (24 GB), 8 (48 GB).",
        "True of memory. gradient_accumulation_steps makes a larger step without it.",
    ),
    "dataloader_threads": (
        "Increase it if training is slow and the CPU allows.",
        "Only where steps wait for data: `videotune doctor RUN` measures that. Clips are encoded once, before.",
    ),
    "gradient_checkpointing": (
        "CPU_OFFLOADED saves memory; and under slow training: enable it.",
        "It saves memory and costs time, never the other way round: blocks are computed twice.",
    ),
    "learning_rate": (
        "3e-4 for LoRA, 1e-4 for fine-tuning; adjust it when quality is poor.",
        "1e-4 for fine-tuning is high for whole weights; ours is 1e-5. Lower it when the loss jumps.",
    ),
    "resolution": ("By memory: 384×384, 512×512, 768×768; start at 384 or 256.", "True: memory falls with the pixels."),
    "sample_after": ("Enable sampling to watch progress.", "It is on, and step 0 shows the base."),
    "save_every": (
        "Video training can be unstable: back up often.",
        "Saves are whole or absent; backup_after adds more.",
    ),
    "backup_after": ("Video training can be unstable: back up often.", "Every half hour unless a save came before."),
    "train_dtype": (
        "BFLOAT_16 or FLOAT_16, for memory and speed.",
        "BFLOAT_16 on a GPU is the default. On a CPU it is slower than FLOAT_32.",
    ),
    "weight_dtype": (
        "FLOAT_8 for LoRA and Embedding, NFLOAT_4 for 8 GB.",
        "FLOAT_8 halves the frozen weights and is hardly seen; NFLOAT_4 is for cards where nothing else fits. Neither is "
        "faster.",
    ),
    "training_method": ("LORA is recommended: least memory.", "True."),
    "video_config.frame_dropout_probability": (
        "0.0 to 0.3; reduce it when frames do not hang together.",
        "Dropped frames are fed as noise and count nothing. 0 unless overfitting is seen.",
    ),
    "video_config.frame_sample_strategy": (
        "uniform for most; random for variety, keyframe for scenes.",
        "random draws the window, not the frames: frames out of their time teach broken motion.",
    ),
    "video_config.max_duration": (
        "5 to 10 seconds.",
        "Only what the windows cover is read; memory follows from frames.",
    ),
    "video_config.max_frames": (
        "8 to 16 for most, 32 and more on large cards; more frames, more consistency.",
        "Counts that a model takes are its own; 16 becomes 17 for most. Memory and time grow faster than the count.",
    ),
    "video_config.frames": ("Lower it to save memory.", "True."),
    "video_config.spatial_compression_ratio": (
        "4, 8 or 16; higher saves memory.",
        "The VAE fixes it. A multiple shrinks the clips first, which is a smaller resolution.",
    ),
    "video_config.temporal_compression_ratio": (
        "2, 4 or 8; higher saves memory on long clips.",
        "The VAE fixes it. A multiple keeps every k-th frame, so motion is seen faster.",
    ),
    "video_config.target_fps": (
        "24 by default; 12, 24 or 30 are common; source clips should agree.",
        "The model's own rate is right, and clips of other rates are resampled by their real times.",
    ),
    "video_config.temporal_augmentation": (
        "Robustness, for longer training.",
        "Neighbours swap and windows begin elsewhere; it changes motion, and costs cache rather than time.",
    ),
    "video_config.temporal_consistency_weight": (
        "0.0 to 2.0, start at 1.0; increase it when frames do not hang together.",
        "It prices errors that flicker; the published objective has none: ours is 0. On our toy samples were no steadier "
        "with it, and learnt slightly faster: compare a run with 0 before you keep it.",
    ),
    "video_config.use_temporal_attention": (
        "Leave it on; off only for memory.",
        "True. Memory falls only where attention is not fused; time does.",
    ),
    "video_config.video_batch_size_multiplier": (
        "0.5; lower saves memory.",
        "Only where images and videos are mixed; a step of videos alone has batch_size samples, as the notes say.",
    ),
}
"""Key -> (what the guide says, in short; what of it is true here)."""
