"""Files behind a web server, by ranges or whole, with nothing but the standard library.

What a server says is not believed: lengths are counted, ranges compared with those asked for, a page of HTML is not
taken for a file. Credentials stay with the host they were meant for.
"""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import Any

from ranvier.errors import ResourceLimit, WeightError
from ranvier.records import dataclass
from ranvier.weights.access import Access, Transient

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_PRIVATE = ("authorization", "cookie", "proxy-authorization")
_CHUNK = 1 << 20
_REDIRECTS = 8


class Missing(WeightError):
    """The server says that there is no such file, or not for us."""


@dataclass(frozen=True)
class Remote:
    """What a server says about a file."""

    url: str
    size: int | None
    etag: str
    ranges: bool


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme != "https"):
            raise WeightError(f"{_shown(req.full_url)} leads to {_shown(newurl)}, which is not followed")
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None:
            found.method = req.get_method()  # a question stays one
            if (before.scheme, before.netloc) != (after.scheme, after.netloc):
                for name in [n for n in found.headers if n.lower() in _PRIVATE]:
                    del found.headers[name]
        return found


def _shown(url: str) -> str:
    """A URL for people: without a password, and without a query, which may be a signature."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{host}{port}{parts.path}"


class HttpFile:
    """One file by its URL."""

    def __init__(self, url: str, access: Access, headers: Mapping[str, str] | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WeightError(f"{url!r} is no address of a file: it must begin with http:// or https://")
        self.url, self.access = url, access
        self.shown = _shown(url)
        self.name = urllib.parse.unquote(parts.path.rpartition("/")[2]) or parts.hostname
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "ranvier", **(headers or {})}
        self._opener = urllib.request.build_opener(_Redirects())

    def question(self) -> Remote:
        """Size and version of the file, without its bytes."""
        return self.access.attempts(self.shown, self._question)

    def _question(self) -> Remote:
        with closing(self._send("GET", {"Range": "bytes=0-0"})) as reply:
            self._check_kind(reply)
            size: int | None
            if reply.status == 206:
                size = _total(reply.headers.get("Content-Range", ""))
            else:
                size = _length(reply)
            self._check_size(size)
            return Remote(reply.url, size, _etag(reply), reply.status == 206 and size is not None)

    def range(self, start: int, stop: int, etag: str = "") -> bytes:
        """The bytes from start to stop, all of them, of the version with this etag where one is given."""
        return self.access.attempts(self.shown, lambda: self._range(start, stop, etag))

    def _range(self, start: int, stop: int, etag: str) -> bytes:
        if stop <= start:
            return b""
        with closing(self._send("GET", {"Range": f"bytes={start}-{stop - 1}"})) as reply:
            said = reply.headers.get("Content-Range", "")
            if reply.status != 206 or not said.startswith(f"bytes {start}-{stop - 1}/"):
                raise WeightError(
                    f"{self.shown} answered a request for bytes {start} to {stop} with {said or reply.status}"
                )
            if etag and _etag(reply) not in ("", etag):
                raise WeightError(f"{self.shown} changed while it was read")
            data = b"".join(_pieces(reply, stop - start))
        if len(data) != stop - start:
            raise Transient(f"{len(data)} of {stop - start} bytes came")
        return data

    def stream(self, start: int, etag: str) -> tuple[int, int | None, str, Iterator[bytes]]:
        """One attempt at the bytes from ``start`` on: where they really begin, the whole size, etag, and pieces.

        A server that cannot go on where we stopped, or has another version by now, begins anew.
        """
        extra = {"Range": f"bytes={start}-", **({"If-Range": etag} if etag else {})} if start else {}
        reply = self._send("GET", extra)
        try:
            self._check_kind(reply)
            begin, size = 0, _length(reply)
            if reply.status == 206:
                said = reply.headers.get("Content-Range", "")
                begin, size = start, _total(said)
                if not said.startswith(f"bytes {start}-"):
                    raise WeightError(f"{self.shown} answered a request for bytes from {start} on with {said!r}")
            self._check_size(size)
            found = _etag(reply)
        except BaseException:
            reply.close()
            raise
        return begin, size, found, self._body(reply, None if size is None else size - begin)

    def _body(self, reply: Any, expected: int | None) -> Iterator[bytes]:
        limit = self.access.file_bytes
        with closing(reply):
            came = 0
            for piece in _pieces(reply, expected):
                came += len(piece)
                if limit is not None and came > limit:
                    raise ResourceLimit("file_bytes", limit, came, self.shown)
                yield piece
            if expected is not None and came != expected:
                raise Transient(f"the connection ended after {came} of {expected} bytes")

    def _send(self, method: str, extra: Mapping[str, str]) -> Any:
        request = urllib.request.Request(self.url, headers={**self._headers, **extra}, method=method)
        try:
            return self._opener.open(request, timeout=self.access.timeout)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise self._refusal(error) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
                raise Missing(f"{self.shown}: there is no such host") from None
            raise Transient(f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__) from None

    def _refusal(self, error: urllib.error.HTTPError) -> WeightError:
        if error.code in _TRANSIENT:
            failed = Transient(f"the server answered {error.code} {error.reason}")
            failed.after = _after(error.headers.get("Retry-After", ""))
            return failed
        if error.code == 416:
            return WeightError(f"{self.shown} is empty, or shorter than expected")
        hint = {401: "it wants credentials", 403: "it refuses us", 404: "there is no such file", 410: "it is gone"}
        return Missing(f"{self.shown}: {hint.get(error.code, 'the server refused')} ({error.code} {error.reason})")

    def _check_kind(self, reply: Any) -> None:
        kind = (reply.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind in ("text/html", "application/xhtml+xml"):
            raise WeightError(f"{self.shown} answered with a page ({kind}), not with a file of weights")

    def _check_size(self, size: int | None) -> None:
        limit = self.access.file_bytes
        if size is not None and limit is not None and size > limit:
            raise ResourceLimit("file_bytes", limit, size, self.shown)


def _pieces(reply: Any, expected: int | None) -> Iterator[bytes]:
    left = expected
    while left is None or left > 0:
        try:
            piece = reply.read(_CHUNK if left is None else min(_CHUNK, left))
        except (http.client.HTTPException, OSError) as error:
            raise Transient(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        if not piece:
            return
        if left is not None:
            left -= len(piece)
        yield piece


def _length(reply: Any) -> int | None:
    text = reply.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _total(said: str) -> int | None:
    text = said.rpartition("/")[2]
    return int(text) if text.isdecimal() else None


def _etag(reply: Any) -> str:
    text: str = reply.headers.get("ETag", "") or reply.headers.get("Last-Modified", "")
    return "" if text.startswith("W/") else text  # a weak one does not promise the same bytes


def _after(text: str) -> float:
    if text.isdecimal():
        return float(text)
    try:
        from datetime import UTC, datetime

        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
