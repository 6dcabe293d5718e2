"""Every test, and every program that tests start from here, asks servers on this machine.

httpx reads 140 root certificates from a file for each client that it makes, and for each single `httpx.get`: 35 ms of
work, more than most of the requests take. Here it does so once. And it gives up after 5 s, which is nothing beside busy
neighbours: here after 60 s, unless a test says otherwise.
"""

import functools
import inspect

import httpx
import httpx._transports.default as transport

transport.create_ssl_context = functools.cache(transport.create_ssl_context)  # type: ignore[attr-defined]
_TIMEOUT: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default  # one object for all of httpx
_TIMEOUT.connect = _TIMEOUT.read = _TIMEOUT.write = _TIMEOUT.pool = 60.0
