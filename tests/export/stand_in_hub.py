"""A small hub: enough of the Hugging Face hub's interface that its own client library pushes a model to it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standinstandinstandin"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StoredRepo:
    is_private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    large: set[str] = field(default_factory=set)


class StandInHub:
    """Repositories of the owner `me`; `refuse` maps the beginning of 'METHOD path' to the status it is answered with."""

    def __init__(self) -> None:
        self.repos: dict[str, StoredRepo] = {}
        self.stored: dict[str, bytes] = {}  # large files by sha256, sent but perhaps in no commit yet
        self.refuse: dict[str, int] = {}
        self.calls: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._serve()

            do_POST = do_PUT = do_HEAD = do_GET

            def _serve(self) -> None:
                content = self._content()
                path = self.path.split("?")[0]
                call = f"{self.command} {path}"
                hub.calls.append(call)
                status = next((found for start, found in hub.refuse.items() if call.startswith(start)), None)
                is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
                if status is not None:
                    self._answer(status, {"error": "refused for the test"})
                elif not is_known and self.command != "PUT":
                    self._answer(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
                else:
                    self._answer(*hub.answer(call, content))

            def _content(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content

            def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                more = headers or {}
                if status == 404:
                    more = {"X-Error-Code": "RepoNotFound"}
                for key, text in {"Content-Type": "application/json", **more}.items():
                    self.send_header(key, text)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, call: str, content: bytes) -> tuple[int, Any]:
        method, path = call.split(" ", 1)
        if path == "/api/repos/create":
            return self._create(json.loads(content))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if method == "PUT" and path.startswith("/store/"):
            self.stored[path.removeprefix("/store/")] = content
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [self._place(entry) for entry in json.loads(content)["objects"]],
            }
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if name not in self.repos:
            return 404, {"error": "Repository not found"}
        return self._of_repository(name, path.removeprefix(f"/api/models/{name}"), content)

    def _create(self, wish: dict[str, Any]) -> tuple[int, Any]:
        owner = wish.get("organization") or "me"
        name = f"{owner}/{wish['name']}"
        if owner != "me":
            return 403, {"error": f"You don't have the rights to create a model under {owner}"}
        if name in self.repos:
            return 409, {"error": "You already created this model repo"}
        is_private = bool(wish.get("private")) or wish.get("visibility") == "private"
        self.repos[name] = StoredRepo(is_private)
        return 200, {"url": f"{self.endpoint}/{name}"}

    def _place(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["oid"] in self.stored:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.endpoint}/store/{entry['oid']}"}}}

    def _of_repository(self, name: str, rest: str, content: bytes) -> tuple[int, Any]:
        repo = self.repos[name]
        if rest.startswith("/tree/"):
            return 200, [_entry(repo, path) for path in repo.files]
        if rest.startswith("/preupload/"):
            wanted = json.loads(content)["files"]
            modes = [
                {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False} for file in wanted
            ]
            return 200, {"files": modes}
        if rest.startswith("/commit/"):
            for line in content.splitlines():
                self._commit(repo, json.loads(line))
            return 200, {"commitUrl": f"{self.endpoint}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        siblings = [{"rfilename": path} for path in repo.files]
        return 200, {
            "id": name,
            "modelId": name,
            "private": repo.is_private,
            "sha": COMMIT,
            "tags": [],
            "siblings": siblings,
        }

    def _commit(self, repo: StoredRepo, change: dict[str, Any]) -> None:
        value = change["value"]
        if change["key"] == "file":
            repo.files[value["path"]] = base64.b64decode(value["content"])
        elif change["key"] == "lfsFile":
            repo.files[value["path"]] = self.stored[value["oid"]]
            repo.large.add(value["path"])


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def _entry(repo: StoredRepo, path: str) -> dict[str, Any]:
    content = repo.files[path]
    entry = {"type": "file", "path": path, "size": len(content)}
    if path in repo.large:
        sha = hashlib.sha256(content).hexdigest()
        return entry | {"oid": "0" * 40, "lfs": {"oid": sha, "size": len(content), "pointerSize": 130}}
    return entry | {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
