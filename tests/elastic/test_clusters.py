"""The files for clusters: they have fields that there are, and their command trains."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.elastic.conftest import WorkOf
from tests.support.elastic import (
    VARIABLES,
    Work,
    ended,
    printed,
    start,
    wait_until,
)
from tests.support.launcher import free_port
from videotune.errors import DONE
from videotune.reporter.outcome import status
from videotune.runs.checkpoint import complete_checkpoints

DEPLOY = Path(__file__).parents[2] / "deploy"
FIELDS: Mapping[str, Any] = json.loads(
    (Path(__file__).parent / "cluster_fields.json").read_text()
)
"""What the readers of these files allow, as far as the files use it."""

SLURM_OPTIONS = {
    "--job-name",
    "--nodes",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--cpus-per-task",
    "--time",
    "--signal",
    "--requeue",
    "--no-kill",
    "--open-mode",
    "--output",
}
"""Options in the manual of sbatch 22.05 that the script may use."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "printed.log"


@pytest.fixture
def small_machine(tmp_path: Path) -> dict[str, str]:
    """Variables under which torchrun of this environment is found."""
    programs = tmp_path / "bin"
    programs.mkdir()
    launcher = programs / "torchrun"
    python = shlex.quote(sys.executable)
    launcher.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)
    path = os.environ["PATH"]
    return {"PATH": f"{programs}:{path}"}


def assert_trained(work: Work, code: int, log: Path) -> None:
    assert code == DONE, printed([log])
    assert status(work.run)["state"] == "done"


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_every_field_is_one_that_there_is(name: str) -> None:
    content = yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())
    Draft202012Validator(FIELDS[name]).validate(content)


def test_the_batch_script_is_clean_and_has_options_of_sbatch() -> None:
    script = DEPLOY / "slurm.sbatch"
    linter = shutil.which("shellcheck")
    assert linter, "no shellcheck on PATH: apt-get install shellcheck"
    linted = subprocess.run([linter, str(script)], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    lines = script.read_text().splitlines()
    options = {
        line.split()[1].partition("=")[0]
        for line in lines
        if line.startswith("#SBATCH ")
    }
    assert options <= SLURM_OPTIONS
    assert {"--signal", "--requeue", "--open-mode"} <= options


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes.yaml", "skypilot.yaml"])
def test_the_page_has_the_whole_file(name: str) -> None:
    page = DEPLOY.parent / "docs" / "how-to" / f"{name.partition('.')[0]}.md"
    assert f"\n{(DEPLOY / name).read_text()}```" in page.read_text()


def test_the_command_for_kubernetes_trains(
    small_machine: dict[str, str], work_of: WorkOf, log: Path
) -> None:
    """With the variables that the training operator makes of the policy."""
    work = work_of(10)
    job = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["spec"]
    policy = job["elasticPolicy"]
    (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    command = list(container["command"])
    command[command.index("/data/work/config.yaml")] = str(work.config)
    command[command.index("/data/runs/first")] = str(work.run)
    variables = {
        entry["name"]: entry["value"]
        for entry in container["env"]
        if entry["name"] != "HF_HOME"
    }
    variables |= {
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_ENDPOINT": "127.0.0.1:0",
        "PET_NNODES": f"{policy['minReplicas']}:1",
        "PET_NPROC_PER_NODE": "2",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    process = start(command, log, small_machine | variables)
    assert_trained(work, ended(process, [log]), log)
    assert "on 2 processes" in printed([log])


def test_the_command_for_skypilot_trains(
    small_machine: dict[str, str], work_of: WorkOf, log: Path
) -> None:
    work = work_of(10)
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task["envs"]) == {"CONFIG", "RUN", "HF_HOME"}
    variables = {
        "CONFIG": str(work.config),
        "RUN": str(work.run),
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_TASK_ID": "test",
    }
    process = start(["bash", "-c", task["run"]], log, small_machine | variables)
    assert_trained(work, ended(process, [log]), log)
    assert "on 2 processes" in printed([log])


class Slurm:
    """What the script calls of Slurm, on one machine: srun starts the command, and hands
    on a signal as the real one does; scontrol writes down what it is asked.
    """

    def __init__(self, folder: Path, state: str = "RUNNING") -> None:
        self.requeued = folder / "requeued"
        self.job = str(free_port())  # the port in the script comes from it
        (folder / "state").write_text(
            f"JobId={self.job}\n   JobState={state} Reason=None\n"
        )
        programs = {
            "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
            "scontrol": f"""case "$1 $2" in
"show hostnames") echo localhost ;;
"show job") cat {folder}/state ;;
"requeue {self.job}") touch {self.requeued} ;;
*) exit 1 ;;
esac""",
        }
        for name, lines in programs.items():
            program = folder / "bin" / name
            program.write_text(f"#!/bin/sh\n{lines}\n")
            program.chmod(0o755)

    def start(self, work: Work, log: Path, variables: Mapping[str, str]) -> Any:
        settings = {
            "CONFIG": str(work.config),
            "RUN": str(work.run),
            "PROCESSES": "2",
            "SLURM_JOB_ID": self.job,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
        }
        script = str(DEPLOY / "slurm.sbatch")
        return start(["bash", script], log, VARIABLES | settings | dict(variables))


@pytest.mark.parametrize(
    ("number", "state", "is_requeued"),
    [
        (signal.SIGUSR1, "RUNNING", True),
        (signal.SIGTERM, "RUNNING", True),
        (signal.SIGTERM, "CANCELLED", False),
    ],
)
def test_an_interrupted_job_is_requeued(
    number: signal.Signals,
    state: str,
    is_requeued: bool,
    tmp_path: Path,
    small_machine: dict[str, str],
    work_of: WorkOf,
    log: Path,
) -> None:
    """The time limit signals the script, a preemption and scancel all processes."""
    work = work_of(5000)
    slurm = Slurm(tmp_path, state)
    job = slurm.start(work, log, small_machine)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    if number == signal.SIGUSR1:
        job.send_signal(number)
    else:
        os.killpg(job.pid, number)
    assert ended(job, [log]) != DONE
    assert complete_checkpoints(work.run)[-1].step == work.step
    assert slurm.requeued.exists() == is_requeued


def test_a_requeued_job_finishes_the_run(
    tmp_path: Path, small_machine: dict[str, str], work_of: WorkOf, log: Path
) -> None:
    work = work_of(200)
    slurm = Slurm(tmp_path)
    job = slurm.start(work, log, small_machine)
    wait_until(lambda: work.step >= 3, "some steps", [log])
    job.send_signal(signal.SIGUSR1)
    assert ended(job, [log]) != DONE
    assert work.step < 200

    slurm.requeued.unlink()
    job = slurm.start(work, log, small_machine)
    assert_trained(work, ended(job, [log]), log)
    assert not slurm.requeued.exists()
    assert len(work.resumes()) == 1
