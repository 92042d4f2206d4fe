"""videotune fine-tunes video diffusion models on your own clips, and tells the truth about the run."""

__version__ = "0.1.0"
