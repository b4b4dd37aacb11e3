"""Clients inside the coordinator's process: whom they can be taken for."""

from rlt.coordinator.local_clients import LocalClients


def first_name() -> bytes:
    return LocalClients(lambda *_: None, lambda _: None, lambda: None).open().identity


def test_a_client_that_comes_by_zeromq_cannot_guess_the_name_of_a_local_one() -> None:
    """It names itself; with a local client's name it could cancel that client's requests."""
    names = {first_name() for _ in range(100)}
    assert len(names) == 100 and min(map(len, names)) > 16
