"""Which requests take part in the next step: first come, first served."""

from __future__ import annotations

from collections import deque

from slipstream.cache import Cache
from slipstream.request import Request


class Scheduler:
    """Holds the waiting and the running requests.

    A prompt is prefilled by itself, in chunks; all other running requests decode together.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Request]:
        """The requests of the next step; a waiting one is given a slot as soon as one is free."""
        while self.waiting and self._cache.free_slots:
            request = self.waiting.popleft()
            request.slot = self._cache.allocate()
            self.running.append(request)
        prefilling = next((r for r in self.running if self.pending(r) > 1), None)
        return [prefilling] if prefilling else sorted(self.running, key=lambda r: r.slot or 0)

    def pending(self, request: Request) -> int:
        """Known tokens whose KV isn't committed; 1 (the newest) between decode steps."""
        assert request.slot is not None
        return len(request.tokens) - self._cache.lengths[request.slot]

    def remove(self, request: Request) -> None:
        """Forget a request; its slot is free at once."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            assert request.slot is not None
            self._cache.release(request.slot)
            request.slot = None
