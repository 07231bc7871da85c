"""A request to the reports' routes, straight through the application."""

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route


def get(served: list[Route] | Starlette, target: str) -> tuple[int, bytes]:
    """Status and body of a GET, straight through the application."""
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": [],
        "root_path": "", "scheme": "http", "server": ("127.0.0.1", 9878), "client": ("127.0.0.1", 1), "http_version": "1.1",
    }  # fmt: skip
    app = served if isinstance(served, Starlette) else Starlette(routes=served)
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
