"""A TCP relay that can be cut: what a broken link looks like from both ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class CutProxy:
    """Relays 127.0.0.1:`port` to `target_port`, which may be set later.

    With `cut_after` set, each connection is reset once that many bytes went towards the server
    (`up`) or towards the client; setting it to None lets later connections live. `cuts` counts
    the connections that were reset; `crossed` has (time, bytes) of what went that way.
    """

    def __init__(self, *, up: bool = True, cut_after: int | None = None) -> None:
        self.cut_after = cut_after
        self.cuts = 0
        self.crossed: list[tuple[float, int]] = []
        self._up = up
        self.target_port = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # Shutting it down wakes the accepting thread, which closing alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection now."""
        with self._lock:
            ends, self._open = list(self._open), set()
        for end in ends:
            _break(end)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target_port))
            with self._lock:
                self._open |= {near, far}
            for source, sink, is_up in ((near, far, True), (far, near, False)):
                args = (source, sink, is_up is self._up)
                threading.Thread(target=self._relay, args=args, daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                passed += len(data)
                if counted:
                    self.crossed.append((time.monotonic(), len(data)))
                if counted and self.cut_after is not None and passed >= self.cut_after:
                    self.cuts += 1
                    break
        except OSError:
            pass
        finally:
            for end in (source, sink):
                _break(end)


def _break(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        end.shutdown(socket.SHUT_RDWR)
    end.close()
