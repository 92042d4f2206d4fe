"""What decides the toy base model: how large its parts are, how long they train, and on
how much.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The toy as it is shipped.

    ``looks`` and ``held_out`` count from the front of KNOWN and HELD_OUT.

    Nearly all of the time goes into ``autoencoder_steps``, 1.2 seconds of one core
    each, and ``transformer_steps``, 0.7 seconds each. ``rounds``: samples of each
    held-out look that are scored.
    """

    seed: int = 0
    channels: int = 12
    autoencoder_width: int = 16
    autoencoder_steps: int = 1150
    keep_every: int = 75
    text_width: int = 64
    looks: int = 48
    held_out: int = 24
    clips_a_look: int = 20
    heads: int = 4
    head_width: int = 36
    layers: int = 6
    ffn: int = 576
    transformer_steps: int = 3000
    batch: int = 16
    rounds: int = 4
    scored_clips: int = 16


TINY = Recipe(
    autoencoder_width=4,
    autoencoder_steps=4,
    keep_every=1,
    looks=2,
    held_out=1,
    clips_a_look=1,
    heads=1,
    head_width=12,
    layers=1,
    ffn=16,
    transformer_steps=4,
    batch=2,
    rounds=1,
    scored_clips=1,
)
"""Everything in seconds, so that it can be tried; nothing is learnt."""
