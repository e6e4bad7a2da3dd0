"""The server answers its own page, refuses all others, and survives what is thrown at it."""

import contextlib
import json
import random
import time
import urllib.error
import urllib.request

import pytest
import websocket
from play_server import TOKEN, events, playing, raw

from fissile.play import Settings, server
from fissile.play import events as direct

SMALL = {"samples": "600", "trials": "2", "warm_up": "1", "fine_tune": "1"}
LONG = {"warm_up": "400", "fine_tune": "200"}


@pytest.fixture(scope="module")
def place():
    with playing() as found:
        yield found


def asked(place, path, **headers):
    request = urllib.request.Request(f"http://{place.host}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def quiet(place):
    end = time.monotonic() + 20
    while len(place.turns):
        assert time.monotonic() < end, "an experiment goes on that nobody looks at"
        time.sleep(0.01)


def test_every_file_of_the_page_is_served_and_nothing_else(place):
    for name, content in server.assets().items():
        status, body, headers = asked(place, f"/{TOKEN}/{name}")
        assert (status, body) == (200, content)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert asked(place, f"/{TOKEN}/")[1] == server.assets()["index.html"]
    about = json.loads(asked(place, f"/{TOKEN}/about.json")[1])
    assert {"controls", "presets", "readings", "missing", "version"} <= about.keys()
    paths = [
        "/", "/index.html", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"/{TOKEN}/nothing.js",
        f"/{TOKEN}/../server.py", f"/{TOKEN}/..%2fserver.py", f"/{TOKEN}/%2e%2e/server.py",
        f"/{TOKEN}//etc/passwd", f"/{TOKEN}/style.css/x", f"/{TOKEN}/style.css%00",
        f"/{TOKEN}/run", f"/{TOKEN}/__init__.py", "/favicon.ico", "/docs", "/openapi.json",
    ]  # fmt: skip
    assert {path: asked(place, path)[0] for path in paths} == dict.fromkeys(paths, 404)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": "127.0.0.1.evil.example"},
        {"Host": "192.168.0.1"}, {"Host": ""}, {"Host": "[::1"}, {"Origin": "http://evil.example"},
        {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "https://127.0.0.1"},
    ],
    ids=repr,
)  # fmt: skip
def test_another_host_or_site_gets_nothing(place, headers):
    status, body, _ = asked(place, f"/{TOKEN}/about.json", **headers)
    assert status in (400, 403)
    assert b"controls" not in body


@pytest.mark.parametrize(
    "options",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"token": "wrong"},
     {"host": "evil.example"}, {"suppress_origin": True}],
    ids=repr,
)  # fmt: skip
def test_a_socket_from_elsewhere_is_refused(place, options):
    with pytest.raises(websocket.WebSocketBadStatusException) as error:
        place.socket(**options)
    assert error.value.status_code in (403, 404)


def test_an_open_server_takes_addresses_and_no_foreign_names():
    guard = server._Guard(None, (server.ANY, *server.LOOPBACK, "lab.local"))
    assert all(map(guard._known, ("10.0.0.3", "fe80::1", "localhost", "lab.local")))
    assert not any(map(guard._known, ("evil.example", "", "10.0.0.3.evil.example")))


def test_the_page_gets_what_the_engine_gives(place):
    page = place.socket()
    got = list(events(page, 5, **SMALL))
    page.close()
    own = [event for event in direct(Settings.read(SMALL)) if event]
    assert [event["kind"] for event in got] == [event["kind"] for event in own]
    for one, other in zip(got, own, strict=True):
        assert one.pop("id") == 5
        for event in (one, other):
            event.pop("seconds", None)
        assert one == json.loads(json.dumps(other))


def test_a_new_experiment_takes_the_place_of_the_old(place):
    page = place.socket()
    for number in range(30):
        page.send(json.dumps({"id": number, "settings": LONG | {"seed": str(number)}}))
    assert len(place.turns) <= 3
    last = list(events(page, 99, **SMALL))[-1]
    assert last["kind"] == "done"
    quiet(place)
    page.close()


def test_a_page_that_goes_stops_its_experiment(place):
    page = place.socket()
    page.send(json.dumps({"id": 1, "settings": LONG}))
    page.recv()
    page.close()
    quiet(place)
    page = place.socket()
    page.send(json.dumps({"id": 1, "settings": LONG}))
    page.recv()
    page.shutdown()  # without a goodbye, as a killed browser
    quiet(place)


def test_ten_tabs_all_get_news_before_one_is_done(place):
    pages = [place.socket() for _ in range(10)]
    for page in pages:
        page.send(json.dumps({"id": 1, "settings": LONG | {"samples": "600"}}))
    begun = [[json.loads(page.recv())["kind"] for _ in range(2)] for page in pages]
    assert begun == [["begin", "epochs"]] * 10
    for page in pages:
        page.close()
    quiet(place)


