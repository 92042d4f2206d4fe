"""Make lines of the package wrong, one at a time, and list those that no test notices:
python scripts/mutants.py [FILE or FOLDER ...] [--sample N] [--processes N]

mutmut makes the mutants and runs the tests of tests/ that belong to the file's folder, in
processes that are forked after torch has been imported. Without FILE: the files of the
package that the last commit changed. The exit code is 1 if more than 5 % survive, or if
mutmut stops, whose reason is then printed. That is mostly a test that fails without any
mutant: its two runs of the unchanged code, for statistics and for the clean result, must
pass, in one process. So no name of a case has a backslash, which pytest escapes once
more in its second run, and no list of cases is a generator.

With --sample, N mutants are drawn from those of all files, by a fixed seed, and the share
of survivors is given with its interval of 95 % (Wilson 1927).

Left out of the count are mutants that change only the text of a message, whether ``zip``
compares lengths, or the name of an encoding: no test should depend on the first, and none
can see the others where text is UTF-8 anyway.
Mutants of lines that none of these tests reaches are counted by themselves: tests of
other folders may reach them (--tests adds those).
"""

import argparse
import ast
import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

COPIED = ("videotune", "tests", "docs", "research", "scripts", "benchmarks")

FOLDERS = (
    "adapters",
    "config",
    "data",
    "diffusion",
    "exporter",
    "latent_cache",
    "planner",
    "runs",
    "trainer",
    "validation",
)
"""Folders of the package whose lines can be mutated; tests/ has a folder of the same name."""

