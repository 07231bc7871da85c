"""A receiver of what an exporter sends, in this process."""

import abc
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class BaseReceiver(abc.ABC):
    """Listens at `url` until `close`. A subclass says what it does with a POST; cleared, `hang` holds answers back."""

    def __init__(self) -> None:
        self.hang = threading.Event()
        self.hang.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @abc.abstractmethod
    def take(self, handler: BaseHTTPRequestHandler) -> None:
        """Read a POST and answer it."""

    def answer(self, handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], body: bytes) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()
