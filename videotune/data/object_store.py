"""Objects of S3 and of stores that speak its protocol: listed, fetched, uploaded, deleted.

s3fs holds the connection. Credentials, region and endpoint come from the environment and
``~/.aws``, as botocore reads them, and never from a config. Every call has a time limit,
so that a server which hangs, or sends a byte now and then, ends with an error.
"""

import errno
import os
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from videotune.errors import VideotuneError
from videotune.files import is_disk_full, size_text

SCHEME = "s3://"
"""How the address of an object or of a prefix begins."""

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
"""Limits of one connection and of one read."""

CALL_SECONDS = 60.0
"""Seconds of one request without a body, with all repetitions."""

SLOWEST_SERVER = 1e5
"""Bytes a second, by which the time limit of a transfer grows."""

ATTEMPTS = 5
"""Times that an object is fetched or uploaded, if the connection breaks."""

RETRY_SECONDS = 1.0
"""Seconds before the second attempt; before each further one twice as many."""

CHUNK_BYTES = 1 << 20
DELETED_TOGETHER = 1000

OFFLINE_VARIABLE = "VIDEOTUNE_OFFLINE"
"""Environment variable that --offline sets."""

INSTALL = 'Install it: pip install "videotune[s3]"'

CHANGED_CODES = ("PreconditionFailed", "412")
"""The store's codes of an object that is not the one that was asked for."""

