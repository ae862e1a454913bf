"""Files behind a web server, by ranges or whole, with nothing but the standard library.

What a server says is not believed: lengths are counted, ranges and versions compared with those asked for, a page is
not taken for a file, nor compressed bytes for those of the file. Credentials stay with the host they were meant
for.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import numpy as np

from ranvier.errors import ResourceLimit, WeightError, printable
from ranvier.records import dataclass
from ranvier.weights.access import GOOD_PIECE, Access, Transient, Unreachable
from ranvier.weights.blob import Bytes

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_OURS = ("accept-encoding", "user-agent", "range", "if-range")  # headers any host may see
_CHUNK = 1 << 20
_REDIRECTS = 8
UNPROVEN = "W/unproven"  # in place of the etag of what may have been cut off: no server tells that one
_SHOWN = 200  # characters of what a server says
_DIGITS = 18  # of a number of bytes; more is no size of a file
_CONTENT_RANGE = re.compile(rf"bytes (\d{{1,{_DIGITS}}})-(\d{{1,{_DIGITS}}})/(\d{{1,{_DIGITS}}}|\*)", re.ASCII)
_COMMIT = "X-Repo-Commit"
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BY_PROXY = re.compile(r"Tunnel connection failed: (\d{3})\b(.*)", re.ASCII | re.DOTALL)  # in the words of http.client
_SENDABLE = re.compile(r"[^\r\n\0\u0100-\U0010ffff]*")  # the value of a header
BEGINNING = 512  # bytes of a file by which a page is known
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html[\s>])", re.IGNORECASE)
_MARKUP = re.compile(rb"\s*<(!doctype|!--|\?xml|(html|head|body)[\s>/])", re.IGNORECASE)
# with a whole key: a file of safetensors may begin with the same few bytes, which are the length of its header
_JSON = re.compile(rb'\s*(\[\s*)*\{\s*"[^"\x00-\x1f]+"\s*:|\s*\[\s*"[^"\x00-\x1f]{6,}"\s*[],]')
_NO_JSON = (".safetensors", ".gguf", ".onnx", ".npy", ".npz", ".pt", ".pth", ".bin", ".ckpt")
_RAW = "raw"  # the format that may begin with anything
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Missing(WeightError):
    """The server says that there is no such file, or not for us."""


class Page(WeightError):
    """What came is a page, or an answer of some service, in place of a file of weights."""


class Contradiction(WeightError):
    """The server says two things about how long a file is."""


class _NoSuchRange(WeightError):
    """The file ends before the bytes that were asked for."""


@dataclass(frozen=True)
class Remote:
    """What a server says about a file."""

    size: int | None
    etag: str
    ranges: bool
    commit: str = ""  # of the repository that the file is in, where it is one of a hub


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _REDIRECTS

    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        if "location" in headers or "uri" in headers:
            fp.close()  # urllib would read all of what comes with it, and that may have no end
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if after.username is not None:  # urllib would take a name and a password for a part of the host
            raise WeightError(f"{shown(before)} leads to {shown(after)} with a name and a password, which it must not")
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme != "https"):
            raise WeightError(f"{shown(before)} leads to {shown(after)}, which is not followed")
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None:  # a hub tells it there, and leads to where large files lie
            vars(found)[_COMMIT] = vars(req).get(_COMMIT) or headers.get(_COMMIT)
        if found is not None and (before.scheme, before.netloc) != (after.scheme, after.netloc):
            # which of the caller's headers are secrets nobody knows: X-Api-Key, PRIVATE-TOKEN ...
            for name in [n for n in found.headers if n.lower() not in _OURS]:
                del found.headers[name]
        return found


def parsed(url: str) -> urllib.parse.SplitResult:
    """The parts of a URL of a file; WeightError where it is none."""
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            return parts
        why = "it must begin with http:// or https:// and a host"
    except ValueError:  # in whose words there may be a part of a password
        why = "the host, or the number of its port, is none"
    raise WeightError(f"{without_secrets(url)!r} is no address of a file: {why}")


def without_secrets(address: str) -> str:
    """What somebody wrote as an address, for people, whatever it is: where a name and a password may stand, dots."""
    begin, mark, rest = address.partition("?")[0].rpartition("@")
    return f"{begin.partition('//')[0]}//...@{rest}" if mark else rest


def file_name(parts: urllib.parse.SplitResult) -> str:
    """The name of the file that a URL leads to."""
    return urllib.parse.unquote(parts.path.rpartition("/")[2]) or parts.hostname or ""


def shown(parts: urllib.parse.SplitResult) -> str:
    """A URL for people: without a password, and without a query, which may be a signature."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _sendable(parts: urllib.parse.SplitResult) -> str:
    """A URL as it goes over the line: what people write in one (spaces, accents) escaped, no name and password."""
    try:
        host = parts.netloc.rpartition("@")[2].encode("idna").decode()
    except UnicodeError as error:
        raise WeightError(f"{shown(parts)} is no address of a file: {error}") from None
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    return urllib.parse.urlunsplit((parts.scheme, host, path, query, ""))


