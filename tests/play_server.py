"""The server of `fissile play` in a thread, and a socket that asks it for experiments."""

import contextlib
import json
import socket
import threading
import time

import uvicorn
import websocket

from fissile.play import server
from fissile.play.turns import Turns

TOKEN = "the-token-of-the-tests"


class Place:
    """Where a server listens, and how many experiments are under way."""

    def __init__(self, port, turns):
        self.port, self.turns, self.host = port, turns, f"127.0.0.1:{port}"
        self.address = f"http://{self.host}/{TOKEN}/"

    def socket(self, origin=None, token=TOKEN, **options):
        """Connect as a page of this server does."""
        options = {"timeout": 60} | options
        return websocket.create_connection(
            f"ws://{self.host}/{token}/run", origin=origin or f"http://{self.host}", **options
        )


@contextlib.contextmanager
def playing(port=0):
    """Serve in a thread, with the limits of `fissile play`."""
    taken, turns = server.bound("127.0.0.1", port), Turns()
    config = server.config(server.app(TOKEN, turns, server.LOOPBACK))
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        yield Place(taken.getsockname()[1], turns)
    finally:
        running.should_exit = True
        thread.join()
        turns.stop()
        taken.close()


def events(page, number, **settings):
    """Ask for an experiment and yield its events."""
    page.send(json.dumps({"id": number, "settings": settings}))
    while True:
        event = json.loads(page.recv())
        if event["id"] == number:
            yield event
            if event["kind"] in ("done", "error"):
                return


def raw(place, data):
    """Send bytes as they are, and return the first line of the answer."""
    with socket.create_connection(("127.0.0.1", place.port), timeout=5) as line:
        line.sendall(data)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(OSError):
            while part := line.recv(65536):
                answer += part
        return answer.partition(b"\r\n")[0]
