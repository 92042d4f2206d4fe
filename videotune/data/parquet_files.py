"""Parquet files: the columns and rows of one, read with pyarrow within bounds.

A file may come from a stranger. Values are read one after the other, and text stays as
the dictionary has it: a dictionary of a few MB can stand for far more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from videotune.bounds import require_file
from videotune.errors import VideotuneError
from videotune.lazy import pyarrow, pyarrow_parquet

PARQUET_SUFFIX = ".parquet"

MAX_ROWS = 1_000_000
"""Most rows of a file."""

MAX_COLUMNS = 10_000
"""Most columns of a file, those within others too."""

MAX_TEXT_LETTERS = 1 << 29
"""Most letters that are read from the texts of a file."""

_FOOTER_BYTES = 100_000_000
_FOOTER_ITEMS = 1_000_000
"""Sizes of the footer's texts and lists."""

_TEXT_BATCH = 1000
"""Rows of texts that are decoded at a time."""


class ParquetTable:
    """An open Parquet file.

    Args:
        path: the file.

    Raises:
        VideotuneError: if pyarrow is not installed, or the file is damaged or too large.
    """

    def __init__(self, path: Path) -> None:
        require_file(path)
        _require_pyarrow(path)
        self.path = path
        with self._readable():
            self._file = pyarrow_parquet.ParquetFile(
                path,
                thrift_string_size_limit=_FOOTER_BYTES,
                thrift_container_size_limit=_FOOTER_ITEMS,
            )
            self.schema: Any = self._file.schema_arrow

        self.row_count: int = self._file.metadata.num_rows
        if self.row_count > MAX_ROWS or self._file.metadata.num_columns > MAX_COLUMNS:
            raise VideotuneError(
                f"{path} has {self.row_count} rows and {self._file.metadata.num_columns} columns; "
                f"{MAX_ROWS} rows and {MAX_COLUMNS} columns are read. Split it into several files."
            )
        if self.row_count == 0:
            raise VideotuneError(
                f"{path} lists no clips. Write one row per clip, or delete the file."
            )
        names = list(self.schema.names)
        if len(set(names)) < len(names):
            duplicate = max(names, key=names.count)
            raise VideotuneError(
                f"{path}: the column {duplicate!r} appears twice. Rename or remove one."
            )

    @property
    def columns(self) -> list[str]:
        """The names of all columns."""
        return list(self.schema.names)

    @property
    def text_columns(self) -> list[str]:
        """The columns of texts or of lists of texts."""
        return [field.name for field in self.schema if _is_text(field.type)]

    @property
    def clip_columns(self) -> list[str]:
        """The columns that hold files as bytes."""
        return [field.name for field in self.schema if _is_bytes(field.type)]

    def texts(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Yield the values of columns of texts, row by row.

        Raises:
            VideotuneError: if the file is damaged, or has far too much text.
        """
        with self._readable():
            dictionaries = [
                column.path
                for column in self._file.schema
                if column.path.split(".")[0] in columns
            ]
            file = pyarrow_parquet.ParquetFile(
                self.path,
                metadata=self._file.metadata,
                read_dictionary=dictionaries,
            )

        letters = 0
        for batch in self._batches(file, columns, _TEXT_BATCH):
            for index in range(batch.num_rows):
                values = []
                for column in columns:
                    with self._readable():
                        value = batch.column(column)[index].as_py()
                    letters += _letters_of(value)
                    values.append(value)
                if letters > MAX_TEXT_LETTERS:
                    raise VideotuneError(
                        f"{self.path} has more than {MAX_TEXT_LETTERS >> 20} MB of text. "
                        "Split it into several files."
                    )
                yield values

    def clips(self, column: str) -> Iterator[tuple[bytes, str]]:
        """Yield the bytes of each row and the name that is written with them.

        Each is empty if the row has none.

        Raises:
            VideotuneError: if the file is damaged.
        """
        for batch in self._batches(self._file, [column], 1):
            with self._readable():
                value = batch.column(column)[0].as_py()
            if isinstance(value, dict):
                name = value.get("path")
                content = value.get("bytes")
            else:
                name = ""
                content = value
            yield content or b"", name if isinstance(name, str) else ""

    def _batches(
        self, file: Any, columns: Sequence[str], batch_rows: int
    ) -> Iterator[Any]:
        """Yield the rows in parts."""
        with self._readable():
            batches = file.iter_batches(
                batch_rows, columns=list(columns), use_threads=False
            )
        count = 0
        while True:
            with self._readable():
                batch = next(batches, None)
                if batch is None:
                    break
            count += batch.num_rows
            yield batch
        if count != self.row_count:
            raise self._damage(f"{count} of {self.row_count} rows")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn what pyarrow raises for a damaged file into a sentence."""
        try:
            yield
        except (
            pyarrow.lib.ArrowException,
            OSError,
            ValueError,
            KeyError,
            MemoryError,
        ) as error:
            raise self._damage(str(error) or type(error).__name__) from error

    def _damage(self, cause: str) -> VideotuneError:
        sentence = " ".join(cause.split())[:200]
        return VideotuneError(
            f"{self.path} is damaged, or no Parquet file ({sentence}). "
            "Download or write it again."
        )


def _require_pyarrow(path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise VideotuneError(
            f"{path} is a Parquet file, and pyarrow, which reads those, is not installed. Install it "
            'from a checkout with `.venv/bin/pip install -c .venv/constraints.txt -e ".[parquet]"`, or save the clips as files.'
        )


def _is_text(arrow_type: Any) -> bool:
    types = pyarrow.types
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type))


def _is_bytes(arrow_type: Any) -> bool:
    """Return whether a column holds files: bytes, or a struct of ``bytes`` and perhaps
    ``path``, as the library datasets writes videos and images.
    """
    types = pyarrow.types
    if types.is_struct(arrow_type):
        index = arrow_type.get_field_index("bytes")
        if index < 0:
            return False
        arrow_type = arrow_type.field(index).type
    return bool(types.is_binary(arrow_type) or types.is_large_binary(arrow_type))


def _letters_of(value: Any) -> int:
    if isinstance(value, list):
        return sum(len(text) for text in value if isinstance(text, str))
    return len(value) if isinstance(value, str) else 0
