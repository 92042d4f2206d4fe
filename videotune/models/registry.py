"""Find model families by name. A family registers itself when its class is defined.

All modules of this package are imported. Another package names its modules as entry
points of the group ``videotune.models``.
"""

import difflib

from videotune.errors import VideotuneError, did_you_mean
from videotune.models import other_models
from videotune.models.base import FAMILIES, DiffusersModel
from videotune.models.discovery import import_families


def names() -> list[str]:
    """Return the names of all families, sorted."""
    import_families()
    return sorted(FAMILIES)


def find(name: str) -> type[DiffusersModel]:
    """Return the family with this name or alias.

    Raises:
        VideotuneError: if there is no such family; the message suggests the nearest
            name.
    """
    wanted = name.strip().lower()
    family_names = names()
    for family_name in family_names:
        family = FAMILIES[family_name]
        aliases = {alias.lower() for alias in family.spec.aliases}
        if wanted == family_name or wanted in aliases:
            return family

    other_models.refuse_other_model(other_models.other_model_of_name(name), "family")
    nearest = difflib.get_close_matches(wanted, family_names, n=1, cutoff=0.4)
    raise VideotuneError(
        f"there is no family {name!r}{did_you_mean(nearest)}  "
        f"Families: {', '.join(family_names)}."
    )
