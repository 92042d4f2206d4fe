"""Train on Modal: `modal run deploy/modal_app.py --data dataset --preset "wan 2.1 1.3B LoRA 16GB"`.

Clips are uploaded to a volume, the run is written there, and `modal volume get videotune runs/NAME .` fetches it. A run that
was cut off continues when the command is given again. Not run by the tests: it needs an account.
"""

import subprocess
from pathlib import Path

import modal

app = modal.App("videotune")
volume = modal.Volume.from_name("videotune", create_if_missing=True)
image = (
    modal.Image.from_registry("nvidia/cuda:12.8.1-base-ubuntu24.04", add_python="3.12")
    .apt_install("gcc", "libc6-dev")
    .pip_install("torch", "videotune[all]")
    .env({"HF_HOME": "/data/huggingface"})
)


@app.function(
    image=image, gpu="L40S", timeout=24 * 3600, volumes={"/data": volume}, retries=1
)
def train(name: str, preset: str, sets: list[str]) -> int:
    """Train, or continue, the run of this name."""
    run = Path("/data/runs") / name
    words = (
        ["--resume"]
        if (run / "config.json").is_file()
        else ["--data", f"/data/clips/{name}", "--preset", preset]
    )
    words += [word for one in sets for word in ("--set", one)]
    code = subprocess.run(["videotune", "train", "--out", str(run), *words]).returncode
    volume.commit()
    return code


@app.local_entrypoint()
def main(data: str, preset: str, name: str = "run", sets: str = "") -> None:
    """Upload ``data`` and train; ``sets``: KEY=VALUE, separated by spaces."""
    with volume.batch_upload(force=True) as upload:
        upload.put_directory(data, f"clips/{name}")
    print("exit code", train.remote(name, preset, sets.split()))
