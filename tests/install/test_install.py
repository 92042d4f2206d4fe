"""install.sh chooses the build of PyTorch by the driver, and install.ps1 reads the same
table in the same order.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "scripts" / "torch_builds.txt"
TORCH = next(
    name
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    if name.startswith("torch>")
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="install.sh is for bash")


def builds() -> list[list[str]]:
    lines = TABLE.read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def install(
    tmp_path: Path, *options: str, dry_run: bool = True, stdin: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run with these programs only, and those that every system has."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    program(folder, "python3", f'exec {sys.executable} "$@"')
    for name in (
        "bash",
        "sh",
        "sed",
        "sort",
        "head",
        "grep",
        "uname",
        "dirname",
    ):
        target = shutil.which(name)
        assert target is not None, name
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    clone = tmp_path / "clone"
    if not clone.exists():
        (clone / "scripts").mkdir(parents=True)
        for name in ("install.sh", "pyproject.toml", "scripts/torch_builds.txt"):
            shutil.copy(ROOT / name, clone / name)
    return subprocess.run(
        [
            str(folder / "bash"),
            str(clone / "install.sh"),
            *(["--dry-run"] if dry_run else []),
            *options,
        ],
        # Nothing answers at this proxy, so that no index is reached.
        env={
            "PATH": str(folder),
            "HOME": str(tmp_path),
            "https_proxy": "http://127.0.0.1:9",
        },
        stdin=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def commands(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line[2:].replace("\\", "") for line in lines if line.startswith("+ ")]


def nvidia_smi(tmp_path: Path, output: str, exit_code: int = 0) -> None:
    lines = "\n".join(f"echo '{line}'" for line in output.splitlines())
    program(tmp_path / "bin", "nvidia-smi", f"{lines}\nexit {exit_code}")


CARDS = [
    ("580.95.05, 8.9", "cu130"),
    ("580.65.06, 12.0", "cu130"),
    ("575.64, 12.0", "cu128"),
    ("570.133.20, 8.6", "cu128"),
    ("550.163.01, 8.9", "cu126"),
    ("525.60.13, 7.5", "cu126"),
    ("580.95.05, 6.1", "cu126"),  # code for Pascal is in CUDA 12.6 at most
    ("580.95.05, 8.9\n580.95.05, 6.1", "cu126"),  # the oldest card decides
    ("470.256.02, 8.6", "cpu"),
    ("580.95.05, 3.5", "cpu"),
]


@pytest.mark.parametrize(("output", "build"), CARDS)
def test_the_driver_and_the_oldest_card_choose_the_build(
    tmp_path: Path, output: str, build: str
) -> None:
    nvidia_smi(tmp_path, output)
    done = install(tmp_path, "--pip")
    index = f"--index-url https://download.pytorch.org/whl/{build} {TORCH}"
    assert (
        f".venv/bin/python -m pip --disable-pip-version-check install {index}"
        in commands(done)
    )
    assert ("https://www.nvidia.com/drivers" in done.stdout) == (build == "cpu")


@pytest.mark.parametrize(
    ("output", "exit_code"),
    [
        (
            "NVIDIA-SMI has failed because it couldn`t communicate with the NVIDIA driver.",
            9,
        ),
        ("No devices were found", 6),
        ("[N/A], [N/A]", 0),
        ("", 0),
    ],
)
def test_a_driver_that_does_not_answer_gives_the_build_for_the_cpu(
    tmp_path: Path, output: str, exit_code: int
) -> None:
    nvidia_smi(tmp_path, output, exit_code)
    done = install(tmp_path, "--pip")
    assert any("/whl/cpu " in line for line in commands(done))
    assert "Is the driver loaded?" in done.stdout


def test_without_a_driver_all_steps_come_in_order(tmp_path: Path) -> None:
    done = install(tmp_path, "--extras", "notify")
    pip = ".venv/bin/python -m pip --disable-pip-version-check install"
    assert commands(done) == [
        "python3 -m venv .venv",
        f"{pip} --index-url https://download.pytorch.org/whl/cpu {TORCH}",
        f"{pip} .[notify]",
        ".venv/bin/videotune doctor",
    ]
    assert "no driver of NVIDIA" in done.stdout
    assert "Nothing was installed" in done.stdout.splitlines()[-1], "a dry run"


def test_uv_is_installed_only_when_told_to_and_used_where_it_is(tmp_path: Path) -> None:
    silent = commands(install(tmp_path))
    assert not any("astral.sh" in line for line in silent), "nobody was there to agree"

    told = commands(install(tmp_path, "--yes"))
    assert told[0] == "sh -c curl -LsSf https://astral.sh/uv/install.sh | sh"
    assert told[1] == "uv venv --python >=3.11 .venv"
    assert told[3] == "uv pip install --python .venv/bin/python ."

    program(tmp_path / "bin", "uv", "exit 0")
    assert commands(install(tmp_path)) == told[1:]
    assert commands(install(tmp_path, "--pip")) == silent


def test_on_macos_the_index_of_pypi_has_the_build(tmp_path: Path) -> None:
    program(tmp_path / "bin", "uname", "echo Darwin")
    told = commands(install(tmp_path, "--pip"))
    assert (
        told[1]
        == f".venv/bin/python -m pip --disable-pip-version-check install {TORCH}"
    )


def python_with_pip(tmp_path: Path, pip: str, other: str) -> None:
    """Put a Python into the clone's environment, whose pip is a line of shell."""
    install(tmp_path)  # makes the clone
    environment = tmp_path / "clone" / ".venv" / "bin"
    environment.mkdir(parents=True)
    program(environment, "python", f'case "$*" in *pip*) {pip} ;; esac\n{other}')
    program(environment, "videotune", "exit 0")