def test_too_many_pages_are_turned_away(place, monkeypatch):
    monkeypatch.setattr(server, "PAGES", 2)
    pages = [place.socket() for _ in range(2)]
    with pytest.raises(websocket.WebSocketException):
        place.socket()
    for page in pages:
        page.close()


#: What a page might send if it were broken, or not a page at all.
MESSAGES = [
    "", "{", "[]", "null", "1", '"x"', "{}", '{"id": "1"}', '{"id": 1.5, "settings": {}}',
    '{"id": 1, "settings": 3}', '{"id": 1, "settings": {"clauses": 8}}',
    '{"id": 1, "settings": {"clauses": "1e9"}}', '{"id": 1, "settings": {"a": "b"}}',
    '{"id": 1, "settings": {"clauses": ["8"]}}', "[" * 2000, '{"id":' * 600, "\x00", "\ud7ff" * 90,
    '{"id": NaN, "settings": {}}', '{"id": 1, "settings": {"l1": "1e-999999"}}',
    '{"id": ' + "9" * 3900 + "}",
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda text: repr(text)[:40])
def test_an_odd_message_is_answered_with_one_line(place, message):
    page = place.socket(timeout=10)
    page.send(message)
    answer = json.loads(page.recv())
    assert answer["kind"] == "error"
    assert len(answer["error"]) < 500
    assert list(events(page, 7, **SMALL))[-1]["kind"] == "done"  # the page goes on
    page.close()


def test_bytes_and_long_messages_do_no_harm(place):
    page = place.socket(timeout=10)
    page.send_binary(b"\x00\xff" * 100)
    assert json.loads(page.recv())["kind"] == "error"
    with contextlib.suppress(websocket.WebSocketException, OSError):
        page.send("x" * 100_000)
        assert not page.recv()
    page.shutdown()
    assert asked(place, f"/{TOKEN}/")[0] == 200


def odd_request(rng):
    """Return bytes that are nearly a request."""
    method = rng.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE", "get", "G" * 300])
    parts = [
        TOKEN, "..", "%2e%2e", "run", "style.css", "about.json", "%00", "é", "a" * 9000, "", "?",
        "?x=" + "1" * 500, "index.html", "http://evil.example/", "\\..\\", "%ff", "*",
    ]  # fmt: skip
    path = "/" + "/".join(rng.choices(parts, k=rng.randint(0, 4)))
    host = rng.choice(["127.0.0.1", "localhost", "evil.example", "", "[::1]", "127.0.0.1:99999"])
    headers = [f"Host: {host}"] * rng.choice([0, 1, 1, 1, 2])
    headers += rng.sample(
        ["Origin: null", "Upgrade: websocket", "Connection: Upgrade", "Content-Length: -1",
         "Content-Length: 99", "Transfer-Encoding: chunked", "Sec-WebSocket-Key: x",
         "Sec-WebSocket-Version: 1", "Range: bytes=0-", "Expect: 100-continue", "X: " + "y" * 9000,
         "Cookie: \xff", ": ", "Sec-WebSocket-Version: 13"], k=rng.randint(0, 5),
    )  # fmt: skip
    text = f"{method} {path} {rng.choice(['HTTP/1.1', 'HTTP/1.0', 'HTTP/9', ''])}\r\n"
    data = bytearray((text + "".join(f"{one}\r\n" for one in headers) + "\r\n").encode("latin-1"))
    for _ in range(rng.choice([0, 0, 1, 5])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_thousands_of_odd_requests_never_fail(place):
    rng, seen = random.Random(29), {}
    for _ in range(4000):
        data = odd_request(rng)
        since = time.monotonic()
        line = raw(place, data)
        assert time.monotonic() - since < 5, data
        status = int(line.split()[1]) if line.startswith(b"HTTP/") else 0
        seen[status] = seen.get(status, 0) + 1
        assert status in (0, 101, 200) or 400 <= status < 500, (status, data)
    assert {400, 403, 404} <= seen.keys()
    assert asked(place, f"/{TOKEN}/")[0] == 200
    quiet(place)


def test_a_token_is_kept_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "user_state_path", lambda *_, **__: tmp_path / "state")
    token = server.kept_token()
    path = tmp_path / "state" / "play-token"
    assert token == server.kept_token() == path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # others could have read it
    assert server.kept_token() != token
    path.write_bytes(b"\xff")
    assert len(server.kept_token()) == 22


def test_a_port_that_is_taken_is_one_clear_error(place):
    with pytest.raises(server.FissileError, match="give another --port"):
        server.bound("127.0.0.1", place.port)
    with pytest.raises(server.FissileError, match="--host"):
        server.bound("999.1.1.1", 0)
