"""A real S3 server on loopback (moto's), which fails or dawdles when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

__all__ = ["Faults", "s3_server"]


class Faults:
    """What the server does to the next requests that write (or to all, ``reads`` too)."""

    def __init__(self) -> None:
        self.failing = 0
        self.stuck = threading.Event()
        self.stuck.set()
        self.stuck_for = 30.0
        self.pass_others = False
        """Whether requests that come from now on are served although earlier ones are stuck."""
        self.seen = 0
        self._under_way = 0
        self._changed = threading.Condition()

    def wait_until_quiet(self, deadline: float) -> None:
        """Returns once no request that writes is under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._under_way == 0, deadline), f"{self._under_way} under way"

    def wrap(self, app: Any) -> Any:
        """The application with the faults before it."""

        def faulty(environ: dict[str, Any], start: Any) -> Any:
            if environ["REQUEST_METHOD"] in ("PUT", "POST"):
                self.seen += 1
                with self._writing():
                    if not self.pass_others:
                        self.stuck.wait(self.stuck_for)
                    if self.failing > 0:
                        self.failing -= 1
                        start("503 Slow Down", [("Content-Type", "text/xml"), ("Content-Length", "0")])
                        return [b""]
                    return app(environ, start)
            return app(environ, start)

        return faulty

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()


@contextmanager
def s3_server() -> Iterator[tuple[str, Faults]]:
    """The server's URL, and its faults."""
    faults = Faults()
    app = faults.wrap(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        faults.stuck.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