def test_an_index_that_is_not_reached_is_named_with_the_two_ways_round_it(
    tmp_path: Path,
) -> None:
    no_index = 'case "$*" in *--index-url*) exit 1 ;; esac; exit 0'
    python_with_pip(tmp_path, no_index, f'exec {sys.executable} "$@"')

    done = install(tmp_path, "--pip", dry_run=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "install.sh: PyTorch's index (download.pytorch.org) was not reached. "
        "With your own pip index: make demo, or ./install.sh --torch-from-pip"
    )
    assert "Installed" not in done.stdout

    done = install(tmp_path, "--pip", "--torch-from-pip", dry_run=False)
    assert commands(done) == [
        f".venv/bin/python -m pip --disable-pip-version-check install {TORCH}",
        ".venv/bin/python -m pip --disable-pip-version-check install .",
        ".venv/bin/videotune doctor",
    ]
    assert "Installed into .venv" in done.stdout


def test_a_failure_beside_an_index_that_answers_is_left_to_pip(tmp_path: Path) -> None:
    python_with_pip(tmp_path, "echo 'no room on the disk' >&2; exit 1", "exit 0")
    done = install(tmp_path, "--pip", dry_run=False)
    assert done.returncode == 1
    assert "no room on the disk" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("the reason is above")


def test_a_question_that_is_closed_without_an_answer_says_what_to_do(
    tmp_path: Path,
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"\x04")  # Ctrl-D
    done = install(tmp_path, dry_run=False, stdin=terminal)
    os.close(terminal)
    os.close(keyboard)
    assert done.returncode == 1
    assert "--yes installs uv" in done.stderr
    assert "--pip goes without" in done.stderr
    assert "+ " not in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--build", "cpu", "--torch-from-pip"), "Leave one out"),
        (("--build", "cu999"), "is not in scripts/torch_builds.txt"),
        (("--build",), "--build needs a name"),
        (("--extras", ""), "--extras needs names"),
        (("--gpu",), "no such option: --gpu"),
    ],
)
def test_options_that_say_nothing_are_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = install(tmp_path, *options)
    assert done.returncode != 0
    assert words in done.stderr
    assert "+ " not in done.stdout


def test_a_build_can_be_named_whatever_the_driver(tmp_path: Path) -> None:
    nvidia_smi(tmp_path, "580.95.05, 8.9")
    for build in ("cpu", "cu126"):
        done = install(tmp_path, "--pip", "--build", build)
        assert any(f"/whl/{build} " in line for line in commands(done))


def test_the_table_goes_from_the_newest_build_to_the_oldest() -> None:
    rows = builds()
    assert rows[0][0] == "cu130", "the build of PyPI for Linux"
    for column in (1, 2, 3):
        versions = [tuple(map(int, row[column].split("."))) for row in rows]
        assert versions == sorted(versions, reverse=True)
    assert [row[0] for row in rows] == sorted({row[0] for row in rows}, reverse=True)


def test_install_ps1_reads_the_same_table_and_takes_the_same_steps() -> None:
    """PowerShell is not here: its script is compared with the one that was run."""
    shell = (ROOT / "install.sh").read_text()
    power = (ROOT / "install.ps1").read_text()
    for text in (
        "scripts/torch_builds.txt",
        "https://download.pytorch.org/whl",
        "--query-gpu=driver_version,compute_cap",
        "--format=csv,noheader",
        "pyproject.toml",
        "PyTorch's index (download.pytorch.org) was not reached",
        "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20)",
        "videotune studio    # in the browser; or in the terminal: videotune demo",
    ):
        assert text in shell
        assert text in power
    assert '"doctor"' in power
    assert "PositionalBinding = $false" in power, "--dry-run is no name of an extra"
    drivers = [row[2] for row in builds()]
    assert f"({drivers[-1]} or newer)" in power
    assert f"({builds()[-1][1]} or newer)" in shell
    assert re.search(r"\$name, \$null, \$driver, \$capability = -split \$line", power)

    # Every bracket of the script closes.
    code = re.sub(r"#.*|\"[^\"\n]*\"|'[^'\n]*'", "", power)
    for opening, closing in ("()", "[]", "{}"):
        assert code.count(opening) == code.count(closing), opening


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on PATH")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", str(ROOT / "install.sh")], check=True)


@pytest.mark.skipif(shutil.which("pwsh") is None, reason="no PowerShell on PATH")
def test_powershell_parses_its_script() -> None:
    script = (
        f"[scriptblock]::Create((Get-Content -Raw '{ROOT / 'install.ps1'}')) | Out-Null"
    )
    subprocess.run(["pwsh", "-NoProfile", "-Command", script], check=True)
