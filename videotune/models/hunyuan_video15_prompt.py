"""What Qwen2.5-VL reads of a caption in HunyuanVideo 1.5's pipeline."""

SYSTEM_MESSAGE = (
    "You are a helpful assistant. Describe the video by detailing the following aspects:"
    "         1. The main content and theme of the video."
    "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "         4. background environment, light, style and atmosphere."
    "         5. camera angles, movements, and transitions used in the video."
)
"""What the pipeline tells Qwen in front of a caption."""

TEMPLATE = (
    f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What Qwen reads of a caption, as the pipeline writes it; here to count tokens without
torch.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's chat template as far as the pipeline uses it; a checkpoint's own is code,
which is not run.
"""

CROP = 108
"""Tokens before the caption: the pipeline cuts off the states of this many tokens."""
