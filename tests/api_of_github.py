"""GitHub's API of pull requests and comments, on this machine: a server with one pull request."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any


class Api:
    """A server of the pull request 7.

    comments: the text of each by number. calls: method and token of each.
    """

    def __init__(self, head: str, others: int = 0) -> None:
        self.comments: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []
        self._people = [
            {"id": -1, "body": "<!-- attest comment: attest -->", "user": {"type": "User"}}
        ] * others
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(api._got(self.path, head))

            def do_POST(self) -> None:
                self._answer(api._written(len(api.comments) + 1, self._body()))

            def do_PATCH(self) -> None:
                self._answer(api._written(int(self.path.rpartition("/")[2]), self._body()))

            def _body(self) -> str:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]

            def _answer(self, found: Any) -> None:
                api.calls.append((self.command, self.headers["Authorization"]))
                self.send_response(404 if found is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "Api":
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _got(self, path: str, head: str) -> Any:
        if path.endswith("/pulls/7"):
            return {"head": {"sha": head}}
        page = re.search(r"/issues/7/comments\?per_page=100&page=(\d+)$", path)
        if page is None:
            return None
        ours = [{"id": n, "body": text, "user": {"type": "Bot"}} for n, text in self.comments.items()]
        return [*self._people, *ours][100 * (int(page[1]) - 1) : 100 * int(page[1])]

    def _written(self, number: int, body: str) -> Any:
        self.comments[number] = body
        return {"html_url": f"https://github.com/somebody/my-attention/pull/7#issuecomment-{number}"}
