"""Items of work that came to nothing: not tried again at once, and never for ever put aside.

It is this host's memory only, and bounded. Other hosts try for themselves, and after a restart everything is tried
again: the store decides what is work, this only keeps one bad item from taking all the time (C17).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from agentscope_durable.spi.environment import Environment

REMEMBERED_MAX = 4096
SECONDS_MAX = 30.0


class _Miss(NamedTuple):
    tries: int
    until: float


class Backoff:
    """Waits `first` seconds after the first miss of an item, twice as long after each further one."""

    def __init__(self, environment: Environment, first: float, *, most: float = SECONDS_MAX) -> None:
        self._environment = environment
        self._first = first
        self._most = most
        self._misses: OrderedDict[Hashable, _Miss] = OrderedDict()

    def holds(self, item: Hashable) -> bool:
        miss = self._misses.get(item)
        return miss is not None and self._environment.monotonic() < miss.until

    def missed(self, item: Hashable, *, again: bool = True) -> None:
        """Put an item aside. With `again` False it waits as after its first miss: nothing is wrong with it."""
        miss = self._misses.pop(item, None)
        tries = 1 if miss is None or not again else miss.tries + 1
        wait = min(self._first * 2 ** min(tries - 1, 30), self._most)
        self._misses[item] = _Miss(tries, self._environment.monotonic() + wait)
        while len(self._misses) > REMEMBERED_MAX:
            self._misses.popitem(last=False)

    def done(self, item: Hashable) -> None:
        self._misses.pop(item, None)