CREDENTIAL_ERRORS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "NoAuthTokenError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
)
CONNECTION_ERRORS = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ReadTimeoutError",
    "ProxyConnectionError",
    "SSLError",
    "HTTPClientError",
    "ResponseStreamingError",
    "ClientPayloadError",
    "IncompleteReadError",
    "FSTimeoutError",
    "TimeoutError",
)
"""Names of botocore's, aiohttp's and fsspec's classes, since s3fs may not be installed."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class ObjectChanged(VideotuneError):
    """Raised if an object is not the one that was listed."""


@dataclass(frozen=True)
class ObjectUrl:
    """The address of an object, or of all objects whose keys begin with a prefix."""

    bucket: str

    key: str
    """Without a slash at its end; "" is the whole bucket."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def child(self, name: str) -> "ObjectUrl":
        """Return the address of an object below this prefix."""
        return ObjectUrl(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def prefix(self) -> str:
        """How the keys of all objects below begin."""
        return f"{self.key}/" if self.key else ""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.key.rpartition("/")[2] or self.bucket


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing has it."""

    url: ObjectUrl

    size: int

    etag: str
    """What changes with its content."""

    modified: float
    """Seconds since 1970."""


def is_object_url(text: str) -> bool:
    """Return whether a path of a config is an address of an object store."""
    return text.startswith(SCHEME)


def parse_url(text: str) -> ObjectUrl:
    """Parse s3://bucket/prefix.

    Raises:
        VideotuneError: if it is not one.
    """
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    key = key.strip("/")
    parts = key.split("/") if key else []
    is_plain = all(part not in ("", ".", "..") for part in parts)
    if not _BUCKET.fullmatch(bucket) or not is_plain or has_control_letters(key):
        raise VideotuneError(
            f"{text[:200]!r} is not the address of an object store. Write s3://BUCKET/FOLDER; "
            "credentials and endpoint come from the environment or ~/.aws."
        )
    return ObjectUrl(bucket, key)


def has_control_letters(text: str) -> bool:
    """Return whether a text has control characters, or halves of others."""
    return any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


class ObjectStore:
    """A connection to the store that the environment names. Safe from many threads."""

    def __init__(self) -> None:
        if os.environ.get(OFFLINE_VARIABLE):
            raise VideotuneError(
                f"paths that begin with {SCHEME} are on the network, and --offline forbids it. Leave it out."
            )
        try:
            import s3fs
        except ImportError as error:
            raise VideotuneError(
                f"paths that begin with {SCHEME} need s3fs, which is not installed. {INSTALL}"
            ) from error
        self._files: Any = s3fs.S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            default_block_size=16 << 20,
            max_concurrency=4,
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "max_pool_connections": 64,
                # s3fs itself tries again.
                "retries": {"total_max_attempts": 1, "mode": "standard"},
            },
        )

    def list_objects(self, url: ObjectUrl) -> Iterator[StoredObject]:
        """Yield the objects below a prefix, in the order of their keys.

        Raises:
            VideotuneError: if the store cannot be asked.
        """
        yield from self._list(url, url.prefix)

    def find_object(self, url: ObjectUrl) -> StoredObject | None:
        """Return the object with exactly this key; None if there is none."""
        if not url.key:
            return None
        for stored in self._list(url, url.key, most=1):
            return stored if stored.url.key == url.key else None
        return None

    def _list(
        self, url: ObjectUrl, prefix: str, most: int | None = None
    ) -> Iterator[StoredObject]:
        options: dict[str, Any] = {"Bucket": url.bucket, "Prefix": prefix}
        if most is not None:
            options["MaxKeys"] = most
        while True:
            page = self._call("list_objects_v2", url, **options)
            for entry in page.get("Contents", ()):
                yield StoredObject(
                    ObjectUrl(url.bucket, entry["Key"]),
                    size=int(entry["Size"]),
                    etag=str(entry["ETag"])[:200],
                    modified=entry["LastModified"].timestamp(),
                )
            if not page.get("IsTruncated") or most is not None:
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def fetch(self, stored: StoredObject, path: Path) -> None:
        """Write an object's bytes to a file; what is there after an error is incomplete.

        Raises:
            ObjectChanged: if it is not the listed object any more, or is gone.
            VideotuneError: if it cannot be fetched.
            OSError: if the file cannot be written.
        """
        self._transfer(
            stored.url,
            stored.size,
            lambda: self._stream(stored, path),
        )

    def read_beginning(self, stored: StoredObject, size: int) -> bytes:
        """Return the first bytes of an object, or all if it is smaller.

        Raises:
            VideotuneError: if they cannot be fetched.
        """
        end = min(size, stored.size)
        if end == 0:
            return b""
        path = f"{stored.url.bucket}/{stored.url.key}"
        try:
            content: bytes = self._files.cat_file(path, start=0, end=end)
        except Exception as error:  # as of _call
            raise store_problem(error, stored.url) from error
        return content

    def upload(self, path: Path, url: ObjectUrl) -> None:
        """Make a file an object: all of it, or none.

        Raises:
            VideotuneError: if it cannot be uploaded.
        """
        self._transfer(
            url,
            path.stat().st_size,
            lambda: self._files._put_file(str(path), f"{url.bucket}/{url.key}"),
        )

    def delete(self, urls: Iterable[ObjectUrl]) -> None:
        """Delete objects; those that do not exist are left out.

        Raises:
            VideotuneError: if one cannot be deleted.
        """
        by_bucket: dict[str, list[ObjectUrl]] = {}
        for url in urls:
            by_bucket.setdefault(url.bucket, []).append(url)
        for bucket, bucket_urls in by_bucket.items():
            for first in range(0, len(bucket_urls), DELETED_TOGETHER):
                part = bucket_urls[first : first + DELETED_TOGETHER]
                keys = [{"Key": url.key} for url in part]
                answer = self._call(
                    "delete_objects",
                    part[0],
                    Bucket=bucket,
                    Delete={"Objects": keys, "Quiet": True},
                )
                for failure in answer.get("Errors", ()):
                    raise VideotuneError(
                        f"{SCHEME}{bucket}/{str(failure.get('Key'))[:500]} cannot be deleted "
                        f"({_plain_code(failure.get('Code'))}). Give the account the right to delete."
                    )

    def _call(self, method: str, url: ObjectUrl, **options: Any) -> Any:
        """Make one request."""
        try:
            return self._files.call_s3(method, timeout=CALL_SECONDS, **options)
        except Exception as error:  # s3fs, botocore and aiohttp raise dozens of types
            raise store_problem(error, url) from error

    def _transfer(self, url: ObjectUrl, size: int, start: Any) -> None:
        """Run a transfer until it succeeds, a few times if the connection breaks."""
        from fsspec.asyn import sync

        limit = CALL_SECONDS + size / SLOWEST_SERVER
        until = time.monotonic() + limit
        for attempt in range(1, ATTEMPTS + 1):
            seconds = max(1.0, until - time.monotonic())
            try:
                sync(self._files.loop, start, timeout=seconds)
                return
            except VideotuneError:
                raise
            except Exception as error:  # as of _call
                if isinstance(error, OSError) and is_disk_full(error):
                    raise
                pause = RETRY_SECONDS * 2 ** (attempt - 1)
                is_last = attempt == ATTEMPTS or time.monotonic() + pause + 1.0 >= until
                if is_last or not _is_connection_error(error):
                    raise store_problem(error, url, size) from error
                time.sleep(pause)

    async def _stream(self, stored: StoredObject, path: Path) -> None:
        """Fetch an object in chunks, so that memory stays flat."""
        import asyncio  # as s3fs does, which few processes need

        answer = await self._files._call_s3(
            "get_object",
            Bucket=stored.url.bucket,
            Key=stored.url.key,
            IfMatch=stored.etag,
        )
        # Not every store heeds IfMatch.
        if answer["ETag"] != stored.etag or answer["ContentLength"] != stored.size:
            answer["Body"].close()
            raise _changed(stored.url)

        size = 0
        async with answer["Body"] as body:
            with path.open("wb") as file:
                while True:
                    chunk = await body.read(CHUNK_BYTES)
                    if not chunk:
                        break
                    size += len(chunk)
                    await asyncio.to_thread(file.write, chunk)
        if size != stored.size:
            raise TimeoutError(f"the connection ended after {size} bytes")


def object_store() -> ObjectStore:
    """Return this process's connection to the store that the environment names now.

    Raises:
        VideotuneError: if s3fs is not installed.
    """
    settings = tuple(
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith("AWS_") or name == OFFLINE_VARIABLE
        )
    )
    return _store_of(os.getpid(), settings)


@lru_cache(maxsize=4)
def _store_of(_process: int, _settings: Sequence[tuple[str, str]]) -> ObjectStore:
    return ObjectStore()


def store_problem(
    error: BaseException, url: ObjectUrl, size: int = 0
) -> VideotuneError:
    """Return what the user can do about an error of s3fs; it never has a secret.

    Args:
        error: the library's error.
        url: what was asked for.
        size: bytes of a transfer.
    """
    names = _class_names(error)
    code = _code_of(error)
    if code in CHANGED_CODES:
        return _changed(url)
    if not names.isdisjoint(CREDENTIAL_ERRORS):
        return VideotuneError(
            f"{url}: there are no credentials for the object store. Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or write them into ~/.aws/credentials."
        )
    if isinstance(error, PermissionError) or code in ("403", "AccessDenied"):
        return VideotuneError(
            f"{url}: the object store refuses access ({code or 'denied'}). Check the credentials in the "
            "environment or ~/.aws, and what they may read and write."
        )
    if code in ("NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "301"):
        return VideotuneError(
            f"{url}: there is no bucket {url.bucket} at the object store ({code}). Check its name, and "
            "AWS_ENDPOINT_URL and AWS_REGION in the environment."
        )
    if isinstance(error, FileNotFoundError):
        return _changed(url)
    if _is_connection_error(error):
        limit = CALL_SECONDS + size / SLOWEST_SERVER
        return VideotuneError(
            f"{url}: the object store does not answer, or too slowly (limit {limit:.0f} s for "
            f"{size_text(size)}). Check the network and AWS_ENDPOINT_URL; the same command continues."
        )
    cause = code or type(error).__name__
    return VideotuneError(
        f"{url}: the object store cannot be used ({cause}). Check AWS_ENDPOINT_URL, AWS_REGION and "
        "AWS_PROFILE in the environment, and ~/.aws/config."
    )


def _changed(url: ObjectUrl) -> ObjectChanged:
    return ObjectChanged(
        f"{url} has changed, or is gone, since the datasets were listed. Start the command again, which "
        "lists them anew."
    )


def _class_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _is_connection_error(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    is_busy = isinstance(error, OSError) and error.errno in (
        errno.EBUSY,
        getattr(errno, "EREMOTEIO", errno.EIO),
    )
    is_broken = isinstance(error, ConnectionError | TimeoutError)
    return is_busy or is_broken or not _class_names(error).isdisjoint(CONNECTION_ERRORS)


def _code_of(error: BaseException) -> str:
    """Return the store's code of an error, such as NoSuchBucket; "" if it has none."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            return _plain_code(response.get("Error", {}).get("Code"))
    return ""


def _plain_code(code: Any) -> str:
    """Return the beginning of a code, which is a stranger's text."""
    return re.sub(r"[^A-Za-z0-9]", "", str(code))[:60]
