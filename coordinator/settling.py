"""A coordinator that was started again waits for its workers before it tells them who is there.

Whoever is missing from Peers counts as gone, and workers of an older coordinator must not take "has
not registered again yet" for that. Owns how long nobody is told anything; routing does not wait.
"""

from .now import Now
from .registry import Registry

RESETTLE_S = 5.0
YOUNG_S = 30.0  # a coordinator that has served for longer is not the one that they look for


class Settling:
    def __init__(
        self, registry: Registry, expected_prefill: int, expected_decode: int, now: Now
    ) -> None:
        self._registry = registry
        self._young_until_s = now.mono_s + YOUNG_S
        self._expected = {"prefill": expected_prefill, "decode": expected_decode}
        self._until_s: float | None = None
        self._over = False  # it happens once in a coordinator's life

    def heard_old_worker(self, now: Now) -> None:
        """One that an older coordinator welcomed: others may be on their way."""
        young = now.mono_s < self._young_until_s or not self._registry.workers()
        if young and self._until_s is None:
            self._until_s = now.mono_s + RESETTLE_S

    def waiting(self, now: Now) -> bool:
        if self._until_s is None or self._over:
            return False
        self._over = now.mono_s >= self._until_s or self._expected_are_here()
        return not self._over

    def _expected_are_here(self) -> bool:
        here = {
            "prefill": len(self._registry.incarnations("prefill")),
            "decode": len(self._registry.incarnations("decode")),
        }
        return any(self._expected.values()) and all(
            here[role] >= count for role, count in self._expected.items()
        )
