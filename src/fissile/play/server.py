"""The server of the page: local, with a token in its address, and no file but the page's own.

>>> app("a-token", Turns(), hosts=("127.0.0.1",))
<starlette.applications.Starlette object at ...>
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import fissile
from fissile._common.errors import FissileError, first_line, needs, printable
from fissile.play.experiment import Event
from fissile.play.pictures import installed
from fissile.play.settings import PRESETS, Settings, controls, readings
from fissile.play.turns import Run, Turns

needs("starlette", "play")
needs("uvicorn", "play")
needs("wsproto", "play")

import uvicorn  # noqa: E402
from platformdirs import user_state_path  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.datastructures import Headers  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import PlainTextResponse, Response  # noqa: E402
from starlette.routing import Route, WebSocketRoute  # noqa: E402
from starlette.types import ASGIApp, Message, Receive, Scope, Send  # noqa: E402
from starlette.websockets import WebSocket, WebSocketDisconnect  # noqa: E402

#: Bytes of a message from the page, open pages, and news that wait for a slow one, at most.
MESSAGE, PAGES, WAITING = 4096, 64, 100
#: Where the page is found by default.
PORT = 8642
#: What is trained first, unseen: whatever has to be loaded is then there.
WARM = Settings(samples=500, trials=2, warm_up=1, fine_tune=1)
#: Among the hosts of an open server: any address, but no name that somebody could point here.
ANY = "[address]"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::[0-9]{1,5})?")
_TOKEN = re.compile(r"[\w-]{22}")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KINDS = {
    "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"
}  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def about() -> dict[str, Any]:
    """Return what the page needs to begin with: its controls and presets.

    >>> about()["version"]
    '0.1.0'
    """
    missing = installed()
    return {
        "version": fissile.__version__,
        "controls": controls(),
        "readings": readings(),
        "missing": missing,
        "presets": [
            {"name": one.name, "title": one.title, "about": one.about,
             "settings": one.settings.changed()}
            for one in PRESETS if not missing.get(one.settings.task)
        ],
    }  # fmt: skip


def assets() -> dict[str, bytes]:
    """Return the files of the page by name: no others can be asked for.

    >>> sorted(assets())[0]
    'chart.js'
    """
    folder = resources.files("fissile.play").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def app(token: str, turns: Turns, hosts: Sequence[str]) -> ASGIApp:
    """Return the application; whoever asks for another host or without the token gets nothing."""
    files, pages = assets(), set[WebSocket]()

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name == "about.json":
            return Response(json.dumps(about()), 200, _HEADERS, "application/json")
        if name not in files:
            return PlainTextResponse("There is no such page.\n", 404, _HEADERS)
        return Response(files[name], 200, _HEADERS, _KINDS[name.rpartition(".")[2]])

    async def run(page: WebSocket) -> None:
        if len(pages) >= PAGES:
            await page.close(1013)
            return
        await page.accept()
        pages.add(page)
        try:
            await _Page(page, turns).serve()
        finally:
            pages.discard(page)

    routes = [
        WebSocketRoute(f"/{token}/run", run),
        Route(f"/{token}/", asset, methods=["GET"]),
        Route(f"/{token}/{{name}}", asset, methods=["GET"]),
    ]
    made = Starlette(routes=routes)
    made.router.redirect_slashes = False
    return _Guard(made, hosts)


class _Guard:
    """Lets requests through that a page of this server makes, and nobody else's."""

    def __init__(self, inner: ASGIApp, hosts: Sequence[str]) -> None:
        self._inner, self._hosts = inner, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif why := self._refusal(scope):
            if scope["type"] == "websocket":
                await WebSocket(scope, receive, send).close(1008)
            else:
                await PlainTextResponse(f"{why}\n", 403, _HEADERS)(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._known(_name(hosts[0])):
            return "This host is not served here."
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return "Another site may not ask here."
        if scope["type"] == "websocket" and not origins:
            return "Only the page may ask here."
        return ""

    def _known(self, name: str) -> bool:
        """Return whether a host is one of those served; an open server has any address."""
        return name in self._hosts or (ANY in self._hosts and _is_address(name))


def _name(host: str) -> str:
    """Return the name in a Host header: ``_name("[::1]:80")`` is ``::1``."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _is_address(name: str) -> bool:
    """Return whether a host is an address: a name could be pointed here by somebody else."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Page:
    """One open page: its latest experiment, and the news it has not been sent yet."""

    def __init__(self, page: WebSocket, turns: Turns) -> None:
        self._page, self._turns = page, turns
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[Run | None, str]] = asyncio.Queue()
        self._run: Run | None = None

    async def serve(self) -> None:
        """Answer until the page goes."""
        sending = asyncio.create_task(self._send())
        try:
            while True:
                message = await self._page.receive()
                if message["type"] == "websocket.disconnect":
                    return
                self._answer(message)
        finally:
            self._cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, WebSocketDisconnect, RuntimeError):
                await sending

    def _answer(self, message: Message) -> None:
        """Begin what a message asks for, in place of what was asked before."""
        number: object = None
        try:
            text = message.get("text")
            asked = json.loads(text) if isinstance(text, str) else None
            asked = asked if isinstance(asked, dict) else {}
            number = asked.get("id")
            if type(number) is not int or not 0 <= number < 2**53:
                number = None
                raise FissileError("a message is an object with an id and settings")
            self._cancel()
            if "settings" in asked:
                self._begin(number, Settings.read(asked["settings"]))
        except (FissileError, ValueError, RecursionError) as error:
            why = printable(first_line(error), 400)
            self._news.put_nowait((None, json.dumps({"id": number, "kind": "error", "error": why})))

    def _begin(self, number: object, settings: Settings) -> None:
        def tell(event: Event) -> bool:
            text = json.dumps({"id": number} | event, allow_nan=False, separators=(",", ":"))
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so will this thread
                self._loop.call_soon_threadsafe(self._news.put_nowait, (run, text))
            return self._news.qsize() < WAITING

        run = self._run = self._turns.add(settings, tell)

    def _cancel(self) -> None:
        if self._run is not None:
            self._turns.cancel(self._run)
            self._run = None

    async def _send(self) -> None:
        while True:
            run, text = await self._news.get()
            if run is None or run is self._run:  # not of what was given up meanwhile
                await self._page.send_text(text)
            if run is not None and run.full_since is not None:
                self._turns.resume(run)


