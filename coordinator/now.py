"""The two times that an event is handled at. The state machine is handed one and reads no clock."""

import msgspec


class Now(msgspec.Struct, frozen=True):
    """mono_s: monotonic, for deadlines. wall_s: wall clock, for stamps."""

    mono_s: float
    wall_s: float