TESTS = {
    "adapters/adapter_types.py": [
        "tests/adapters/test_adapter_types.py",
        "tests/adapters/test_adapter_settings.py",
    ],
    "adapters/layers.py": ["tests/adapters", "tests/effects/test_effects_text.py"],
    "adapters/lora.py": [
        "tests/adapters",
        "tests/trainer/test_step.py",
        "tests/effects/test_effects_model.py",
        "tests/models/test_ltx2_connectors.py",
    ],
    "diffusion/base_targets.py": ["tests/diffusion"],
    "diffusion/loss.py": ["tests/diffusion"],
    "diffusion/noise_paths.py": ["tests/diffusion"],
    "diffusion/timesteps.py": ["tests/diffusion"],
    "exporter/adapter_export.py": [
        "tests/exporter",
        "tests/models/test_ltx2_connectors.py",
        "tests/effects/test_effects_options.py",
        "tests/commands/test_text_runs.py",
    ],
    "exporter/base_loras.py": [
        "tests/exporter/test_base_loras.py",
        "tests/exporter/test_written_facts.py",
    ],
    "exporter/formats.py": ["tests/exporter", "tests/effects/test_effects_text.py"],
    "exporter/full.py": [
        "tests/exporter",
        "tests/models/test_ltx2_connectors.py",
        "tests/effects/test_effects_options.py",
        *(
            f"tests/commands/test_adapter_runs.py::{test}"
            for test in (
                "test_a_merged_model_is_the_base_s_own_numbers_and_the_adapter",
                "test_a_run_its_files_and_its_merged_model_draw_the_same",
                "test_modules_with_scales_of_their_own_are_drawn_and_merged_as_trained",
            )
        ),
    ],
    "exporter/lora_inspect.py": [
        "tests/exporter/test_lora_inspect.py",
        "tests/exporter/test_lora_figures.py",
        "tests/models/test_ltx2_connectors.py",
    ],
    "exporter/lora_tools.py": [
        "tests/exporter/test_lora_tools.py",
        "tests/exporter/test_lora_figures.py",
        "tests/models/test_ltx2_connectors.py",
    ],
    "latent_cache/batch_source.py": [
        "tests/latent_cache",
        "tests/effects/test_effects_companions.py",
    ],
    "latent_cache/batches.py": [
        "tests/latent_cache",
        "tests/effects/test_effects_companions.py",
    ],
    "latent_cache/encode.py": [
        "tests/latent_cache",
        "tests/effects/test_effects_companions.py",
    ],
    "planner/memory.py": [
        "tests/planner/test_memory.py",
        "tests/planner/test_step_moments.py",
        "tests/planner/test_planner.py",
    ],
    "planner/out_of_memory.py": [
        "tests/planner/test_out_of_memory.py",
        "tests/commands/test_not_finite.py",
    ],
    "planner/plan.py": [
        "tests/planner/test_plan_parts.py",
        "tests/commands/test_plan_command.py",
        "tests/commands/test_model_runs.py::test_the_plan_says_what_each_expert_trains",
    ],
    "planner/settings.py": [
        "tests/planner/test_settings.py",
        "tests/commands/test_plan_command.py",
        "tests/effects/test_effects_training.py",
    ],
    "runs/checkpoint.py": ["tests/runs/test_checkpoints.py"],
    "runs/journal.py": ["tests/validation/test_journal_disk.py"],
    "trainer/attention.py": [
        "tests/trainer/test_attention.py",
        "tests/effects/test_effects_training.py",
    ],
    "trainer/build.py": [
        "tests/trainer/test_build.py",
        "tests/trainer/test_experts.py",
        "tests/trainer/test_golden.py",
        "tests/effects/test_effects_companions.py",
    ],
    "trainer/cache_filling.py": [
        "tests/trainer/test_cache_filling.py",
        "tests/trainer/test_shares_of_the_cache.py",
        "tests/trainer/test_build.py",
        "tests/trainer/test_restore_elsewhere.py",
        "tests/trainer/test_setup.py",
        "tests/effects/test_effects_companions.py",
    ],
    "trainer/cache_sharing.py": ["tests/trainer/test_shares_of_the_cache.py"],
    "trainer/captured_passes.py": [
        "tests/trainer/test_captured_passes.py",
        "tests/effects/test_effects_graphs.py",
    ],
    "trainer/deterministic.py": ["tests/trainer/test_loop.py"],
    "trainer/ema.py": ["tests/trainer/test_ema.py", "tests/trainer/test_step.py"],
    "trainer/expert_pool.py": [
        "tests/trainer/test_expert_pool.py",
        "tests/trainer/test_experts.py",
        "tests/trainer/test_build.py",
        "tests/effects/test_effects_state.py",
        "tests/effects/test_effects_training.py",
    ],
    "trainer/export.py": [
        "tests/trainer/test_export_facts.py",
        "tests/trainer/test_experts.py",
        "tests/trainer/test_init_from.py",
        "tests/effects/test_effects_options.py",
        "tests/effects/test_effects_outputs.py",
        "tests/effects/test_effects_state.py",
    ],
    "trainer/gradients.py": [
        "tests/trainer/test_gradients.py",
        "tests/trainer/test_accumulation.py",
        "tests/trainer/test_step.py",
        "tests/effects/test_effects_float16.py",
        "tests/effects/test_effects_training.py",
    ],
    "trainer/init_from.py": [
        "tests/trainer/test_init_from.py",
        "tests/effects/test_effects_options.py",
        "tests/effects/test_effects_state.py",
    ],
    "trainer/loop.py": [
        "tests/trainer/test_loop.py",
        "tests/trainer/test_callbacks.py",
        "tests/trainer/test_captured_passes.py",
        "tests/trainer/test_experts.py",
        "tests/effects/test_effects_state.py",
        "tests/effects/test_effects_training.py",
    ],
    "trainer/lr_schedule.py": ["tests/trainer/test_step.py"],
    "trainer/micro_batches.py": [
        "tests/trainer/test_micro_batches.py",
        "tests/trainer/test_step.py",
    ],
    "trainer/optimizer_bytes.py": ["tests/trainer/test_optimizer_contract.py"],
    "trainer/optimizers.py": [
        "tests/trainer/test_optimizer_parts.py",
        "tests/trainer/test_optimizers.py",
    ],
    "trainer/progress.py": [
        "tests/trainer/test_progress.py",
        "tests/effects/test_effects_outputs.py",
        "tests/commands/test_validation_runs.py::test_the_progress_bar_has_times_seen_with_their_band",
        "tests/commands/test_validation_runs.py::test_the_time_left_counts_what_is_done_between_steps",
    ],
    "trainer/rank_meter.py": ["tests/trainer/test_rank_figures.py"],
    "trainer/repeated_passes.py": [
        "tests/trainer/test_repeated_passes.py",
        "tests/effects/test_effects_graphs.py",
    ],
    "trainer/restoring.py": [
        "tests/trainer/test_resume.py",
        "tests/trainer/test_saves.py",
        "tests/trainer/test_restore_elsewhere.py",
    ],
    "trainer/resume.py": [
        "tests/trainer/test_resume.py",
        "tests/trainer/test_sampled_prompts.py",
        "tests/effects/test_effects_options.py",
    ],
    "trainer/saving.py": [
        "tests/trainer/test_saves.py",
        "tests/trainer/test_full_disk_waits.py",
        "tests/trainer/test_disk_room.py",
        "tests/trainer/test_build.py",
        "tests/trainer/test_callbacks.py",
    ],
    "trainer/setup.py": [
        "tests/trainer/test_setup.py",
        "tests/trainer/test_build.py",
        "tests/trainer/test_init_from.py",
    ],
    "trainer/step.py": [
        "tests/trainer/test_step.py",
        "tests/trainer/test_accumulation.py",
        "tests/trainer/test_golden.py",
        "tests/effects/test_effects_graphs.py",
        "tests/effects/test_effects_training.py",
    ],
    "trainer/step_record.py": [
        "tests/trainer/test_step.py",
        "tests/trainer/test_accumulation.py",
        "tests/trainer/test_progress.py",
    ],
    "trainer/throughput.py": [
        "tests/trainer/test_throughput.py",
        "tests/validation/test_monitor.py",
    ],
    "trainer/trainer.py": [
        "tests/trainer/test_callbacks.py",
        "tests/trainer/test_loop.py",
        "tests/trainer/test_step.py",
        "tests/effects/test_effects_options.py",
        "tests/effects/test_effects_state.py",
        "tests/commands/test_validation_runs.py::test_it_is_counted_as_often_as_it_is_due",
    ],
    "trainer/views_counted.py": [
        "tests/commands/test_validation_runs.py::test_views_are_counted_anew_as_they_grow_and_at_the_end"
    ],
    "validation/overfitting.py": ["tests/validation/test_verdict.py"],
}
"""Tests of files whose tests have another name than test_FILE.py of their folder."""

