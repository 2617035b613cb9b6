"""hf:// addresses against a small hub of our own, reached as a mirror is: through HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gptfit.checkpoint.hf_folder import find_stock
from gptfit.data.hub import download, failures, parse
from gptfit.data.options import PrepareOptions
from gptfit.data.prepare import prepare
from gptfit.errors import DataError, RunError

from .conftest import WriteParquet, digest, stories

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A data set repository with the calls that huggingface_hub makes; drops each file's first download."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.stated_sha: dict[str, str] = {}
        self.ranges: list[str] = []
        self.dropped: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_GET(self, body: bool = True) -> None:
                path = self.path.split("?")[0]
                if path == "/api/datasets/me/texts/revision/main":
                    self._answer(200, json.dumps({"id": "me/texts", "sha": COMMIT}).encode(), {}, body)
                elif path.startswith(f"/api/datasets/me/texts/tree/{COMMIT}"):
                    self._answer(200, json.dumps([hub.entry(name) for name in hub.files]).encode(), {}, body)
                elif path.startswith("/datasets/me/texts/resolve/"):
                    self._file(path.split("/", 6)[6], body)
                else:
                    self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

            def _file(self, name: str, body: bool) -> None:
                content = hub.files[name]
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.sha(name)}"', "Accept-Ranges": "bytes"}
                wanted = self.headers.get("Range")
                if body and wanted:
                    hub.ranges.append(wanted)
                    start = int(wanted.removeprefix("bytes=").split("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                    self._answer(206, content[start:], headers, body)
                elif body and name not in hub.dropped:
                    hub.dropped.add(name)
                    self._answer(200, content, headers, body, most=len(content) // 2)
                else:
                    self._answer(200, content, headers, body)

            def _answer(
                self, status: int, content: bytes, headers: dict[str, str], body: bool, most: int = 10**9
            ) -> None:
                self.send_response(status)
                for key, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if body:
                    self.wfile.write(content[:most])
                self.close_connection = True

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def sha(self, name: str) -> str:
        return self.stated_sha.get(name) or hashlib.sha256(self.files[name]).hexdigest()

    def entry(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        lfs = {"oid": self.sha(name), "size": size, "pointerSize": 130}
        return {"type": "file", "path": name, "size": size, "oid": "0" * 40, "lfs": lfs}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.close()


def run(hub: Hub, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its variables once, when imported."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "gptfit", "prepare", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)


def test_files_come_from_the_mirror_resumed_and_verified(hub: Hub, parquet: WriteParquet, tmp_path: Path) -> None:
    for i in range(2):
        path = parquet(f"local/{i}.parquet", stories(300, i))
        # huggingface_hub keeps 10 MB at a time, so a shorter download would begin again and not go on.
        pq.write_table(
            pq.read_table(path).append_column("noise", [[bytes(80_000)] * 300]),
            path,
            compression="none",
            use_dictionary=False,
        )
        hub.files[f"sample/{i}.parquet"] = path.read_bytes()
    hub.files["README.md"] = b"not a source"
    done = run(hub, tmp_path, "hf://datasets/me/texts/sample/*.parquet", "--out", "out")
    assert done.returncode == 0, done.stderr
    prepare(PrepareOptions((str(tmp_path / "local"),), tmp_path / "plain"))
    assert digest(tmp_path / "out") == digest(tmp_path / "plain")
    assert len(hub.ranges) == 2, "each dropped download should have gone on where it stopped"
    sources = json.loads((tmp_path / "out" / "manifest.json").read_text())["sources"]
    assert [source["path"] for source in sources] == [
        f"hf://datasets/me/texts@main/sample/{i}.parquet" for i in range(2)
    ]


def test_a_file_without_the_hubs_sha256_is_refused(hub: Hub, parquet: WriteParquet, tmp_path: Path) -> None:
    hub.files["a.parquet"] = parquet("a.parquet", stories(10)).read_bytes()
    hub.stated_sha["a.parquet"] = "f" * 64
    done = run(hub, tmp_path, "hf://datasets/me/texts", "--out", "out")
    assert done.returncode == 1
    assert "does not have the hub's sha256" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("gptfit: hf://datasets/me/texts: a.parquet")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://datasets/me/texts/no/such.parquet", "names none of"),
        ("hf://datasets/you/none", "hf://datasets/you/none: "),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    hub: Hub, parquet: WriteParquet, tmp_path: Path, address: str, message: str
) -> None:
    hub.files["a.parquet"] = parquet("a.parquet", stories(3)).read_bytes()
    done = run(hub, tmp_path, address, "--out", "out")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:9"  # where nobody listens
    done = run(hub, tmp_path, "hf://datasets/me/texts", "--out", "out")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gptfit: hf://datasets/me/texts: ")
    assert "Traceback" not in done.stderr


def test_a_connection_that_breaks_without_a_word_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise failures()[0]("")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", broken)
    with pytest.raises(DataError, match=r"hf://datasets/me/texts: \w+; run the same command again"):
        download("hf://datasets/me/texts", lambda name: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(RunError, match=r"gpt2: cannot be fetched \(\w+\); give a folder"):
        find_stock("gpt2")


def test_an_address_has_owner_name_revision_and_path() -> None:
    found = parse("hf://datasets/me/texts@v2/sample/10BT")
    assert (found.repo, found.revision, found.path) == ("me/texts", "v2", "sample/10BT")
    with pytest.raises(DataError, match="is not hf://datasets/OWNER/NAME/PATH"):
        parse("hf://me/texts")
