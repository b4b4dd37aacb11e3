"""The status page in a real browser, in front of a real service."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlt.coordinator.client import Client

from . import browser as chromium
from .browser import Browser, browser
from .real_service import SMALL, serving

pytestmark = pytest.mark.system
needs_chromium = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)

LOOPS = 4  # of the embedded model
PROMPT = "Ana has 17 apples. Ben gives Ana 25 apples. " * 12
EARLY: dict[str, Any] = {"exit_threshold": 0.6, "min_loops": 1, "ignore_eos": True}
EVIL = "<img src=x onerror=alert(1)></td><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Client, str]]:
    with serving(*SMALL) as (endpoint, url), Client(endpoint) as client:
        yield client, url


@pytest.fixture
def page() -> Iterator[Browser]:
    with browser() as page:
        page.size(1200, 900)
        yield page


def fetch(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def rows(table: str) -> str:
    return f"[...document.querySelectorAll('#{table} tr')]"


@needs_chromium
def test_the_page_shows_live_requests_and_a_timeline_with_every_depth(
    service: tuple[Client, str], page: Browser
) -> None:
    client, url = service
    page.open(url)
    page.wait_for(f"{rows('workers')}.length === 2")
    assert page.value("document.querySelector('#state').textContent") == "ready"
    client.generate(PROMPT, max_tokens=100, request_id="an-ended-one", temperature=0.9, **EARLY)
    streams = [
        client.generate(
            PROMPT[: 60 * (1 + n)],
            stream=True,
            max_tokens=1500,
            temperature=0.9,
            request_id=f"chat-{n}",
            **EARLY,
        )
        for n in range(3)
    ]
    page.wait_for(f"{rows('live')}.filter(r => r.innerText.includes('decoding')).length === 3")
    page.wait_for(f"{rows('live')}.every(r => r.querySelectorAll('.depths b').length === 12)")
    shown = page.wait_for(
        "document.querySelector('#chosen').textContent === 'an-ended-one' &&"
        "[...document.querySelectorAll('.depth-row')].map(row => [row.dataset.depth,"
        "row.querySelectorAll('.computed').length, row.querySelectorAll('.in-flight').length])"
    )
    page.wait_for("+document.querySelectorAll('.tiles dd')[3].textContent > 0")  # tokens/s
    if "RLT_SCREENSHOT" in os.environ:
        page.screenshot(Path(os.environ["RLT_SCREENSHOT"]))
    assert [row[0] for row in shown] == [*map(str, range(LOOPS)), "hidden"]
    chunks = shown[0][1]
    assert chunks > 1, "the prompt was to take several chunks"
    assert [row[1:] for row in shown] == [[chunks, chunks]] * LOOPS + [[0, 1]]
    for stream in streams:
        stream.close()
    page.wait_for(f"{rows('live')}.length === 0 && {rows('ended')}.length >= 4")
    page.wait_for(f"{rows('ended')}.filter(r => r.innerText.includes('cancelled')).length === 3")
    assert {address.split("/")[2] for address in page.asked} == {url.split("/")[2]}
    assert page.complaints == []


@needs_chromium
def test_a_click_chooses_a_live_request_and_the_page_follows_it(
    service: tuple[Client, str], page: Browser
) -> None:
    client, url = service
    page.open(url)
    stream = client.generate(PROMPT, stream=True, max_tokens=1500, request_id="mine", **EARLY)
    page.wait_for("!!document.querySelector('#live tr[data-request=mine] button')")
    page.value("document.querySelector('#live tr[data-request=mine] button').click()")
    page.wait_for("document.querySelector('#chosen').textContent === 'mine'")
    count = "document.querySelectorAll('#timeline > .depths b').length"
    before = page.wait_for(count)
    page.wait_for(f"{count} > {before}")
    stream.close()
    page.wait_for("!document.querySelector('#follow').hidden")
    page.value("document.querySelector('#follow').click()")
    page.wait_for("document.querySelector('#follow').hidden")
    assert page.complaints == []


@needs_chromium
def test_a_request_id_is_text_and_never_markup(service: tuple[Client, str], page: Browser) -> None:
    client, url = service
    page.open(url)
    stream = client.generate(PROMPT, stream=True, max_tokens=1500, request_id=EVIL, **EARLY)
    wanted = json.dumps(EVIL)
    page.wait_for(f"{rows('live')}.some(r => r.children[0].textContent === {wanted})")
    stream.close()
    page.wait_for(f"{rows('ended')}.some(r => r.children[0].textContent === {wanted})")
    page.value(
        f"{rows('ended')}.find(r => r.dataset.request === {wanted}).querySelector('button').click()"
    )
    page.wait_for(f"document.querySelector('#chosen').textContent === {wanted}")
    assert page.value("document.querySelectorAll('main img, main script').length") == 0
    assert page.value("document.title") == "rlt status"
    assert page.complaints == []


@needs_chromium
def test_a_narrow_window_scrolls_tables_and_not_the_page(
    service: tuple[Client, str], page: Browser
) -> None:
    client, url = service
    client.generate(PROMPT, max_tokens=5, **EARLY)
    page.size(380, 800)
    page.open(url)
    page.wait_for("document.querySelectorAll('.depth-row').length")
    assert page.value("document.documentElement.scrollWidth") <= 380


@needs_chromium
def test_the_page_asks_for_the_token_and_shows_nothing_without_it(
    tmp_path: Path, page: Browser
) -> None:
    token = tmp_path / "token"
    token.write_text("opensesame\n")
    none = ("--prefill", "0", "--decode", "0")
    with serving(*none, "--http-token-file", str(token)) as (_, url):
        for path in ("/status.json", "/status/requests/1", "/metrics"):
            assert fetch(url + path)[0] == 401
            assert fetch(url + path, Authorization="Bearer wrong")[0] == 401
        assert fetch(url + "/status.json", Authorization="Bearer opensesame")[0] == 200
        page.open(url)
        page.wait_for("document.querySelector('#token-form')?.hidden === false")
        assert page.value("document.querySelector('#figures').hidden")
        page.value("document.querySelector('#token').value = 'opensesame'")
        page.value("document.querySelector('#token-form').requestSubmit()")
        page.wait_for("!document.querySelector('#figures').hidden")
        page.wait_for("document.querySelector('#state').textContent === 'no pair can serve'")
        page.value("sessionStorage.clear()")
        page.open("about:blank")
        page.open(f"{url}/#token=opensesame")
        shown = "document.querySelector('#figures')?.hidden === false && location.hash === ''"
        page.wait_for(shown)


def test_the_page_forbids_everything_that_is_not_its_own(service: tuple[Client, str]) -> None:
    _, url = service
    with urllib.request.urlopen(url) as answer:
        policy = answer.headers["Content-Security-Policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in text and "https://" not in text
    assert "<script>" not in text and "style=" not in text and "onclick" not in text
    assert fetch(f"{url}/status/requests/999999")[0] == 404


def test_the_figures_tell_no_word_of_prompts_and_answers(service: tuple[Client, str]) -> None:
    client, url = service
    with client.generate("a secret word", stream=True, max_tokens=1500, **EARLY) as stream:
        next(stream)
        _, status = fetch(url + "/status.json")
        number = json.loads(status)["requests"][0]["number"]
        _, one = fetch(f"{url}/status/requests/{number}")
    assert "secret" not in status + one
    assert json.loads(one)["parts"][0]["name"] == "queued"
