"""A Parquet file behind a bad line: dropped connections, changed files, servers without ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gptfit.data import http
from gptfit.data.http import HttpFile
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.errors import DataError

from .conftest import WriteParquet, digest, stories


class Server:
    """Serves one file; misbehaves as told."""

    def __init__(self) -> None:
        self.content = b""
        self.etag = '"1"'
        self.ranges = True
        self.drop_after = 10**9  # bytes sent before the connection is cut
        self.failures = 0  # 503 answers to give first
        self.requests: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                server.requests.append(self.headers.get("Range", ""))
                if server.failures > 0:
                    server.failures -= 1
                    self.send_error(503)
                    return
                if self.path != "/a.parquet":
                    self.send_error(404)
                    return
                if not server.ranges:
                    self._send(200, server.content, None)
                    return
                start, stop = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
                stop = min(stop, len(server.content) - 1)
                self._send(206, server.content[start : stop + 1], f"bytes {start}-{stop}/{len(server.content)}")

            def _send(self, status: int, body: bytes, content_range: str | None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", server.etag)
                if content_range:
                    self.send_header("Content-Range", content_range)
                self.end_headers()
                self.wfile.write(body[: server.drop_after])
                self.close_connection = True

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/a.parquet"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    found = Server()
    yield found
    found.close()


def test_a_dropped_connection_is_resumed_and_the_bytes_are_the_same(
    server: Server, parquet: WriteParquet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "READ_AHEAD", 30_000)
    source = parquet("a.parquet", stories(400), rows=50)
    prepare(PrepareOptions((str(source),), tmp_path / "local"))
    server.content = source.read_bytes()
    server.drop_after = 7000
    server.failures = 2
    prepare(PrepareOptions((server.url,), tmp_path / "remote"))
    assert digest(tmp_path / "remote") == digest(tmp_path / "local")
    assert len(server.requests) > len(server.content) / 7000


def test_only_the_text_column_travels(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(http, "READ_AHEAD", 1000)
    noise = [bytes(range(256)) * 40 + str(i).encode() for i in range(400)]
    pq.write_table(pa.table({"noise": noise, "text": stories(400)}), tmp_path / "a.parquet", compression="none")
    server.content = (tmp_path / "a.parquet").read_bytes()
    prepare(PrepareOptions((server.url,), tmp_path / "out"))
    asked = [tuple(map(int, line.removeprefix("bytes=").split("-"))) for line in server.requests]
    assert sum(stop - start + 1 for start, stop in asked) < len(server.content) / 2


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ({"ranges": False}, "the server cannot send parts of a file"),
        ({"drop_after": 0}, "the connection keeps dropping"),
        ({"failures": 99}, "cannot be reached"),
    ],
)
def test_a_hopeless_server_is_one_line(
    server: Server, parquet: WriteParquet, tmp_path: Path, trouble: dict[str, Any], message: str
) -> None:
    server.content = parquet("a.parquet", stories(10)).read_bytes()
    for name, value in trouble.items():
        setattr(server, name, value)
    with pytest.raises(DataError, match=message):
        prepare(PrepareOptions((server.url,), tmp_path / "out"))


def test_a_missing_page_and_a_changed_file_are_refused(server: Server, parquet: WriteParquet) -> None:
    server.content = parquet("a.parquet", stories(10)).read_bytes()
    with pytest.raises(DataError, match="the server says 404"):
        HttpFile(server.url.replace("a.parquet", "b.parquet"))
    with HttpFile(server.url) as file:
        server.etag = '"2"'
        with pytest.raises(DataError, match="changed on the server"):
            file.read(10)
    with pytest.raises(DataError, match="changed on the server"):
        HttpFile(server.url, expect_stamp='"1"')


def test_html_saved_under_a_parquet_name_is_no_parquet(server: Server, tmp_path: Path) -> None:
    server.content = b"<!DOCTYPE html><title>Sign in</title>" * 100
    with pytest.raises(DataError, match="is not readable Parquet"):
        prepare(PrepareOptions((server.url,), tmp_path / "out"))
