"""``python -m videotune …``, for launchers."""

from videotune.cli.main import main

if __name__ == "__main__":
    main()
