"""A web server of one file that can be told to misbehave."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT = bytes(range(256)) * 4096  # a megabyte
MD5 = hashlib.md5(CONTENT).hexdigest()


class Site:
    """What the server does, and what it was asked for."""

    def __init__(self):
        self.content, self.etag, self.modified = CONTENT, '"one"', ""
        self.ranges, self.length, self.status, self.redirect = True, True, 200, ""
        self.cut = None  # bytes after which the connection is lost
        self.asked = []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        site = self.server.site
        site.asked.append(dict(self.headers))
        if site.redirect or site.status != 200:
            self.send_response(302 if site.redirect else site.status)
            self.send_header("Location", site.redirect)
            self.end_headers()
            return
        start = self.wanted(site)
        if start > len(site.content):
            self.send_response(416)
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        rest = site.content[start:]
        if site.length:
            self.send_header("Content-Length", str(len(rest)))
        if start:
            end = f"{len(site.content) - 1}/{len(site.content)}"
            self.send_header("Content-Range", f"bytes {start}-{end}")
        for name, value in (("ETag", site.etag), ("Last-Modified", site.modified)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(rest[: site.cut] if site.cut else rest)

    def wanted(self, site):
        asked = self.headers.get("Range")
        current = self.headers.get("If-Range") in (None, site.etag, site.modified)
        return int(asked[6:-1]) if asked and site.ranges and current else 0


@contextmanager
def serving(handler=Handler):
    """Serve in a thread; the server is handed over, what it does is in its ``site``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.site = Site()
    server.site.url = f"http://127.0.0.1:{server.server_port}/a.tar.gz"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def beside(path):
    """Name what is in the folder of a file."""
    return sorted(other.name for other in path.parent.iterdir())