FOLDER_TESTS = {
    "exporter": ["tests/exporter", "tests/models/test_ltx2_connectors.py"],
    "planner": ["tests/planner", "tests/commands/test_plan_command.py"],
    "trainer": [
        "tests/trainer/test_accumulation.py",
        "tests/trainer/test_build.py",
        "tests/trainer/test_callbacks.py",
        "tests/trainer/test_captured_passes.py",
        "tests/trainer/test_disk_room.py",
        "tests/trainer/test_expert_pool.py",
        "tests/trainer/test_experts.py",
        "tests/trainer/test_golden.py",
        "tests/trainer/test_gradients.py",
        "tests/trainer/test_init_from.py",
        "tests/trainer/test_loop.py",
        "tests/trainer/test_optimizers.py",
        "tests/trainer/test_progress.py",
        "tests/trainer/test_rank_figures.py",
        "tests/trainer/test_restore_elsewhere.py",
        "tests/trainer/test_resume.py",
        "tests/trainer/test_saves.py",
        "tests/trainer/test_shared_saves.py",
        "tests/trainer/test_shown_notes.py",
        "tests/trainer/test_step.py",
        "tests/effects/test_effects_float16.py",
        "tests/effects/test_effects_options.py",
        "tests/effects/test_effects_outputs.py",
        "tests/effects/test_effects_state.py",
        "tests/effects/test_effects_training.py",
    ],
}
"""Tests of all other files of folders that need more, or less, than all of their own
tests: those of several processes take minutes, and mutmut sees only the first process.
"""

NOT_UNDER_MUTANTS = (
    "tests/adapters/test_fused_lora.py::test_it_compiles_into_one_graph",
)
"""Tests that fail without any mutant, because mutmut's calls break a compiled graph."""

MOST_SURVIVORS = 0.05

LINES_OF_A_REASON = 40
"""Lines of mutmut's output that are shown where it stops: a test's traceback fits."""

SPINNER = re.compile("[\u2800-\u28ff] ")
"""Beginning of the lines in which mutmut shows that it is alive."""

SECONDS_BESIDE_TESTS = 30.0
"""What mutmut adds to the time of the tests before it gives a mutant its limit, fifteen
times as long: others may use the machine, and a mutant that was cut off counts as killed.
"""

SURVIVED = 0
UNREACHED = (5, 33)
"""mutmut's codes of a mutant: every test passed, and no test reaches the function."""


@dataclass(frozen=True)
class Mutant:
    """A function with one place changed."""

    name: str
    original: ast.AST
    mutated: ast.AST
    exit_code: int | None
    """None: it was not run."""

    @property
    def is_counted(self) -> bool:
        """Whether a test could and should notice it."""
        return _without_texts(self.original) != _without_texts(self.mutated)

    @property
    def difference(self) -> str:
        """The changed lines, old and new."""
        before = _without_name(self.original)
        after = _without_name(self.mutated)
        lines = [f"    - {line.strip()}" for line in before if line not in after]
        lines += [f"    + {line.strip()}" for line in after if line not in before]
        return "\n".join(lines)


