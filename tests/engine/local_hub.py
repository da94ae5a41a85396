"""A hub of data sets on the loopback interface, for the real hub client and ``datasets`` to talk to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "a" * 40


class LocalHub:
    """What the server answers: the files of one repository, or an error code of the hub.

    Attributes:
        repository: data set id.
        files: content by name.
        refusal: status and ``X-Error-Code`` of every access, None to allow it. Of a gated repository the
            description stays readable, as on the real hub.
    """

    def __init__(self, repository: str, files: dict[str, bytes], refusal: tuple[int, str] | None = None) -> None:
        self.repository = repository
        self.files = files
        self.refusal = refusal

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request path."""
        api, files = f"/api/datasets/{self.repository}", f"/datasets/{self.repository}/resolve/{REVISION}/"
        if path == api and (self.refusal is None or self.refusal[1] == "GatedRepo"):
            return 200, {}, self._description()
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b""
        if path == f"{api}/auth-check":
            return 200, {}, b"{}"
        if path == f"{api}/revision/{REVISION}":
            return 200, {}, self._description()
        if path == f"{api}/tree/{REVISION}":
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": "b" * 40} for name, body in self.files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        if path.removeprefix(files) in self.files:
            return 200, {"ETag": '"c"', "X-Repo-Commit": REVISION}, self.files[path.removeprefix(files)]
        return 404, {"X-Error-Code": "EntryNotFound"}, b""

    def _description(self) -> bytes:
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps({"id": self.repository, "sha": REVISION, "siblings": siblings}).encode()


@contextmanager
def serve(*hubs: LocalHub) -> Iterator[str]:
    """Run a hub of one repository or several until the block ends; yields the address for ``HF_ENDPOINT``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub = next((hub for hub in hubs if f"/datasets/{hub.repository}" in path), hubs[0])
            status, headers, body = hub.answer(path)
            if status == 200 and (wanted := self.headers.get("Range")):
                first, last = (int(bound) for bound in wanted.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
                status, body = 206, body[first : last + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
