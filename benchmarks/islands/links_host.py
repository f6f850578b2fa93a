"""A store or an island of `benchmarks.islands.links`, on an emulated host."""

import http.server
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any, ClassVar

import jax
import optax

from benchmarks.emulation.host import Host, serve
from dynamiq_jax.islands import Islands

PORT = 8000


class Store(http.server.BaseHTTPRequestHandler):
    """Named bytes in memory, over HTTP. There is no protection of any kind: for measuring alone."""

    protocol_version = "HTTP/1.1"
    known: ClassVar[dict[str, bytes]] = {}
    lock = threading.Lock()

    def do_PUT(self) -> None:
        """Store bytes unless there are some of this name."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            found = self.known.setdefault(self.path, data)
        self._answer(201 if found is data else 409)

    def do_GET(self) -> None:
        """Return bytes, or the names in a folder, whose path ends with a slash."""
        if self.path.endswith("/"):
            names = [n.removeprefix(self.path) for n in [*self.known] if n.startswith(self.path)]
            return self._answer(200, "\n".join(sorted(names)).encode())
        data = self.known.get(self.path)
        return self._answer(404) if data is None else self._answer(200, data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _answer(self, code: int, data: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class HttpTransport:
    """A transport to a `Store`."""

    def __init__(self, address: str):
        self._url = f"http://{address}:{PORT}/"

    def put(self, name: str, data: bytes) -> bool:
        """Store bytes; see `islands.Transport.put`."""
        request = urllib.request.Request(self._url + name, data=data, method="PUT")
        try:
            urllib.request.urlopen(request).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
            return False
        return True

    def get(self, name: str) -> bytes | None:
        """Return bytes; see `islands.Transport.get`."""
        try:
            with urllib.request.urlopen(self._url + name) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def names(self, folder: str) -> list[str]:
        """Return names; see `islands.Transport.names`."""
        with urllib.request.urlopen(f"{self._url}{folder}/") as answer:
            return answer.read().decode().split()


class StoreOrIsland(Host):
    """The store on host 0, an island on each other one."""

    def join(self) -> dict[str, Any]:
        """Start the store, or make the parameters of an island."""
        if self.index == 0:
            server = http.server.ThreadingHTTPServer(("", PORT), Store)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return {}
        self._params = {"w": jax.random.normal(jax.random.key(0), (self.config["size"],))}
        self._islands = Islands(
            transport=HttpTransport(self.config["store"]),
            name=f"{self.index}",
            count=self.num_hosts - 1,
            deadline=600,
            outer=optax.sgd(1.0),
            method=self.config["method"],
            store_every=1000,
        )
        return {}

    def begin(self) -> dict[str, Any]:
        """Join the other islands."""
        if self.index:
            self._state = self._islands.join(self._params)
        return {}

    def exchange(self) -> dict[str, Any]:
        """Time the exchange of a change."""
        if self.index == 0:
            return {"seconds": 0.0}
        reference = self._state.reference["w"]
        key = jax.random.fold_in(jax.random.key(self.index), self._state.round)
        moved = {"w": reference + jax.random.normal(key, reference.shape)}
        jax.block_until_ready(moved)
        start = time.monotonic()
        self._state = jax.block_until_ready(self._islands.exchange(moved, self._state))
        return {"seconds": time.monotonic() - start}

    def stop(self) -> dict[str, Any]:
        """Do nothing: the process ends with its parent."""
        return {}


if __name__ == "__main__":
    serve(sys.argv[1], StoreOrIsland)
