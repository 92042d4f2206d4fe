"""Read single tensors of a safetensors file, without torch.

The file may be damaged or made by a stranger: its header is checked as a whole first.
"""

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Len
from typing_extensions import TypedDict

from videotune.files import Count, checked

MAX_HEADER_BYTES = 5_000_000
"""Size limit of a header; that of a model with thousands of tensors has 1 MB, that of the
state of its optimizer 2 MB.
"""

LENGTH_BYTES = 8

NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy types by the names in a header; BF16 is the upper half of a float32."""


class TensorEntry(TypedDict):
    """A tensor in the header."""

    dtype: str
    shape: Annotated[list[Count], Len(0, 16)]
    data_offsets: tuple[Count, Count]


class TensorFile:
    """A safetensors file whose tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ValueError: if the header is damaged, or its tensors do not fill the file
                one after the other.
            OSError: if the file cannot be read.
        """
        if not path.is_file():
            raise ValueError("it is not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(LENGTH_BYTES)
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise ValueError("the length of its header is wrong")
            header = checked(dict[str, Any], file.read(header_bytes))

        checked(dict[str, str], header.pop("__metadata__", None) or {})
        self.entries = _tensor_entries(header)
        data_start = LENGTH_BYTES + header_bytes
        self._check_offsets(size - data_start)
        self._data: Any = np.empty(0, np.uint8)
        if size > data_start:
            # Each slice of a memmap costs many times that of an array.
            mapped = np.memmap(path, np.uint8, mode="r", offset=data_start)
            self._data = np.asarray(mapped)

    def _check_offsets(self, data_bytes: int) -> None:
        """Check that the tensors fill the data without holes, and none overlaps."""
        offsets = sorted(
            tuple(entry["data_offsets"]) for entry in self.entries.values()
        )
        ends = [(0, 0), *offsets, (data_bytes, data_bytes)]
        for (_, end), (start, next_end) in pairwise(ends):
            if start != end or next_end < start:
                raise ValueError("its tensors overlap or leave holes")

    def read(self, name: str) -> Any:
        """Return a tensor as float32.

        Raises:
            ValueError: if its dtype is unknown, or its shape does not fit its bytes.
        """
        entry = self.entries[name]
        if entry["dtype"] not in NUMPY_TYPES:
            raise ValueError(f"{name} has the dtype {entry['dtype']}")

        start, end = entry["data_offsets"]
        dtype = np.dtype(NUMPY_TYPES[entry["dtype"]])
        num_bytes = prod(entry["shape"]) * dtype.itemsize
        if num_bytes != end - start:
            raise ValueError(f"the shape of {name} does not fit its bytes")

        raw = self._data[start:end].view(dtype).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            bits = raw.astype(np.uint32) << 16
            return bits.view(np.float32)
        return raw.astype(np.float32)


def _tensor_entries(header: Any) -> dict[str, TensorEntry]:
    """Return the tensors of a header; JSON has no tuples, so lists become tuples."""
    for entry in header.values():
        if isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list):
            entry["data_offsets"] = tuple(entry["data_offsets"])
    entries: dict[str, TensorEntry] = checked(dict[str, TensorEntry], header)
    return entries
