"""Record which values the configs of effect tests gave to the keys that their marks name.

A mark ``effect(key)`` says that its test shows what the key does. That can only be so if
the key had another value than its default in that test, and two values in all tests that
name it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest

Values = dict[str, dict[str, set[str]]]
"""By test function and key: the values, as JSON."""


def keys_of(item: pytest.Item) -> list[str]:
    """Return the keys in the ``effect`` marks of a test."""
    keys: list[str] = []
    for mark in item.iter_markers("effect"):
        keys += mark.args
    return keys


def function_of(item: pytest.Item) -> str:
    """Return the test function of an item, which may be one of several cases."""
    return item.nodeid.partition("[")[0]


@contextmanager
def recorded(keys: list[str], values: Mapping[str, set[str]]) -> Iterator[None]:
    """Add the value of each key to ``values`` whenever a config is parsed."""
    from videotune.config.data_schema import Section
    from videotune.config.schema import Config

    validate = Config.model_validate
    build = Section.__init__

    def model_validate(raw: Any, **options: Any) -> Config:
        config = validate(raw, **options)
        for key in keys:
            for value in values_of(config, key):
                values[key].add(value)
        return config

    def section_init(section: Section, **fields: Any) -> None:
        build(section, **fields)
        prefix = SECTION_PREFIXES.get(type(section).__name__)
        if prefix is None:
            return
        for key in keys:
            if key.startswith(prefix):
                name = key.removeprefix(prefix)
                values[key].add(as_json(getattr(section, name)))

    Config.model_validate = model_validate  # type: ignore[method-assign, assignment]
    Section.__init__ = section_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Config.model_validate
        Section.__init__ = build  # type: ignore[method-assign]


SECTION_PREFIXES = {
    "Lora": "lora.",
    "Optimizer": "optimizer.",
    "VideoConfig": "video_config.",
    "Embedding": "embedding.",
    "Ema": "ema.",
}
"""Sections that tests also build by themselves."""


def values_of(config: Any, key: str) -> list[str]:
    """Return the values of a key in a config: of ``datasets`` one for each dataset."""
    if key.startswith("datasets."):
        name = key.removeprefix("datasets.")
        return [as_json(getattr(dataset, name)) for dataset in config.datasets]
    if key == "prior_preservation":  # short for a dataset, which takes its place
        kinds = [dataset.kind for dataset in config.datasets]
        return [as_json("regularization" in kinds or None)]
    return [as_json(attrgetter(key)(config))]


def default_of(field: Any) -> set[str]:
    """Return the default of a field, if it has one."""
    if field.is_required():
        return set()
    return {as_json(field.get_default(call_default_factory=True))}


def as_json(value: Any) -> str:
    """Return a value as JSON; of sections their fields."""
    return json.dumps(
        value, sort_keys=True, default=lambda section: section.model_dump(mode="json")
    )


class EffectMarks:
    """A plugin of pytest: fails the session if a mark names a key that its tests did not
    change.

    A test function is judged if all of its selected cases have passed, also where
    several workers shared them out. ``-p no:effect_marks`` switches it off, for runs
    of some of the tests of a key: they may give it one value.
    """

    def __init__(self) -> None:
        self.values: Values = defaultdict(lambda: defaultdict(set))
        self.passed: dict[str, int] = defaultdict(int)
        self.selected: dict[str, int] = {}
        self.keys: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            keys = keys_of(item)
            if not keys:
                continue
            function = function_of(item)
            self.selected[function] = self.selected.get(function, 0) + 1
            known_keys = self.keys.setdefault(function, [])
            known_keys += [key for key in keys if key not in known_keys]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        keys = keys_of(item)
        if not keys:
            return (yield)
        with recorded(keys, self.values[function_of(item)]):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.partition("[")[0]] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["effect_marks"] = json.dumps(self._as_lists())
            return

        problems = self._problems()
        if problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            writer = session.config.get_terminal_writer()
            for line in problems:
                writer.line(f"\n{line}", red=True)

    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of pytest-xdist has recorded."""
        text = getattr(node, "workeroutput", {}).get("effect_marks")
        if text is None:
            return
        worker = json.loads(text)
        self.selected |= worker["selected"]
        self.keys |= worker["keys"]
        for function, by_key in worker["values"].items():
            for key, values in by_key.items():
                self.values[function][key].update(values)

    def _as_lists(self) -> dict[str, Any]:
        values = {
            function: {key: sorted(found) for key, found in by_key.items()}
            for function, by_key in self.values.items()
        }
        return {"selected": self.selected, "keys": self.keys, "values": values}

    def _problems(self) -> list[str]:
        """Return a line for each mark that says more than its tests did."""
        from videotune.config.schema import leaves

        problems = []
        values_by_key: dict[str, set[str]] = defaultdict(set)
        unfinished: set[str] = set()
        for function, count in sorted(self.selected.items()):
            if self.passed.get(function, 0) < count:
                unfinished.update(self.keys[function])
                continue
            for key in self.keys[function]:
                values = self.values[function][key]
                values_by_key[key] |= values
                if not values - default_of(leaves()[key]):
                    problems.append(
                        f"{function}: its mark names {key}, which stayed at its default"
                    )

        for key, values in values_by_key.items():
            if len(values) < 2 and key not in unfinished:
                problems.append(
                    f"{key}: all tests that name it gave it one value alone: {min(values)}"
                )
        return problems
