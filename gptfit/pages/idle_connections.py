"""Connections that ask for nothing are closed, so that a thousand of them do not keep everyone else out."""

from __future__ import annotations

import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_REQUEST_SECONDS = 10.0
MOST_WAITING = 200  # connections without a request; the oldest makes room for the next
MOST_DESCRIPTORS = 8192


class Impatient(H11Protocol):
    """A connection has a few seconds for its first request; uvicorn itself would wait for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.began = self.loop.time()
        self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_if_silent)
        waiting = [each for each in self.connections if isinstance(each, Impatient) and each.is_waiting]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda each: each.began).transport.abort()

    @property
    def is_waiting(self) -> bool:
        """Nothing was asked, or all that was asked is answered."""
        request: Any = self.cycle  # None before the first one
        return request is None or bool(request.response_complete)

    def _close_if_silent(self) -> None:
        request: Any = self.cycle
        if request is None and not self.transport.is_closing():
            self.transport.close()


def raise_descriptor_limit() -> None:
    """As many open connections as the system allows without asking anyone; Windows has no such limit."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
