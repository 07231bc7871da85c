"""Reading an HTTP answer that may be hostile: bounded, and never unpacked."""

import aiohttp

from poolmeter.errors import DataError, Unavailable


async def bounded(response: aiohttp.ClientResponse, limit: int, accept: range = range(200, 300)) -> bytes:
    """The body, at most `limit` bytes of it. Raises Unavailable for a status, DataError for too many bytes or an encoding."""
    if response.status not in accept:
        raise Unavailable(f"{response.url.with_query(None)} answered {response.status}, expected 200")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise DataError(f"{response.url.with_query(None)} answered with Content-Encoding {encoding!r:.40}, expected identity")
    chunks, size = [], 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > limit:
            raise DataError(f"{response.url.with_query(None)} answered with more than {limit} bytes, expected at most that")
        chunks.append(chunk)
    return b"".join(chunks)
