"""``ranvier worker``: a device that others reach over gRPC.

Every connection has tensors and parts of its own, which go when it ends. Nothing that arrives is executed but operators
of graphs, within the limits the worker was started with.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import Any

from ranvier.config import Limits
from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.logs import logger
from ranvier.providers.distant.channel import PipeChannel
from ranvier.providers.distant.chunks import CHUNK, ChunkReader
from ranvier.providers.distant.wire import BadMessage
from ranvier.providers.remote.provider import METHOD, TOKEN_KEY
from ranvier.records import dataclass
from ranvier.runtime.worker.device import DeviceServer

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True)
class WorkerSettings:
    """``token``: what clients must show; without one only this machine may connect. ``certificate`` and ``key``:
    contents of the files for encrypted connections. ``memory_bytes`` is per connection."""

    listen: str = "127.0.0.1:0"
    token: str = field(default="", repr=False)
    providers: tuple[str, ...] = ("cpu", "reference")
    threads: int | None = None
    memory_bytes: int | None = None
    message_bytes: int = 1 << 31
    connections: int = 8
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        host = self.listen.rpartition(":")[0]
        if not host or not self.listen.rpartition(":")[2].isdigit():
            raise InvalidConfig(f"a worker listens at HOST:PORT, not {self.listen!r}")
        if not self.token and host not in _LOOPBACK:
            raise InvalidConfig(f"a worker that others reach at {host} needs a token")
        if (self.certificate is None) != (self.key is None):
            raise InvalidConfig("an encrypted worker needs a certificate and its key")
        if self.connections < 1 or self.message_bytes < 1:
            raise InvalidConfig("a worker serves at least one connection, and messages of at least one byte")


class Worker:
    """A running server; ``address`` is where it listens."""

    def __init__(self, settings: WorkerSettings) -> None:
        try:
            import grpc
        except ImportError as error:
            raise ProviderUnavailable("remote", "grpcio is not installed (ranvier[remote])") from error
        self._grpc = grpc
        self._settings = settings
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix="ranvier-worker")
        service, _, method = METHOD.strip("/").partition("/")
        handler = grpc.method_handlers_generic_handler(
            service, {method: grpc.stream_stream_rpc_method_handler(self._exchange)}
        )
        self._server = grpc.server(
            self._pool,
            handlers=(handler,),
            maximum_concurrent_rpcs=settings.connections,
            options=(("grpc.max_receive_message_length", 2 * CHUNK), ("grpc.so_reuseport", 0)),
        )
        try:
            port = self._listen()
        except RuntimeError as error:
            raise InvalidConfig(f"a worker cannot listen at {settings.listen}: {error}") from error
        self.address = f"{settings.listen.rpartition(':')[0]}:{port}"
        self._server.start()

    def _listen(self) -> int:
        settings = self._settings
        if settings.certificate is None:
            return int(self._server.add_insecure_port(settings.listen))
        pair = [(settings.key, settings.certificate)]
        return int(self._server.add_secure_port(settings.listen, self._grpc.ssl_server_credentials(pair)))

    def wait(self) -> None:
        """Until somebody closes it."""
        self._ended.wait()

    def close(self, grace: float = 1.0) -> None:
        """End connections; those at work have ``grace`` seconds to finish."""
        self._ended.set()
        self._server.stop(grace).wait(grace + 1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._authenticate(context)
        settings = self._settings
        device = DeviceServer(
            settings.providers, threads=settings.threads, memory_limit=settings.memory_bytes, limits=settings.limits
        )
        incoming = PipeChannel(ChunkReader(requests), _Nowhere(), settings.message_bytes)  # type: ignore[arg-type]
        try:
            while not self._ended.is_set():
                try:
                    message = incoming.receive()
                except EOFError:
                    return
                except BadMessage as error:
                    context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))
                for piece in device.handle(message):
                    view = memoryview(piece).cast("B")
                    for at in range(0, len(view), CHUNK):
                        yield bytes(view[at : at + CHUNK])
        finally:
            device.close()

    def _authenticate(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get(TOKEN_KEY, "")
        expected = self._settings.token
        if expected and not hmac.compare_digest(str(given).encode(), expected.encode()):
            logger.warning("a connection from %s was refused: wrong token", context.peer())
            context.abort(self._grpc.StatusCode.UNAUTHENTICATED, "wrong token")


class _Nowhere:
    """The side of a channel that is not used: answers go out as the call's results."""

    def write(self, data: Any) -> int:
        raise BrokenPipeError("nothing is sent this way")

    def close(self) -> None:
        pass
