"""The timer book of repeated asks."""

from rlt.connector.asks import AskBook


def test_an_ask_is_due_again_with_growing_intervals_until_answered() -> None:
    book: AskBook[str] = AskBook(first_s=1.0, longest_s=4.0)
    assert book.ask("a", 0.0)
    assert book.due(0.9) == []
    times = [t / 2 for t in range(40) if book.due(t / 2)]
    assert times == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    assert book.tries("a") == 6
    assert book.answered("a")
    assert book.due(100.0) == []


def test_asking_an_open_key_again_changes_nothing() -> None:
    book: AskBook[str] = AskBook(first_s=1.0)
    assert book.ask("a", 0.0)
    assert not book.ask("a", 0.9)
    assert book.due(0.99) == [] and book.due(1.0) == ["a"]


def test_a_key_asked_anew_after_its_answer_starts_from_the_first_interval() -> None:
    book: AskBook[str] = AskBook(first_s=1.0)
    book.ask("a", 0.0)
    book.due(1.0)
    book.answered("a")
    assert not book.answered("a")
    book.ask("a", 1.5)
    assert book.tries("a") == 0
    assert book.due(2.4) == []
    assert book.due(2.5) == ["a"]
    assert len(book) == 1 and "a" in book
