"""Files of the Hugging Face Hub, through ``huggingface_hub``: its cache, its credentials, its layout of links."""

from __future__ import annotations

import errno
import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ranvier.errors import CannotWrite, IntegrityError, NotSupported, RanvierError, ResourceLimit, WeightError
from ranvier.logs import warn_once
from ranvier.records import dataclass
from ranvier.rules import Checked, Rule
from ranvier.weights.access import Access, NotCached, Unreachable
from ranvier.weights.blob import Blob, MemoryBlob
from ranvier.weights.cache import digest_once
from ranvier.weights.given import PATH_OR_NONE, TEXT, TEXT_OR_NONE, Kind
from ranvier.weights.http import HttpFile, Missing, is_commit
from ranvier.weights.sources.base import Context
from ranvier.weights.sources.web import UrlSource
from ranvier.weights.together import apart

_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git, for small files, or a sha256
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # told of what is written, without the name of the file


def _package() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils  # the package has these only once somebody has imported them
    except ImportError:
        raise NotSupported(
            "files of the Hugging Face Hub need the package 'huggingface_hub': pip install 'ranvier[hub]'"
        ) from None
    return huggingface_hub


@dataclass(frozen=True)
class HubSource(Checked):
    """``file`` of ``repo`` (``owner/name``) at a revision; ``cache_dir`` is the hub's cache, shared by other tools."""

    repo: str
    file: str
    revision: str = "main"
    cache_dir: str | os.PathLike[str] | None = None
    token: str | bool | None = field(default=None, repr=False)
    endpoint: str | None = None  # None: HF_ENDPOINT, or the public one
    format: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "repo": TEXT,
        "file": TEXT,
        "revision": TEXT,
        "cache_dir": PATH_OR_NONE,
        "token": Kind("text, True, False", (str, bool), optional=True),
        "endpoint": TEXT_OR_NONE,
        "format": TEXT_OR_NONE,
    }

    @property
    def address(self) -> str:
        return f"hf://{self.repo}/{self.file}@{self.revision}"

    def open(self, context: Context) -> Blob:
        path = self._cached()
        if path is None:
            if _offline(context):
                raise NotCached(f"{self.address} is not in the cache, and the network is not to be used")
            return self._by_url().open(context)
        self._verify(path, context)
        blob = MemoryBlob.of_file(path)
        blob.name, blob.path = self.file.rpartition("/")[2], path
        return blob

    def pinned(self, context: Context) -> HubSource:
        """This file at the commit that its branch is at: in the cache, where it is there, which may be an old one."""
        path = None if is_commit(self.revision) else self._cached()
        if path is not None:
            commit = path.parents[self.file.count("/")].name
        elif is_commit(self.revision) or _offline(context):
            return self
        else:
            url = self._by_url()
            commit = HttpFile(url.url, context.access, url.headers).question().commit
        return replace(self, revision=commit) if is_commit(commit) else self

    def sibling(self, name: str) -> HubSource:
        folder = self.file.rpartition("/")[0]
        place = f"{folder}/{name}" if folder else name
        return HubSource(self.repo, place, self.revision, self.cache_dir, self.token, self.endpoint)

    def fetch(self, context: Context) -> Path | None:
        self._check()
        hub = _package()
        access = context.access
        bar = _bar(self.address, access)
        # versions before 1.0 draw bars of their own and tell nobody else
        told = {"tqdm_class": bar} if "tqdm_class" in inspect.signature(hub.hf_hub_download).parameters else {}
        download = partial(
            hub.hf_hub_download,
            self.repo,
            self.file,
            revision=self.revision,
            cache_dir=self.cache_dir,
            token=self.token,
            endpoint=self.endpoint,
            local_files_only=access.offline,
            etag_timeout=access.timeout,
            **told,
        )
        try:
            found = apart(download, lambda: access.go_on(self.address))
        except RanvierError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and (error.filename is not None or error.errno in _NO_ROOM):
                raise CannotWrite(f"cannot keep {self.address} in the cache of the hub: {error}") from error
            raise self._told(error) from error
        self._verify(Path(found), context)
        return Path(found)

    def exists(self, context: Context) -> bool:
        if self._cached() is not None:
            return True
        return not _offline(context) and self._by_url().exists(context)

    def _check(self) -> None:
        """WeightError where the file would lie outside its repository: not every version of the client looks. Nor at
        the token, which it would put into the words of its error."""
        steps = self.file.split("/")
        if ".." in steps or not all(steps) or any(c in self.file for c in "\\\0"):
            raise WeightError(f"{self.address} is no name of a file on the hub: {self.file!r} is no path inside of one")
        if isinstance(self.token, str) and not (self.token.isascii() and self.token.isprintable()):
            raise WeightError(f"{self.address}: the token cannot be sent; is the end of a line in it?")  # not shown

    def _cached(self) -> Path | None:
        self._check()
        try:
            found = _package().try_to_load_from_cache(
                self.repo, self.file, cache_dir=self.cache_dir, revision=self.revision
            )
        except NotSupported:
            raise
        except Exception as error:
            raise self._told(error) from error
        return Path(found) if isinstance(found, str) else None

    def _verify(self, path: Path, context: Context) -> None:
        """IntegrityError where the loader is to verify, and the bytes of a cached file are not those that its name
        in the folder of contents promises."""
        if not context.verify:
            return
        try:
            blob = path.resolve()
            if blob.parent.name != "blobs" or not _CHECKSUM.fullmatch(blob.name):  # as where there are no links
                unknown = f"{self.address} cannot be verified: the cache of the hub does not tell its checksum"
                warn_once(f"weights {self.address} {blob}", unknown)
                return
            go_on = partial(context.access.go_on, self.address)
            actual = digest_once(blob, go_on, git=len(blob.name) == 40)
        except OSError as error:
            raise WeightError(f"{self.address} cannot be read from the cache of the hub: {error}") from error
        if actual != blob.name:
            raise IntegrityError(
                f"{self.address}: the copy in the cache of the hub is damaged: its checksum is {actual}, {blob.name} "
                f"was expected; remove {str(blob)!r} and preload it once more"
            )

    def _by_url(self) -> UrlSource:
        hub = _package()
        try:
            url = hub.hf_hub_url(self.repo, self.file, revision=self.revision, endpoint=self.endpoint)
            headers = hub.utils.build_hf_headers(token=self.token)
        except Exception as error:
            raise self._told(error) from error
        private = {name: value for name, value in headers.items() if name.lower() == "authorization"}
        return UrlSource(url, private, format=self.format)

    def _told(self, error: Exception) -> WeightError:
        errors = _package().errors
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        refused = getattr(getattr(error.__cause__ or error, "response", None), "status_code", None)
        if refused in (401, 403) and not isinstance(error, errors.RepositoryNotFoundError):
            return Missing(f"{self.address}: it refuses us ({refused})")
        if isinstance(error, errors.LocalEntryNotFoundError):
            return NotCached(f"{self.address} is neither in the cache nor within reach: {text}")
        for name, what in (
            ("GatedRepoError", "its owner gives access on request"),
            ("RepositoryNotFoundError", "there is no such repository, or it is private"),
            ("RevisionNotFoundError", "there is no such revision"),
            ("EntryNotFoundError", "there is no such file"),
        ):
            kind = getattr(errors, name, None)
            if kind is not None and isinstance(error, kind):
                return Missing(f"{self.address}: {what}")
        if isinstance(error, errors.HFValidationError):
            return WeightError(f"{self.address} is no name of a file on the hub: {text}")
        return Unreachable(f"{self.address}: {type(error).__name__}: {text}")


def _offline(context: Context) -> bool:
    """Whether the network is not to be used: also where the hub's own variable (HF_HUB_OFFLINE) says so."""
    return context.access.offline or bool(_package().constants.HF_HUB_OFFLINE)


def _bar(address: str, access: Access) -> type:
    """What the hub's client takes for a bar of ``tqdm``: it tells our progress, and has a say before a file is fetched
    and at every piece of it."""

    class Bar:
        def __init__(self, *_: Any, total: float | None = None, initial: float = 0, **__: Any) -> None:
            self.total, self.n = total, initial
            limit = access.file_bytes
            if total is not None and limit is not None and total > limit:
                raise ResourceLimit("file_bytes", limit, total, address)
            access.progress.begin(address, None if total is None else int(total), int(initial))

        def update(self, count: float | None = 1) -> None:
            access.go_on(address)
            self.n += count or 0
            access.progress.advance(address, int(count or 0))

        def close(self) -> None:
            access.progress.end(address)

        def refresh(self, *_: Any, **__: Any) -> None:
            pass

        set_description = set_postfix_str = refresh

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    return Bar
