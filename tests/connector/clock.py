"""A clock that tests move by hand."""


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def now_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
