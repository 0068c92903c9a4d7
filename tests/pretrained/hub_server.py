"""A local stand-in of the Hub: the HTTP requests that `huggingface_hub` makes to list and download a repository.

Entry point: `HubServer`. It counts what is asked, checks tokens, and can drop a connection in the middle of a file.
"""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from typing import Any


class HubServer:
    """Serves repositories from memory, on a port of this machine."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.drop_after: dict[str, int] = {}  # file name to bytes after which the connection is cut, once
        self.status: int | None = None  # answered to everything, when set
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def store(self) -> str:
        """Where the contents lie: the library follows a redirect within one host by itself, not to another."""
        return f"http://localhost:{self._server.server_port}"

    def publish(self, name, files, branch="main", token=None, gated=False):
        """Put a commit on a branch of a repository and return its hash."""
        repository = self.repositories.setdefault(name, {"branches": {}, "commits": {}, "token": token, "gated": gated})
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repository["branches"][branch] = commit
        repository["commits"][commit] = dict(files)
        return commit

    def fetched(self, method="GET"):
        """Names of the files whose contents were sent, in order."""
        return [path.rsplit("/", 1)[1] for verb, path, _ in self.requests if verb == method and "/files/" in path]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        if self.hub.status is not None:
            return self._refuse(self.hub.status, None)
        if stored := re.fullmatch(r"/files/(\w+)/(.+)", path):
            return self._send_file(*stored.groups())
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listed or resolved
        name = found and found[1]
        if name not in self.hub.repositories:
            return self._refuse(404, "RepoNotFound")
        repository = self.hub.repositories[name]
        if repository["token"] and self.headers.get("Authorization") != f"Bearer {repository['token']}":
            if repository["gated"]:
                return self._refuse(403, "GatedRepo")
            return self._refuse(401, "RepoNotFound")
        revision = (listed[3] if listed else resolved[2]) or "main"
        commit = repository["branches"].get(revision, revision)
        if commit not in repository["commits"]:
            return self._refuse(404, "RevisionNotFound")
        files = repository["commits"][commit]
        if listed and listed[2] == "tree":
            return self._json([_tree_entry(path, content) for path, content in files.items()])
        if listed:
            siblings = [{"rfilename": path} for path in files]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0})
        return self._resolve(files, commit, resolved[3])

    def _resolve(self, files, commit, path):
        """Point at the contents, as the Hub points at its own store of large files."""
        if path not in files:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        etag = _etag(files[path])
        self._head(
            302,
            {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(files[path])),
                "Location": f"{self.hub.store}/files/{etag}/{urllib.parse.quote(path)}",
                "Content-Length": "0",
            },
        )

    def _send_file(self, etag, path):
        contents = [
            files[path]
            for repository in self.hub.repositories.values()
            for files in repository["commits"].values()
            if path in files and _etag(files[path]) == etag
        ]
        content, status, headers = contents[0], 200, {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(part[1]), min(int(part[2]) + 1 if part[2] else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        self._head(status, {**headers, "Content-Length": str(len(content))})
        if self.command == "GET":
            cut = self.hub.drop_after.pop(path, None)
            self.wfile.write(content if cut is None else content[:cut])
            self.close_connection = cut is not None

    def _json(self, value):
        content = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(content))})
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status, code, headers=None):
        extra = {"X-Error-Code": code} if code else {}
        self._head(status, {**extra, **(headers or {}), "Content-Length": "0"})

    def _head(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _etag(content):
    return hashlib.sha256(content).hexdigest()


def _tree_entry(path, content):
    etag = _etag(content)
    entry = {"type": "file", "path": path, "size": len(content), "oid": etag[:40]}
    if path.endswith((".safetensors", ".bin", ".gguf", ".onnx")):
        entry["lfs"] = {"oid": etag, "size": len(content), "pointerSize": 130}
    return entry
