"""Prometheus' http_sd: a URL that answers with target groups as JSON."""

import asyncio
import re
from pathlib import Path

import aiohttp

from poolmeter.collector.discovery.source import Answer
from poolmeter.collector.discovery.targets import BODY_LIMIT, parse_groups, parse_json
from poolmeter.collector.fetch import bounded
from poolmeter.tokens import read_token
from poolmeter.web.trust import Trust


class Requests:
    """GET with a bearer token that is read from its file each time, since such tokens are changed under a running program."""

    def __init__(self, token_file: Path | None, ca_file: Path | None) -> None:
        self._token_file = token_file
        self._ssl = Trust(ca_file).context("ca_file")

    async def get(
        self, session: aiohttp.ClientSession, url: str, params: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """The answer, for the caller to close. Redirects are not followed: the token is for this address alone."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {await asyncio.to_thread(read_token, self._token_file)}"
        return await session.get(url, params=params, headers=headers, allow_redirects=False, ssl=self._ssl, timeout=timeout)


class HttpSd:
    """One address of http_sd."""

    def __init__(self, url: str, requests: Requests, scheme: str, limit: int, timeout_s: float) -> None:
        self._url = url
        self._requests = requests
        self._scheme = scheme
        self._limit = limit
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    @property
    def name(self) -> str:
        """The address, without what may be secret in it."""
        return f"http_sd {re.sub(r'//[^/@]*@', '//', self._url.partition('?')[0])}"[:200]

    async def ask(self, session: aiohttp.ClientSession) -> Answer:
        """What it names. Raises Unavailable (status), DataError (what it says)."""
        async with await self._requests.get(session, self._url, {}, self._timeout) as response:
            body = await bounded(response, BODY_LIMIT)
        return Answer(await asyncio.to_thread(lambda: parse_groups(parse_json(body), self._scheme, self._limit)))
