"""Messages of the commands in the studio's own terms: no options of a terminal."""

import re

ARGUMENT = r"(?:'[^']*'|\S+)"
"""A path as a command has it: quoted if it has a space."""

_RULES = (
    (
        r"captions were not counted in tokens: .*",
        "The tokens of the captions are estimated from their words.",
    ),
    (
        r"Fix or remove them, or allow it: --allow-skips \d+",
        "Mend or remove them on the page Data, or leave them out there.",
    ),
    (
        r"none is given\. Pass --data DIR, or set datasets in the config\.?",
        "there are none. Add clips on the page Data.",
    ),
    (
        r"no model given; pass --preset NAME.*",
        "no model is chosen. Choose one on the page Setup.",
    ),
    (
        r"(\d+) source (videos?), (\d+) are needed( \([^)]*\))?\. Add clips, or put "
        r"(\S+ or more) into a folder of their own: --held-out FOLDER",
        r"from \3 videos on, some are kept aside by themselves; your usable clips come "
        r"from \1 \2\4. Until then choose “Keep aside” for \5",
    ),
    (r" ?\(--held-out FOLDER\)", ""),
    (
        r"put (some|\S+ or more) into a dataset of kind validation",
        r"choose “Keep aside” for \1",
    ),
    (
        r"Put more clips into the dataset of kind validation",
        "Choose “Keep aside” for more clips",
    ),
    (
        r"name one as a dataset of kind validation",
        "add one for checking at “Other folders and datasets”",
    ),
    (
        r"a dataset of kind validation takes its place",
        "clips that you keep aside take its place",
    ),
    (r"Add a dataset of kind train", "Use some clips for training"),
    (
        r"no dataset is of kind validation",
        "no clip is kept aside for checking",
    ),
    (r"(a|the) dataset of kind validation", "the clips kept aside"),
    (r"no clip is held out\b", "no clip is kept aside for checking"),
    (r"\bheld out for validation\b", "kept aside for checking"),
    (r"\bheld-out (clips?|videos?)\b", r"\1 kept aside"),
    (r"(?<![\w/])held out\b", "kept aside"),
    (r"--card ('[^']*'|\"[^\"]*\"): ", r"card \1: "),
    (
        r" You can give its memory instead: --card 24 for 24 GB\.",
        " Or give its memory in GB.",
    ),
    (r", or the memory: --card \d+\.", ", or the memory in GB."),
    (r"`videotune export [^`]*--merge`", "The merged model"),
    (r"`videotune cache [^`]*` makes one", "A training makes one"),
    (rf"`?videotune dataset split {ARGUMENT} --out [^`\s]+`?", "“Cut into scenes”"),
    (r"videotune publish .*", "press Publish on the page Results"),
    (r"(;|,|,? or| )* *`videotune [^`]*`( shows (all|them))?", ""),
    (r"(choose|with|use|Use|Choose) another --out", r"\1 another name for the run"),
    (r"--out: ", "the run: "),
    (r"--name ", "the name "),
    (r"another --(\w+)", r"another \1"),
    (r"go back first with --from: ", "go back first to a checkpoint: "),
    (r"Go back to the beginning: --from 0", "Go back to the beginning: step 0"),
    (r"; --init-from starts from these weights", " from these weights"),
    (
        r"Restore it, start a new run, or continue with the changed data: --allow-data-change",
        "Undo the change on the page Data, start a new run, or continue with the changed data",
    ),
    (r"add --override", "start a new run"),
    (r"add --set ([\w.]+)=… --override", r"change \1"),
    (r"change settings with --set \S+ --override; or .*", "start a new run"),
    (r"--prompt TEXT(, as often as you like)?", "a prompt"),
    (r"--(image|lora) FILE", r"a file"),
    (r"Add --public", "Make it public"),
    (
        rf"resume with: videotune train --out {ARGUMENT} --resume",
        "resume on the page Train",
    ),
    (rf"resume with: videotune resume {ARGUMENT}", "resume on the page Train"),
    (
        rf"Continue it with: videotune resume {ARGUMENT};",
        "Resume it on the page Train,",
    ),
    (
        rf"To train on: videotune resume {ARGUMENT} --set steps=\d+( --override)?",
        "To train on, set more steps and resume it on the page Train",
    ),
    (r"`videotune resume`", "a resume"),
    (rf"videotune resume {ARGUMENT}", "press Resume on the page Train"),
    (rf"videotune train --out {ARGUMENT} --resume", "press Resume on the page Train"),
    (
        rf"videotune doctor {ARGUMENT} --repair-journal",
        "the journal has to be repaired",
    ),
    (r"--resume --from (\S+)( --override)?", r"resume from step \1 on the page Train"),
    (
        r"--resume (--override )?--set ([\w.]+)=([^\s:,;]+)",
        r"set \2 to \3 and resume",
    ),
    (r"--set ([\w.]+)=([^\s:,;]+)", r"\1 set to \2"),
    (r"(,? ?and)? ?\(--override\)", ""),
    (r"--overwrite", "the tick at “Replace captions that are there”"),
    (r"--allow-skips( \d+| all)?", "leaving them out on the page Data"),
    (r"--allow-data-change", "“Continue with the changed data”"),
    (r"--resume", "Resume on the page Train"),
    (r"--endpoint", "the server"),
    (r"\?\.", "?"),
    (r" ?\(--[a-z][\w-]*( [A-Z]+)?\)", ""),
)
"""What a text of a command says, and what the page says instead; the first rules come
first.
"""

_RULES_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _RULES)

_SIGNS = (
    "--",
    "`videotune",
    "videotune resume",
    "of kind ",
    "not counted in tokens",
    "held",
)
"""What a text has that is to be said otherwise."""

_OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)")


def in_studio_terms(text: str) -> str:
    """Return a message without options and commands of a terminal.

    Remedies that a page has are named by their place in the page; any other option is
    named by its words.
    """
    if not any(sign in text for sign in _SIGNS):
        return text
    for pattern, replacement in _RULES_COMPILED:
        text = pattern.sub(replacement, text)
    return _OPTION.sub(lambda match: match[1].replace("-", " "), text)


def of_other_folders(text: str) -> str:
    """Return a message in the studio's terms for a project whose clips are all in other
    folders: their tiles have no buttons.
    """
    return text.replace(
        "choose “Keep aside” for 2 or more",
        "add a folder of 2 or more for checking only",
    )
