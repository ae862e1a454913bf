"""The provider ``remote``: a ``ranvier worker`` on this or another machine runs parts of the graph.

One stream of a gRPC call (HTTP/2) carries the messages of ``providers/distant`` both ways; gRPC brings encryption,
keep-alive and flow control. A token says who may use the worker.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from ranvier.devices import Device
from ranvier.errors import InvalidConfig, ProviderUnavailable
from ranvier.providers.distant.channel import PipeChannel
from ranvier.providers.distant.chunks import ChunkReader, ChunkWriter
from ranvier.providers.distant.client import DistantProvider
from ranvier.providers.distant.wire import Buffer, Message
from ranvier.records import dataclass

METHOD = "/ranvier.Worker/Exchange"
TOKEN_KEY = "ranvier-token"
TOKEN_VARIABLE = "RANVIER_WORKER_TOKEN"
ADDRESS_VARIABLE = "RANVIER_WORKER"
CA_VARIABLE = "RANVIER_WORKER_CA"
_CONNECT = 10.0  # seconds until a worker must have answered at all


@dataclass(frozen=True)
class RemoteOptions:
    """Where the worker is and how to speak to it. ``ca``: a file with the certificate that it must present; without one
    the connection is not encrypted. Environment variables give the address, the token and the file where they are left
    out."""

    address: str = ""
    token: str = field(default="", repr=False)
    ca: str = ""
    timeout: float = 60.0  # seconds that an answer may take
    message_bytes: int = 1 << 31  # of an answer, at most
    index: int = 0

    def __post_init__(self) -> None:
        for name in ("timeout", "message_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidConfig(f"RemoteOptions: {name} must be a positive number, got {value!r}")
        if not isinstance(self.index, int) or self.index < 0:
            raise InvalidConfig(f"RemoteOptions: index must be 0 or more, got {self.index!r}")
        if self.address and not _is_address(self.address):
            raise InvalidConfig(f"RemoteOptions: address must be HOST:PORT, got {self.address!r}")


def _is_address(text: Any) -> bool:
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


class RemoteProvider(DistantProvider):
    name: ClassVar[str] = "remote"
    Options: ClassVar[type] = RemoteOptions
    options: RemoteOptions

    def __init__(self, options: RemoteOptions | None = None) -> None:
        super().__init__(options or RemoteOptions())
        self.address = self.options.address or os.environ.get(ADDRESS_VARIABLE, "")
        self._token = self.options.token or os.environ.get(TOKEN_VARIABLE, "")
        self._ca = self.options.ca or os.environ.get(CA_VARIABLE, "")

    def configure(self, options: Any) -> RemoteProvider:
        return RemoteProvider(options)

    def available(self) -> str | None:
        return None if importlib.util.find_spec("grpc") is not None else "grpcio is not installed (ranvier[remote])"

    def _device(self) -> Device:
        return Device("remote", self.options.index)

    def _timeout(self) -> float:
        return self.options.timeout

    def _open(self) -> _GrpcChannel:
        if not self.address:
            raise ProviderUnavailable(self.name, f"no address: set its option 'address' or {ADDRESS_VARIABLE}")
        if not _is_address(self.address):
            raise ProviderUnavailable(self.name, f"{ADDRESS_VARIABLE} must be HOST:PORT, got {self.address!r}")
        certificate = None
        if self._ca:
            try:
                certificate = Path(self._ca).read_bytes()
            except OSError as error:
                raise InvalidConfig(f"RemoteOptions: ca cannot be read: {error}") from error
        return _GrpcChannel(self.address, self._token, certificate, self.options.message_bytes)


class _GrpcChannel:
    """The client's end of the call."""

    def __init__(self, address: str, token: str, certificate: bytes | None, limit: int) -> None:
        import grpc

        self._grpc = grpc
        self._address = address
        if certificate is None:
            self._connection = grpc.insecure_channel(address)
        else:
            self._connection = grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate))
        try:
            grpc.channel_ready_future(self._connection).result(_CONNECT)
        except grpc.FutureTimeoutError:
            self._connection.close()
            how = "with this certificate" if certificate else f"without encryption; with it, set 'ca' or {CA_VARIABLE}"
            raise ProviderUnavailable("remote", f"nobody answers at {address} {how}") from None
        self._writer = ChunkWriter()
        exchange = self._connection.stream_stream(METHOD)  # without serialisers: bytes go as they are
        self._call = exchange(iter(self._writer), metadata=((TOKEN_KEY, token),))
        self._stream = PipeChannel(ChunkReader(self._call), self._writer, limit)  # type: ignore[arg-type]

    def send(self, pieces: Sequence[Buffer]) -> None:
        self._stream.send(pieces)

    def receive(self) -> Message:
        try:
            return self._stream.receive()
        except self._grpc.RpcError as error:
            if error.code() is self._grpc.StatusCode.UNAUTHENTICATED:
                raise PermissionError(f"the worker at {self._address} does not accept the token") from None
            raise EOFError(f"{self._address}: {error.code().name.lower()}: {error.details()}") from None

    def close(self) -> None:
        self._writer.close()
        self._call.cancel()
        self._connection.close()
