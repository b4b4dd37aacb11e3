"""The system's clock, as the runtime's Clock protocol asks for it. Tests pass their own.

Monotonic time is for deadlines, wall-clock time for stamps that other processes compare.
"""

import time


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()
