"""Pages of KV that any prompt with the same beginning may read: found, shared, evicted.

Owns the tree of pages, their reference counts and the order in which unreferenced ones go. Never
touches a tensor and never decides which positions may be shared: the KV manager publishes.
A page is one full block column (a block per plane) and is never written again. Its key is the page
before it plus its token IDs, compared token by token: a hash that collides finds nothing wrong.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InvariantBroken

ROOT = 0  # stands for the page before the first one


@dataclass(slots=True, eq=False)
class Page:
    serial: int  # never given again
    before: int  # serial of the page that this one continues
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]  # [plane]
    references: int = 0
    evicted: bool = False


class PrefixCache:
    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages: dict[tuple[int, tuple[int, ...]], Page] = {}
        # Least recently used first; chains are let go from their end, so that pages usually go
        # after those that continue them. One that outlives its beginning is found no more.
        self._idle: OrderedDict[int, Page] = OrderedDict()
        self._made = ROOT
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def idle(self) -> int:
        """Pages that nobody references: they can be evicted now."""
        return len(self._idle)

    def match(self, tokens: Sequence[int], limit: int) -> list[Page]:
        """The longest chain of at most `limit` pages that `tokens` begins with. Changes nothing."""
        found: list[Page] = []
        while len(found) < limit:
            page = self._pages.get(self._key(found, tokens))
            if page is None:
                break
            found.append(page)
        return found

    def acquire(self, pages: Sequence[Page]) -> None:
        for page in pages:
            page.references += 1
            self._idle.pop(page.serial, None)

    def release(self, pages: Sequence[Page]) -> None:
        """Let a chain go, its end first."""
        for page in reversed(pages):
            if page.references < 1:
                raise InvariantBroken(f"page {page.serial} was released more often than acquired")
            page.references -= 1
            if not page.references:
                self._idle[page.serial] = page

    def publish(
        self, chain: Sequence[Page], tokens: Sequence[int], blocks: tuple[int, ...]
    ) -> Page | None:
        """The page that continues `chain` with the next tokens of the prompt `tokens`: a new one
        made of `blocks`, referenced once; or the one that somebody published before, as it is.
        None if the chain's end was evicted: nobody would find what continues it."""
        if chain and chain[-1].evicted:
            return None
        key = self._key(chain, tokens)
        page = self._pages.get(key)
        if page is None:
            self._made += 1
            page = self._pages[key] = Page(self._made, key[0], key[1], blocks, references=1)
        return page

    def evict(self) -> tuple[int, ...]:
        """Forget the page that was unused for longest; its blocks."""
        _, page = self._idle.popitem(last=False)
        page.evicted = True
        del self._pages[page.before, page.tokens]
        self.evictions += 1
        return page.blocks

    def blocks(self) -> list[int]:
        return [block for page in self._pages.values() for block in page.blocks]

    def check(self, references: dict[int, int]) -> None:
        """references: serial -> how many tables hold the page, counted by the caller."""
        alive = {page.serial for page in self._pages.values()}
        for page in self._pages.values():
            if page.references != references.get(page.serial, 0):
                raise InvariantBroken(
                    f"page {page.serial} counts {page.references} references, "
                    f"{references.get(page.serial, 0)} tables hold it"
                )
            if (page.serial in self._idle) != (page.references == 0):
                raise InvariantBroken(f"page {page.serial} and the idle list disagree")
        if not set(references) <= alive or not set(self._idle) <= alive:
            raise InvariantBroken("a page that is gone is still referenced")

    def _key(self, chain: Sequence[Page], tokens: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        start = len(chain) * self._page_tokens
        before = chain[-1].serial if chain else ROOT
        return before, tuple(tokens[start : start + self._page_tokens])
