"""Which clips are held out for validation."""

from videotune.data.holdout import hold_out


def names(count: int) -> list[str]:
    return [f"set/video{i}" for i in range(count)]


def test_whole_videos_are_held_out_from_twenty_on() -> None:
    sources = [name for name in names(20) for _ in range(3)]
    held, notes = hold_out(sources, ["train"] * 60, 0.1, seed=0)
    chosen = {source for source, out in zip(sources, held, strict=True) if out}
    assert (len(chosen), sum(held), notes) == (2, 6, [])
    assert not chosen & {source for source, out in zip(sources, held, strict=True) if not out}
    few, notes = hold_out(sources[:57], ["train"] * 57, 0.1, seed=0)
    assert not any(few)
    assert notes == [
        "no validation: 19 source videos, 20 are needed "
        "(57 clips: some are cuts of one video, by their names or their pictures)"
    ]


def test_a_validation_dataset_takes_the_place_of_the_split() -> None:
    kinds = ["train"] * 30 + ["validation"] * 2
    held, notes = hold_out(names(32), kinds, 0.1, seed=0)
    assert held == [False] * 30 + [True] * 2
    assert notes == []
    _, notes = hold_out([*names(30), "set/video3", "set/video40"], kinds, 0.1, seed=0)
    assert notes == ["validation and training share 1 source video (set/video3): the ruler will look better than it is"]


def test_regularization_clips_are_never_held_out() -> None:
    kinds = ["train"] * 20 + ["regularization"] * 20
    held, notes = hold_out(names(20) * 2, kinds, 0.5, seed=0)
    assert sum(held) == 10
    assert not any(held[20:])
    assert len(notes) == 10
    assert hold_out(names(20), ["regularization"] * 20, 0.5, seed=0) == ([False] * 20, [])
