"""A remote file read by ranges: seekable, resumes a dropped connection, refuses a file that changes under it."""

from __future__ import annotations

import io
import re
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import cast

from gptfit import __version__
from gptfit.errors import DataError

READ_AHEAD = 8 * 2**20  # bytes asked for at least: a new connection costs about as much as sending a few MB
TRIES = 6  # without a single byte of progress; the waits add up to about half a minute
FIRST_WAIT_SECONDS = 0.5
TIMEOUT_SECONDS = 60


class HttpFile(io.RawIOBase):
    """The bytes at an http(s) address. `stamp` is the server's ETag, or its date, or the size."""

    def __init__(self, url: str, expect_stamp: str | None = None) -> None:
        self.url = url
        self._position = 0
        self._buffer = b""
        self._buffer_start = 0
        response = self._request(0, 1)
        with response:
            self.size = self._total_size(response)
            self.stamp = self._stamp_of(response)
            self._read_quietly(response, 1)
        if expect_stamp is not None and self.stamp != expect_stamp:
            raise DataError(f"{url}: changed on the server", fix="start over with --restart")

    def _total_size(self, response: HTTPResponse) -> int:
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status != 206 or not total.isdigit():
            raise DataError(
                f"{self.url}: the server cannot send parts of a file", fix="download it and prepare the copy"
            )
        return int(total)

    def _check_range(self, response: HTTPResponse, start: int) -> None:
        """A server (or a cache before it) that answers with another part than was asked for would give wrong data."""
        said = response.headers.get("Content-Range", "")
        found = re.fullmatch(r"\s*bytes\s+(\d+)-\d+/(\d+|\*)\s*", said, re.IGNORECASE)
        if found is None or int(found[1]) != start or found[2] not in (str(self.size), "*"):
            raise DataError(
                f"{self.url}: the server sent {said.strip() or 'no range'!r} where bytes from {start} of {self.size} were "
                "asked for",
                fix="download the file and prepare the copy",
            )

    @staticmethod
    def _stamp_of(response: HTTPResponse) -> str:
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        return response.headers.get("ETag") or response.headers.get("Last-Modified") or total

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self.size - self._position)
        if wanted <= 0:
            return 0
        start = self._position - self._buffer_start
        if not 0 <= start <= len(self._buffer) - wanted:
            length = min(max(wanted, READ_AHEAD), self.size - self._position)
            self._buffer, self._buffer_start, start = self._fetch(self._position, length), self._position, 0
        buffer[:wanted] = self._buffer[start : start + wanted]
        self._position += wanted
        return wanted

    def _fetch(self, start: int, length: int) -> bytes:
        """Exactly these bytes, asking again for the rest whenever the connection ends early."""
        got = bytearray()
        fruitless = 0
        while len(got) < length:
            before = len(got)
            with self._request(start + before, length - before) as response:
                if response.status != 206 or self._stamp_of(response) != self.stamp:
                    raise DataError(
                        f"{self.url}: changed on the server while it was read", fix="start over with --restart"
                    )
                self._check_range(response, start + before)
                got += self._read_quietly(response, length - before)
            fruitless = fruitless + 1 if len(got) == before else 0
            if fruitless >= TRIES:
                raise DataError(f"{self.url}: the connection keeps dropping", fix="run the same command again to go on")
            if fruitless:
                time.sleep(FIRST_WAIT_SECONDS * 2**fruitless)
        return bytes(got)

    def _read_quietly(self, response: HTTPResponse, most: int) -> bytes:
        """What arrives before the connection ends, however it ends."""
        got = bytearray()
        try:
            while len(got) < most and (chunk := response.read(min(2**18, most - len(got)))):
                got += chunk
        except (OSError, HTTPException):
            pass
        return bytes(got)

    def _request(self, start: int, length: int) -> HTTPResponse:
        headers = {"Range": f"bytes={start}-{start + length - 1}", "User-Agent": f"gptfit/{__version__}"}
        wait = FIRST_WAIT_SECONDS
        for attempt in range(TRIES):
            try:
                request = urllib.request.Request(self.url, headers=headers)
                return cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and error.code != 429:
                    raise DataError(
                        f"{self.url}: the server says {error.code} {error.reason}", fix="check the link"
                    ) from None
                reason = f"{error.code} {error.reason}"
            except (OSError, HTTPException) as error:
                reason = str(error)
            if attempt < TRIES - 1:
                time.sleep(wait)
                wait *= 2
        raise DataError(f"{self.url}: cannot be reached ({reason})", fix="run the same command again to go on")
