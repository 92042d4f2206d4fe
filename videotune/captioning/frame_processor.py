"""The processor of a vision-language model, without its part for whole videos."""

from typing import Any

from videotune.lazy import transformers

# It needs torchvision, which videotune does without: a captioner gets frames as images.
VIDEO_PART = "video_processor"


def load_frame_processor(source: str, *, local_files_only: bool) -> Any:
    """Load a model's processor for text and images, without code of its own.

    Args:
        source: a folder or an id of the Hub.
        local_files_only: whether the Hub is not asked.
    """
    config = transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=False, local_files_only=local_files_only
    )
    processor_class: Any = transformers.AutoProcessor
    if type(config) in transformers.PROCESSOR_MAPPING:
        class_of_model = transformers.PROCESSOR_MAPPING[type(config)]
        if VIDEO_PART in class_of_model.get_attributes():
            processor_class = _without_video(class_of_model)
    return processor_class.from_pretrained(
        source, trust_remote_code=False, local_files_only=local_files_only
    )


def _without_video(processor_class: Any) -> Any:
    """Return a processor's class of which no part for videos is loaded."""

    class FrameProcessor(processor_class):
        """The processor for text and images."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            """Return the names of the parts that are loaded."""
            return [name for name in super().get_attributes() if name != VIDEO_PART]

    return FrameProcessor
