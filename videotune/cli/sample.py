"""``videotune sample`` and ``videotune compare``."""

from pathlib import Path
from typing import Annotated

from videotune import console
from videotune.cli.options import Arg, Offline, Opt, Sets
from videotune.console import doing

Step = Annotated[
    int | None, Opt("--step", help="step of the run's checkpoint (default: newest)")
]
Prompts = Annotated[list[str] | None, Opt("--prompt", help="a prompt; may be repeated")]
FirstSeed = Annotated[
    int | None, Opt(help="seed of the first prompt (default: sample.seed)")
]
LoraOption = Annotated[
    list[Path] | None,
    Opt(
        "--lora",
        help="a LoRA file for --base, of two experts one for each; or added to a run's own",
    ),
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
    float | None,
    Opt(
        "--strength",
        help="strength of the adapter; 0: only the base model (default: sample.strength)",
    ),
]


def sample(
    run: Annotated[Path | None, Arg(help="a run folder")] = None,
    prompts: Prompts = None,
    out: Annotated[
        Path | None,
        Opt(help="folder for the videos (default: RUN/sampled; without a run samples)"),
    ] = None,
    seed: FirstSeed = None,
    step: Step = None,
    base: Annotated[str | None, Opt(help="a base model, instead of a run")] = None,
    loras: LoraOption = None,
    embeddings: Tokens = None,
    images: Images = None,
    strength: Strength = None,
    sets: Sets = None,
    offline: Offline = False,
) -> None:
    """Generate videos with a run, with a LoRA or embedding file, or with only a base
    model.
    """
    from videotune.commands.sample_options import (
        SampleOptions,
        folder_of,
        open_source,
    )
    from videotune.job.overrides import Overrides, check_settings

    check_settings(Overrides(sets=tuple(sets or ())))
    options = SampleOptions(
        run=run,
        prompts=prompts or (),
        seed=seed,
        step=step,
        base=base,
        loras=loras or (),
        embeddings=embeddings or (),
        images=images or (),
        strength=strength,
        sets=sets or (),
    )
    source = open_source(options)
    folder = folder_of(options, out)

    doing("loading the model")
    from videotune.commands.sample import write_samples

    for path in write_samples(source, folder):
        console.out(path)


def compare(
    run: Annotated[Path, Arg(help="a run folder")],
    prompt: Annotated[
        str | None, Opt(help="the prompt (default: the first preview's)")
    ] = None,
    seed: Annotated[int | None, Opt(help="its seed (default: sample.seed)")] = None,
    out: Annotated[
        Path | None, Opt(help="folder for the files (default: RUN/compare)")
    ] = None,
    image: Annotated[Path | None, Opt(help="the first frame")] = None,
    sets: Sets = None,
    offline: Offline = False,
) -> None:
    """Generate one prompt with one seed at the base model and at every checkpoint."""
    from videotune.commands.sample_options import refuse_compare
    from videotune.job.overrides import Overrides, check_settings

    check_settings(Overrides(sets=tuple(sets or ())))
    prompt = refuse_compare(run, prompt, seed, image, sets or ())
    doing("loading the model")
    from videotune.commands.compare import compare as compare_checkpoints

    paths = compare_checkpoints(
        run, prompt, seed=seed, out=out, image=image, sets=sets or ()
    )
    for path in paths:
        console.out(path)