def config(served: ASGIApp) -> uvicorn.Config:
    """Return how the application is served: every length bounded, nothing written but warnings."""
    return uvicorn.Config(
        served, log_level="warning", access_log=False, ws="wsproto", ws_max_size=MESSAGE,
        lifespan="off", timeout_graceful_shutdown=1, server_header=False, proxy_headers=False,
        h11_max_incomplete_event_size=8192, limit_concurrency=4 * PAGES,
    )  # fmt: skip


def serve(host: str, port: int | None = None, ready: Callable[[str], object] = print) -> None:
    """Serve the page until Ctrl-C; ``ready`` is told its address.

    >>> serve("127.0.0.1", 8642)
    """
    token = kept_token()
    taken = bound(host, port)
    with contextlib.closing(taken):
        turns = Turns()
        turns.add(WARM, tell=lambda event: True)  # so that what it needs is loaded
        local = host in LOOPBACK
        hosts = LOOPBACK if local else (ANY, *LOOPBACK, host.lower())
        named = f"[{host}]" if ":" in host else host
        ready(f"http://{named}:{taken.getsockname()[1]}/{token}/")
        try:
            uvicorn.Server(config(app(token, turns, hosts))).run(sockets=[taken])
        finally:
            turns.stop()


def kept_token() -> str:
    """Return this user's token: the same tomorrow, so that an open page finds a new server.

    >>> len(kept_token())
    22
    """
    path = user_state_path("fissile", appauthor=False) / "play-token"
    try:
        token = path.read_text("ascii").strip()
        if _TOKEN.fullmatch(token) and not path.stat().st_mode & 0o077:
            return token
    except (OSError, UnicodeDecodeError):
        pass  # there is none yet, or none to trust
    token = secrets.token_urlsafe(16)
    with contextlib.suppress(OSError):  # it is then a token for this time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
    return token


def bound(host: str, port: int | None) -> socket.socket:
    """Return a socket at this port; by default at the usual one, or a free one if that is taken."""
    if port is None:
        with contextlib.suppress(FissileError):
            return bound(host, PORT)
        port = 0
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)  # a browser that comes too early waits
    except (OSError, OverflowError) as error:
        made.close()
        raise FissileError(
            f"cannot listen at {host}, port {port}: {first_line(error)}; give another --port or "
            "--host"
        ) from None
    return made