def _without_name(tree: ast.AST) -> list[str]:
    """Return a function's lines; its first line shows defaults of arguments."""
    text = ast.unparse(tree)
    return re.sub(r"\w+__mutmut_\w+", "function", text, count=1).splitlines()


def _without_texts(tree: ast.AST) -> str:
    """Return a function's code without its name, texts, ``strict=`` and ``encoding=``."""
    copy = ast.parse(ast.unparse(tree))
    for node in ast.walk(copy):
        if isinstance(node, ast.FunctionDef):
            node.name = ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value or node.value.startswith("XX"):
                node.value = ""
        elif isinstance(node, ast.Call):
            node.keywords = [
                keyword
                for keyword in node.keywords
                if keyword.arg not in ("strict", "encoding")
            ]
    return ast.dump(copy)


def tests_of(path: Path) -> list[str]:
    """Return the tests that are to hold the lines of a file, the fewer the faster."""
    name = path.relative_to("videotune").as_posix()
    if name in TESTS:
        return TESTS[name]
    folder = Path("tests") / path.parts[1]
    own_tests = folder / f"test_{path.name}"
    if (ROOT / own_tests).is_file():
        return [str(own_tests)]
    return FOLDER_TESTS.get(path.parts[1], [str(folder)])


def changed_files() -> list[Path]:
    """Return the files of the package that the last commit changed."""
    command = [
        "git",
        "diff",
        "--name-only",
        "--diff-filter=AM",
        "HEAD~1",
        "--",
        "videotune",
    ]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [Path(line) for line in listing.splitlines() if line.endswith(".py")]
    return [path for path in paths if len(path.parts) > 2 and path.parts[1] in FOLDERS]


def prepare(work: Path) -> None:
    """Copy the repository."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, work / name)
    for path in [*ROOT.glob("*.md"), ROOT / "requirements.lock"]:
        shutil.copy(path, work)


def configure(work: Path, files: list[Path], more_tests: list[str]) -> None:
    """Have ``files`` mutated, and their tests and ``more_tests`` run."""
    tests = list(more_tests)
    for path in files:
        tests += [test for test in tests_of(path) if test not in tests]

    settings = {
        "source_paths": ["videotune"],
        "only_mutate": [path.as_posix() for path in files],
        "also_copy": [name for name in COPIED if name not in ("videotune", "tests")],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": [
            *("-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not long"),
            *("-p", "no:effect_marks"),  # a mutant gets some tests of a key, not all
            *(f"--deselect={test}" for test in NOT_UNDER_MUTANTS),
        ],
        "use_git_change_detection": False,
        "timeout_constant": SECONDS_BESIDE_TESTS,
    }  # fmt: skip

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    (work / "pyproject.toml").write_text(
        "\n".join([text, "[tool.mutmut]", *lines, ""]), encoding="utf-8"
    )


def run(work: Path, names: list[str], processes: int | None = None) -> None:
    """Run mutmut; of ``names`` only these mutants.

    Args:
        work: the folder that ``prepare`` made.
        names: the mutants; empty: all.
        processes: how many are tried at once; None: as many as there are cores.

    Raises:
        SystemExit: if mutmut stops, with what it said last.
    """
    command = [sys.executable, "-m", "mutmut", "run"]
    if processes is not None:
        command += ["--max-children", str(processes)]
    command += names
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = work / "mutmut.log"

    with (
        log.open("wb") as log_file,
        subprocess.Popen(
            command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 65536):
            log_file.write(chunk)
            sys.stderr.buffer.write(chunk)
            sys.stderr.buffer.flush()

    if process.returncode != 0:
        reason = last_lines(log.read_text(encoding="utf-8", errors="replace"))
        raise SystemExit(
            f"mutmut stopped with exit status {process.returncode}, so nothing was measured."
            f" {log} has all that it printed; its last lines:\n{reason}"
        )


def last_lines(text: str) -> str:
    """Return the end of what mutmut printed, without its spinner."""
    lines = [line.rstrip() for line in re.split("[\r\n]+", text)]
    spoken = [line for line in lines if line and not SPINNER.match(line)]
    return "\n".join(spoken[-LINES_OF_A_REASON:])


def mutants_in(code: str, results: Mapping[str, int | None]) -> Iterator[Mutant]:
    """Yield the mutants in a file that mutmut has written.

    Args:
        code: the file, in which each function stands with all its mutants.
        results: mutmut's exit code by the mutant's name.
    """
    functions = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node

    for key, exit_code in results.items():
        name = key.rpartition(".")[2]
        function, _, _ = name.rpartition("__mutmut_")
        original = functions.get(f"{function}__mutmut_orig")
        mutated = functions.get(name)
        if original is not None and mutated is not None:
            yield Mutant(key, original, mutated, exit_code)


def mutants_of(work: Path, path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a file with their results."""
    mutated_file = work / "mutants" / path
    results_file = mutated_file.with_name(f"{path.name}.meta")
    results = json.loads(results_file.read_text(encoding="utf-8"))["exit_code_by_key"]
    yield from mutants_in(mutated_file.read_text(encoding="utf-8"), results)


