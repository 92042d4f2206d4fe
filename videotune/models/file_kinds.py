"""What a file is that is given in the place of weights, by its first bytes."""

from pathlib import Path

_SIGNATURES = (
    (b"\x89PNG", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF8", "a picture (GIF)"),
    (b"\x1aE\xdf\xa3", "a video (Matroska or WebM)"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "an archive (gzip)"),
    (b"7z\xbc\xaf", "an archive (7z)"),
    (b"Rar!", "an archive (RAR)"),
    (b"%PDF", "a PDF document"),
    (b"GGUF", "weights in GGUF form"),
)
"""First bytes of a file, and what it is then."""

_RIFF_KINDS = {
    b"AVI ": "a video (AVI)",
    b"WEBP": "a picture (WebP)",
    b"WAVE": "a sound file (WAV)",
}
"""What a RIFF file is, by its bytes 8 to 12."""

_TEXT_BYTES = frozenset([*range(0x20, 0x7F), *b"\t\r\n"])
_LENGTH_BYTES = 8
"""Bytes of the length at the beginning of a safetensors file. No length is text: its last
bytes are zero.
"""


def foreign_kind(path: Path) -> str:
    """Return what a file is that is surely not of safetensors; empty if it may be."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "an empty file"

    for signature, kind in _SIGNATURES:
        if head.startswith(signature):
            return kind
    if head[4:8] == b"ftyp":
        return "a video (MP4 or MOV)"
    if head[:4] == b"RIFF" and head[8:12] in _RIFF_KINDS:
        return _RIFF_KINDS[head[8:12]]

    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page"
    if _TEXT_BYTES.issuperset(head[:_LENGTH_BYTES]):
        return "a text file"
    return ""


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of git-lfs to the real one."""
    with path.open("rb") as file:
        return file.read(24).startswith(b"version https://git-lfs")


def describe_damage(path: Path, error: Exception) -> str:
    """Return why a file of weights cannot be read, and what to do."""
    if is_lfs_pointer(path):
        return "it is a pointer of git-lfs, not the weights: run `git lfs pull` in that folder"
    kind = foreign_kind(path)
    if kind:
        return f"it is {kind}, and not weights in safetensors form"
    size = path.stat().st_size
    return f"it is damaged, or was not copied to its end ({size:,} bytes; {error}). Fetch it again."
