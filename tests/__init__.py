"""Every test, and every program that tests start from here, asks servers on this machine.

httpx reads 140 root certificates from a file for each client that it makes, and for each single `httpx.get`: 35 ms of
work, more than most of the requests take. Here it does so once.
"""

import functools

import httpx._transports.default as transport

transport.create_ssl_context = functools.cache(transport.create_ssl_context)  # type: ignore[attr-defined]