def draw_mutants(
    work: Path, files: list[Path], count: int, seed: int
) -> dict[str, Path]:
    """Draw ``count`` of the mutants that are counted; return the file of each."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    file_of_mutant = {}
    for path in files:
        code = (ROOT / path).read_text(encoding="utf-8")
        with contextlib.chdir(work):  # mutmut reads its configuration there
            mutated_file = mutate_file_contents(str(path), code)
        names = [get_mutant_name(path, name) for name in mutated_file.mutant_names]
        for mutant in mutants_in(mutated_file.code, dict.fromkeys(names)):
            if mutant.is_counted:
                file_of_mutant[mutant.name] = path

    print(f"{count} of {len(file_of_mutant)} mutants are drawn")
    drawn = random.Random(seed).sample(
        sorted(file_of_mutant), min(count, len(file_of_mutant))
    )
    return {name: file_of_mutant[name] for name in drawn}


def interval(survived: int, tried: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share."""
    z = 1.96
    if tried == 0:
        return 0.0, 1.0
    share = survived / tried
    center = share + z**2 / (2 * tried)
    spread = z * math.sqrt(share * (1 - share) / tried + z**2 / (4 * tried**2))
    scale = 1 + z**2 / tried
    return (center - spread) / scale, (center + spread) / scale


def report(work: Path, files: list[Path], names: set[str] | None) -> float:
    """Print the survivors by file and return their share of the counted mutants.

    Args:
        names: the mutants that were drawn; None: all.
    """
    counted = 0
    survived = 0
    unreached = 0
    for path in files:
        mutants = [
            mutant
            for mutant in mutants_of(work, path)
            if mutant.is_counted
            and mutant.exit_code is not None
            and (names is None or mutant.name in names)
        ]
        reached = [mutant for mutant in mutants if mutant.exit_code not in UNREACHED]
        survivors = [mutant for mutant in reached if mutant.exit_code == SURVIVED]
        counted += len(reached)
        survived += len(survivors)
        unreached += len(mutants) - len(reached)

        print(
            f"{path}: {len(survivors)} of {len(reached)} mutants survive,"
            f" {len(mutants) - len(reached)} are not reached"
        )
        for mutant in survivors:
            print(f"  {mutant.name}\n{mutant.difference}")
        for mutant in mutants:
            if mutant.exit_code in UNREACHED:
                print(f"  not reached: {mutant.name}\n{mutant.difference}")

    share = survived / max(1, counted)
    low, high = interval(survived, counted)
    print(f"survivors: {survived} of {counted} ({share:.1%}), {unreached} not reached")
    if names is not None:
        print(f"interval of 95 %: {low:.1%} to {high:.1%}")
    return share


def main() -> int:
    """Mutate, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="files or folders")
    parser.add_argument(
        "--only", action="append", default=[], help="a mutant's name or pattern"
    )
    parser.add_argument("--sample", type=int, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--tests", action="append", default=[], help="tests of other folders"
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="how many mutants are tried at once (default: one per core)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "mutation",
        help="a folder to work in",
    )
    arguments = parser.parse_args()

    files = []
    for path in arguments.files or changed_files():
        files += sorted(path.glob("*.py")) if path.is_dir() else [path]
    if not files:
        print("no file of the package to mutate")
        return 0
    without_tests = [str(path) for path in files if path.parts[1] not in FOLDERS]
    if without_tests:
        parser.error(
            f"no tests are known for {', '.join(without_tests)}: add their folder to FOLDERS"
        )

    work = arguments.work.absolute()
    prepare(work)
    configure(work, files, arguments.tests)

    names = arguments.only
    drawn = None
    if arguments.sample:
        drawn = draw_mutants(work, files, arguments.sample, arguments.seed)
        names = list(drawn)
        files = sorted(set(drawn.values()))
        configure(work, files, arguments.tests)

    run(work, names, arguments.processes)
    return int(report(work, files, set(names) if drawn else None) > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
