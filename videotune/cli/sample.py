"""``videotune sample`` and ``videotune compare``."""

from pathlib import Path
from typing import Annotated

from videotune import commands
from videotune.cli.options import Arg, Offline, Opt, Sets

Step = Annotated[
    int | None, Opt("--step", help="the run's checkpoint of this step (default: newest)")
]
LoraOption = Annotated[
    list[Path] | None, Opt("--lora", help="a LoRA file for --base; of two experts one for each")
]
Tokens = Annotated[
    list[Path] | None,
    Opt("--embedding", help="a file of new tokens for --base; may be repeated"),
]
Images = Annotated[
    list[Path] | None,
    Opt("--image", help="the first frame; one for all prompts, or one for each"),
]
Strength = Annotated[
    float, Opt("--strength", help="strength of the adapter; 0: the base model alone")
]


def sample(
    run: Annotated[Path | None, Arg(help="a run folder")] = None,
    prompts: Annotated[
        list[str] | None, Opt("--prompt", help="a prompt; may be repeated")
    ] = None,
    out: Annotated[Path, Opt(help="folder for the videos")] = Path("samples"),
    seed: Annotated[
        int | None, Opt(help="seed of the first prompt (default: sample.seed)")
    ] = None,
    step: Step = None,
    base: Annotated[str | None, Opt(help="a base model, instead of a run")] = None,
    loras: LoraOption = None,
    embeddings: Tokens = None,
    images: Images = None,
    strength: Strength = 1.0,
    sets: Sets = None,
    offline: Offline = False,
) -> None:
    """Generate videos with a run, with a LoRA or embedding file, or with a base model alone."""
    given = {
        name: value
        for name, value in locals().items()
        if name != "offline" and value is not None
    }
    for path in commands.sample.sample(**given):
        print(path)


def compare(
    run: Annotated[Path, Arg(help="a run folder")],
    prompt: Annotated[str | None, Opt(help="the prompt (default: the first preview's)")] = None,
    seed: Annotated[int | None, Opt(help="its seed (default: sample.seed)")] = None,
    out: Annotated[Path | None, Opt(help="folder for the files (default: RUN/compare)")] = None,
    image: Annotated[Path | None, Opt(help="the first frame")] = None,
    offline: Offline = False,
) -> None:
    """Generate one prompt with one seed at the base model and every checkpoint, side by side."""
    for path in commands.compare.compare(run, prompt, seed=seed, out=out, image=image):
        print(path)
