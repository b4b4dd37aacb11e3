"""The blocks that nobody holds, and the pages that several may: what can be granted now.

Owned by the KV manager, which alone calls it: the free list and the prefix cache. Never touches a
tensor and knows no generation.
A block is free, in a cached page, or in one grant's own columns; a page that nobody references is
evicted when a column is wanted and too few blocks are free.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence

from .errors import InvariantBroken
from .interfaces import BlockWatch
from .kv_grants import Grant
from .prefix_cache import Page, PrefixCache
from .types import KVGeometry


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        geometry: KVGeometry,
        *,
        caching: bool,
        watch: BlockWatch | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._geometry = geometry
        self._planes = geometry.num_planes
        self._free: deque[int] = deque(range(num_blocks))
        self._cache = PrefixCache(geometry.block_size)
        self._caching = caching
        self._watch = watch
        self.epoch = 0  # moves whenever grantable() may have grown
        self.hits = 0  # pages, over all time

    @property
    def evictions(self) -> int:
        return self._cache.evictions

    def idle_blocks(self) -> int:
        """Blocks in pages that nobody references."""
        return self._cache.idle * self._planes

    def grantable(self) -> int:
        return len(self._free) + self.idle_blocks()

    def takes(self, tokens: int, prompt: tuple[int, ...]) -> int:
        """By how much granting `tokens` positions to this prompt would lower grantable()."""
        shared = sum(page.references > 0 for page in self._match(prompt))
        return self._geometry.blocks(tokens) - shared * self._planes

    def share_prefix(self, grant: Grant) -> None:
        """The first columns of an empty grant: what is cached of its prompt, the last token left
        out, because it is always computed."""
        grant.pages = self._match(grant.prompt)
        grant.hits = len(grant.pages)
        self.hits += grant.hits
        self._cache.acquire(grant.pages)
        for plane, row in enumerate(grant.rows):
            row.extend(page.blocks[plane] for page in grant.pages)

    def extend(self, grant: Grant, columns: int) -> None:
        """Give it columns of its own up to `columns`; the caller knows that they can be had."""
        first = grant.columns
        for _ in range(first, columns):
            while len(self._free) < self._planes:
                self._set_free(self._cache.evict())
            for row in grant.rows:
                row.append(self._free.popleft())
        if self._watch is not None and first < columns:
            self._watch.granted([block for row in grant.rows for block in row[first:]])

    def publish(self, grant: Grant, stop: int) -> None:
        """Share every full column of its prompt positions 0..stop-1."""
        if self._caching:
            stop = min(stop, len(grant.prompt))
            for column in range(len(grant.pages), stop // self._geometry.block_size):
                page = self._cache.publish(grant.pages, grant.prompt, grant.column(column))
                if page is None:
                    return
                grant.pages.append(page)

    def leave_pages(self, grant: Grant) -> None:
        """It keeps its own columns alone."""
        own = grant.own_blocks()
        self._cache.release(grant.shared_pages())
        grant.pages, grant.hits = [], 0
        grant.rows = [own[plane :: self._planes] for plane in range(self._planes)]
        self.epoch += 1

    def put_back(self, blocks: list[int]) -> None:
        self._set_free(blocks)
        self.epoch += 1

    def take_back(self, grant: Grant) -> None:
        """The whole grant ends."""
        own = grant.own_blocks()
        self._cache.release(grant.shared_pages())
        self.put_back(own)

    def check(self, grants: Collection[Grant]) -> None:
        """Every block is free, cached or granted, once; every page counts its tables."""
        own = [block for grant in grants for block in grant.own_blocks()]
        if sorted([*self._free, *self._cache.blocks(), *own]) != list(range(self._num_blocks)):
            raise InvariantBroken(f"{self._num_blocks} blocks: some are lost or held twice")
        self._cache.check(Counter(page.serial for grant in grants for page in grant.shared_pages()))

    def _set_free(self, blocks: Sequence[int]) -> None:
        self._free.extend(blocks)
        if self._watch is not None and blocks:
            self._watch.freed(blocks)

    def _match(self, prompt: tuple[int, ...]) -> list[Page]:
        if not self._caching or not prompt:
            return []
        return self._cache.match(prompt, (len(prompt) - 1) // self._geometry.block_size)