class HttpFile:
    """One file by its URL."""

    def __init__(
        self, url: str, access: Access, headers: Mapping[str, str] | None = None, format: str | None = None
    ) -> None:
        parts = parsed(url)
        self.access, self.format = access, format
        self.shown, self.name = shown(parts), file_name(parts)
        self._url = _sendable(parts)
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "ranvier", **(headers or {})}
        if parts.username is not None:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._headers.setdefault("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
        self._opener = access.connections.opener(access.stop, _Redirects())

    def question(self) -> Remote:
        """Size and version of the file, without its bytes."""
        return self.access.attempts(self.shown, self._question)

    def look(self) -> Remote:
        """The same, and Page where it begins as one."""
        return self.access.attempts(self.shown, lambda: self._question(BEGINNING))

    def confirm(self, size: int, etag: str) -> None:
        """Contradiction where the server gave a file of this size as a whole, and says of its first byte that it is
        one of more or fewer. Where it says nothing of the kind nobody knows better."""
        try:
            now = self._question()
        except WeightError:
            return
        if now.ranges and now.size != size and etag in ("", now.etag):
            raise Contradiction(f"{self.shown} says that it sends {size} bytes as the whole file, and has {now.size}")

    def _question(self, head: int = 1) -> Remote:
        try:
            answer = self._send({"Range": f"bytes=0-{head - 1}"})
        except _NoSuchRange:  # of an empty file
            answer = self._send({})
        with closing(answer) as reply:
            size = _range_of(reply)[2] if reply.status == 206 else self._length(reply)
            self._check_size(size)
            if head > 1:
                beginning = b""
                for piece in self._pieces(reply, None):
                    beginning += piece[: head - len(beginning)]
                    if len(beginning) == head:
                        break
                check_no_page(beginning, self.shown, self.name, self.format)
            return Remote(size, _etag(reply), reply.status == 206 and size is not None, _commit(reply))

    def range(self, start: int, stop: int, of: Remote) -> Bytes:
        """The bytes from start to stop, all of them, of this version of the file."""
        data = np.empty(stop - start, np.uint8)
        have = 0

        def attempt() -> None:
            nonlocal have
            begun = have = have if strong(of.etag) else 0
            try:
                for piece in self._range(start + have, stop, of):
                    data[have : have + len(piece)] = np.frombuffer(piece, np.uint8)
                    have += len(piece)
            except Transient as error:
                error.advanced = strong(of.etag) and have - begun >= GOOD_PIECE
                raise

        if len(data):
            self.access.attempts(self.shown, attempt)
        return data

    def _range(self, start: int, stop: int, of: Remote) -> Iterator[bytes]:
        with closing(self._send({"Range": f"bytes={start}-{stop - 1}"})) as reply:
            if reply.status != 206:
                raise WeightError(
                    f"{self.shown} gave parts before and now answers {reply.status} to a request for one; "
                    "preload it to have the whole file"
                )
            first, last, size = _range_of(reply)
            if size not in (None, of.size) or (of.etag and _etag(reply) not in ("", of.etag)):
                raise WeightError(f"{self.shown} changed while it was read; open it again")
            if (first, last) != (start, stop - 1):
                said = _plain(reply.headers.get("Content-Range", ""))
                raise WeightError(f"{self.shown} answered a request for bytes {start} to {stop} with {said!r}")
            yield from self._pieces(reply, stop - start)

    def stream(self, start: int, etag: str) -> tuple[int, int | None, str, Iterator[bytes]]:
        """One attempt at the bytes from ``start`` on: where they really begin, the whole size, etag, and pieces.

        A server that cannot go on where we stopped, or has another version by now, begins anew.
        """
        extra = {"Range": f"bytes={start}-", "If-Range": etag} if start and strong(etag) else {}
        try:
            reply = self._send(extra)
        except _NoSuchRange:
            if not extra:
                raise
            now = self._question()
            if (now.size, now.etag) == (start, etag):
                return start, start, etag, iter(())  # all of it had come
            return self.stream(0, "")
        try:
            begin, size, found = 0, None if reply.status == 206 else self._length(reply), _etag(reply)
            if size is None and reply.status == 200 and not reply.chunked:
                found = UNPROVEN  # it ends where the connection does, for whatever reason that is
            if reply.status == 206:
                begin, last, size = _range_of(reply)
                # If-Range asks for the rest only of the same version, but not every server knows it
                sound = begin == start and size is not None and last == size - 1 and found == etag
                if not extra or not sound:
                    reply.close()
                    if extra:
                        return self.stream(0, "")
                    raise WeightError(f"{self.shown} answered a request for all of it with a part")
            elif size is not None and (whole := _range_of(reply)[2]) not in (None, size):
                raise Contradiction(f"{self.shown} says that it sends {size} bytes as the whole file, and has {whole}")
            self._check_size(size)
        except BaseException:
            reply.close()
            raise
        return begin, size, found, self._body(reply, begin, size)

    def _body(self, reply: Any, begin: int, size: int | None) -> Iterator[bytes]:
        limit = self.access.file_bytes
        with closing(reply):
            at, beginning = begin, b""
            for piece in self._pieces(reply, None if size is None else size - begin):
                if not begin and len(beginning) < BEGINNING:  # it may come by a few bytes at a time
                    beginning += piece[: BEGINNING - len(beginning)]
                    check_no_page(beginning, self.shown, self.name, self.format)
                at += len(piece)
                if limit is not None and at > limit:
                    raise ResourceLimit("file_bytes", limit, at, self.shown)
                yield piece

    def _pieces(self, reply: Any, expected: int | None) -> Iterator[bytes]:
        """What comes, as it comes; Transient where it ends before as much has come as is expected."""
        came = 0
        while expected is None or came < expected:
            self.access.go_on(self.shown)
            try:
                piece = reply.read1(_CHUNK if expected is None else min(_CHUNK, expected - came))
            except (http.client.HTTPException, OSError, ValueError) as error:
                raise Transient(f"{_told(error)} after {came} bytes") from None
            if not piece:
                break
            came += len(piece)
            yield piece
        if expected is not None and came != expected:
            raise Transient(f"the connection ended after {came} of {expected} bytes")

    def _send(self, extra: Mapping[str, str]) -> Any:
        try:
            request = urllib.request.Request(self._url, headers={**self._headers, **extra})
            reply = self._opener.open(request, timeout=self.access.timeout)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise self._refusal(error) from None
        except (http.client.InvalidURL, ValueError, TypeError) as error:  # nothing was sent
            raise WeightError(f"{self.shown} cannot be asked: {self._unsendable(error)}") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
                raise Missing(f"{self.shown}: there is no such host") from None
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise WeightError(
                    f"{self.shown}: the server's certificate is not valid: {reason.verify_message}"
                ) from None
            refused = _BY_PROXY.match(str(reason))
            if refused is not None and int(refused[1]) not in _TRANSIENT:
                raise self._refused_by_proxy(int(refused[1]), refused[2]) from None
            raise Transient(_told(reason)) from None
        try:
            self._check_kind(reply)
        except BaseException:
            reply.close()
            raise
        return reply

    def _unsendable(self, error: Exception) -> str:
        """What is wrong with a request; of a header that cannot be sent the name alone, for its value may be secret."""
        for name, value in self._headers.items():
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if isinstance(text, str) and not _SENDABLE.fullmatch(text):
                return f"the header {name!r} has a value that cannot be sent, with the end of a line in it for example"
        return _plain(str(error))

    def _refusal(self, error: urllib.error.HTTPError) -> WeightError:
        why = _plain(str(error.reason))
        if error.code in _TRANSIENT:
            failed = Transient(f"the server answered {error.code} {why}")
            failed.after = _after(error.headers.get("Retry-After", ""))
            return failed
        if error.code == 407:
            return self._refused_by_proxy(error.code, why)
        if error.code == 416:
            return _NoSuchRange(f"{self.shown} is empty, or shorter than expected")
        hint = {401: "it wants credentials", 403: "it refuses us", 404: "there is no such file", 410: "it is gone"}
        return Missing(f"{self.shown}: {hint.get(error.code, 'the server refused')} ({error.code} {why})")

    def _refused_by_proxy(self, code: int, why: str) -> WeightError:
        """Of the file it says nothing: one in the cache may still be the right one."""
        return Unreachable(f"{self.shown}: the proxy refuses to lead there ({code} {_plain(why)})")

    def _check_kind(self, reply: Any) -> None:
        if reply.status not in (200, 206):  # "accepted", "no content", "changed by a proxy": no file in any case
            raise WeightError(
                f"{self.shown} answered {reply.status} {_plain(reply.reason)}, not with a file of weights"
            )
        kind = (reply.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind in ("text/html", "application/xhtml+xml"):
            raise Page(f"{self.shown} answered with a page ({kind}), not with a file of weights")
        transfers = {each.strip().lower() for each in reply.headers.get_all("Transfer-Encoding", [])}
        if transfers and transfers != {"chunked"}:  # the bytes would be those of the transfer, not of the file
            raise WeightError(f"{self.shown} sends the file as {_plain(', '.join(sorted(transfers)))!r}, not plainly")
        coding = (reply.headers.get("Content-Encoding") or "identity").strip().lower()
        if coding != "identity":
            raise WeightError(
                f"{self.shown} sends the file compressed ({coding}) though it was asked not to; "
                "lengths and checksums would be those of other bytes"
            )

    def _length(self, reply: Any) -> int | None:
        """How long the answer says it is; None where it does not say, or comes in chunks, which end by themselves."""
        told = {text.strip() for each in reply.headers.get_all("Content-Length", []) for text in each.split(",")}
        if reply.chunked or not told:
            return None
        text = min(told)
        if len(told) > 1 or not text.isdecimal() or len(text) > _DIGITS:
            raise WeightError(f"{self.shown} says that it sends {_plain(' or '.join(sorted(told)))!r} bytes")
        return int(text)

    def _check_size(self, size: int | None) -> None:
        limit = self.access.file_bytes
        if size is not None and limit is not None and size > limit:
            raise ResourceLimit("file_bytes", limit, size, self.shown)


def check_no_page(beginning: bytes, what: str, name: str = "", format: str | None = None) -> None:
    """Page where a file begins as a page does (to log in, or one that says what went wrong), or as JSON, unless its
    name may be that of some. Raw data may begin with anything, so of it only whole words of HTML are refused."""
    if _PAGE.match(beginning):
        raise Page(f"{what} answered with a page of HTML, not with a file of weights")
    suffix = f".{name.lower().rpartition('.')[2]}"
    if format == _RAW or suffix == f".{_RAW}":
        return
    text = beginning.removeprefix(b"\xef\xbb\xbf")
    if text.startswith(_UTF16):
        text = text.decode("utf-16", "ignore").encode()
    if _MARKUP.match(text):
        raise Page(f"{what} answered with a page of HTML or XML, not with a file of weights")
    if suffix in _NO_JSON and _JSON.match(text):
        raise Page(f"{what} answered with a page of JSON, not with a file of weights")


def strong(etag: str) -> bool:
    """Whether it promises the same bytes: a weak one does not, so what is kept by one cannot be gone on with."""
    return bool(etag) and not etag.startswith("W/")


def _told(error: Any) -> str:
    return f"{type(error).__name__}: {_plain(str(error))}" if str(error) else type(error).__name__


def _plain(text: str) -> str:
    """What a server said, in short and on one line."""
    shown = printable(" ".join(text[:_SHOWN].split()))
    return f"{shown} ..." if len(text) > _SHOWN else shown


def _range_of(reply: Any) -> tuple[int, int, int | None]:
    """First byte, last byte, size of the whole; the first two are -1 where the answer does not say."""
    match = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", "").strip())
    if match is None:
        return -1, -1, None
    return int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])


def _etag(reply: Any) -> str:
    text: str = reply.headers.get("ETag", "") or reply.headers.get("Last-Modified", "")
    return text


def _commit(reply: Any) -> str:
    """It becomes a part of names, so it is none that does not look like one."""
    text: str = vars(reply.asked).get(_COMMIT) or reply.headers.get(_COMMIT, "")
    return text if is_commit(text) else ""


def is_commit(text: str) -> bool:
    """Whether it names a state of a repository that stays as it is, as no branch and no tag does."""
    return _HASH.fullmatch(text) is not None


def _after(text: str) -> float:
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0
