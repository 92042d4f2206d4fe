"""``videotune sample`` and ``videotune compare``."""

from pathlib import Path
from typing import Annotated, Any

from videotune import console
from videotune.cli.options import Arg, Offline, Opt, Sets
from videotune.cli.run_table import print_runs, tell_ranking
from videotune.console import doing, tell
from videotune.errors import VideotuneError
from videotune.text import counted

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


LastFrame = Annotated[
    Path | None, Opt(help="the image that it ends with, if the run learns that")
]
Prefix = Annotated[Path | None, Opt(help="the clip that it continues")]
Suffix = Annotated[Path | None, Opt(help="the clip that it leads to")]
Video = Annotated[
    Path | None,
    Opt(help="the clip of which it keeps what --mask leaves, or whose sound is drawn"),
]
Mask = Annotated[Path | None, Opt(help="image or clip, white where it is painted anew")]
Reference = Annotated[
    Path | None, Opt(help="image or clip that it follows, if the run learns that")
]
Control = Annotated[
    Path | None, Opt(help="image or clip that controls it, if the run learns that")
]
Sound = Annotated[
    Path | None, Opt(help="file whose sound it has, if the run learns that")
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
    last_frame: LastFrame = None,
    prefix: Prefix = None,
    suffix: Suffix = None,
    video: Video = None,
    mask: Mask = None,
    reference: Reference = None,
    control: Control = None,
    sound: Sound = None,
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
        last_frame=last_frame,
        prefix=prefix,
        suffix=suffix,
        video=video,
        mask=mask,
        reference=reference,
        control=control,
        sound=sound,
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
    runs: Annotated[
        list[Path],
        Arg(help="a run folder; with several: their settings, losses and previews"),
    ],
    prompt: Annotated[
        str | None, Opt(help="the prompt (default: the first preview's)")
    ] = None,
    seed: Annotated[int | None, Opt(help="its seed (default: sample.seed)")] = None,
    out: Annotated[
        Path | None,
        Opt(help="folder for the files (default: RUN/compare; for several runs, RUN)"),
    ] = None,
    image: Annotated[Path | None, Opt(help="the first frame")] = None,
    sets: Sets = None,
    offline: Offline = False,
) -> dict[str, Any]:
    """Generate one prompt with one seed at the base model and at every checkpoint, or
    show several runs side by side.
    """
    if len(runs) > 1:
        options = {"--prompt": prompt, "--seed": seed, "--image": image, "--set": sets}
        return show_runs(runs, options, out)

    from videotune.commands.sample_options import refuse_compare
    from videotune.job.overrides import Overrides, check_settings

    check_settings(Overrides(sets=tuple(sets or ())))
    prompt = refuse_compare(runs[0], prompt, seed, image, sets or ())
    doing("loading the model")
    from videotune.commands.compare import compare as compare_checkpoints

    paths = compare_checkpoints(
        runs[0], prompt, seed=seed, out=out, image=image, sets=sets or ()
    )
    for path in paths:
        console.out(path)
    return {}


def show_runs(
    runs: list[Path], options: dict[str, Any], out: Path | None
) -> dict[str, Any]:
    """Print the settings that differ between runs and the results, a column a run.

    Raises VideotuneError for options that only one run has.
    """
    from videotune.commands.compare_runs import compare_runs

    for name, value in options.items():
        if value not in (None, []):
            raise VideotuneError(
                f"{name}: several runs are compared by the previews that they have. Leave it out, "
                "or name one run"
            )
    doing("reading the runs")
    comparison = compare_runs(runs, out)

    print_runs(comparison.keys, comparison.rows)
    tell_ranking(comparison.order, comparison.doubt)
    if comparison.shared_prompts:
        tell(
            "The page shows the previews of "
            f"{counted(comparison.shared_prompts, 'prompt')} side by side, sampled with the same seed."
        )
    else:
        tell(
            "The runs have no preview of the same prompt and seed. Give them the same samples, or use "
            "`videotune sample RUN --prompt TEXT --seed N` with each."
        )
    console.out(comparison.page)
    return {"page": str(comparison.page), "keys": comparison.keys}
