"""When a coordinator counts as hanging."""

from rlt.launch.silence import Patience, Silence


def beats_until_silent(silence: Silence, pid: int) -> int:
    return next(beat for beat in range(1, 1000) if silence.beat(pid, 1.0))


def test_it_may_be_silent_for_longer_before_its_first_answer_than_after_it() -> None:
    silence = Silence(Patience(between_s=15.0, first_s=60.0))
    assert not silence.beat(7, 1.0)
    assert beats_until_silent(silence, 7) == 61
    silence.answered(7)
    assert beats_until_silent(silence, 7) == 16
    silence.answered(7)
    for _ in range(100):
        assert not silence.beat(7, 1.0)
        silence.answered(7)


def test_another_process_starts_anew() -> None:
    silence = Silence(Patience(between_s=15.0, first_s=60.0))
    silence.beat(7, 1.0)
    silence.answered(7)
    assert not silence.beat(8, 1.0)
    silence.answered(7)  # late: it shortens nothing
    assert beats_until_silent(silence, 8) == 61


def test_who_is_to_end_and_has_not_gets_its_time_to_do_so() -> None:
    silence = Silence(Patience(between_s=15.0, first_s=60.0))
    silence.beat(7, 1.0)
    assert beats_until_silent(silence, 7) == beats_until_silent(silence, 7) == 61
