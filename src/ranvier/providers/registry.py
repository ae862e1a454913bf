"""Which providers there are, by name, and which of them a session uses."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.metadata
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ranvier.devices import CPU, forced
from ranvier.errors import InvalidConfig, ProviderUnavailable, RanvierError, nearest
from ranvier.logs import logger, warn_once
from ranvier.providers.base import AvailableWith, ExecutionProvider
from ranvier.providers.claims import ClaimCache
from ranvier.providers.ledger import Ledger, ProviderStatus, added
from ranvier.providers.requirements import BestMatch, Requirements

ENTRY_POINTS = "ranvier.providers"
Factory = Callable[[], ExecutionProvider]

# Names of ONNX Runtime's providers that ordinary scripts pass; those without a provider here are known, and absent.
FOREIGN = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "tensorrt",
    "ROCMExecutionProvider": "rocm",
    "MIGraphXExecutionProvider": "migraphx",
    "CoreMLExecutionProvider": "coreml",
    "DmlExecutionProvider": "directml",
    "DnnlExecutionProvider": "dnnl",
    "XnnpackExecutionProvider": "xnnpack",
    "QNNExecutionProvider": "qnn",
    "AzureExecutionProvider": "azure",
}
_ABSENT = "this installation has no such provider"

# Names that promise every operator: the provider they mean, and who runs what that one declines.
COMPLETE = {"CPUExecutionProvider": "reference"}


class User(Protocol):
    """Something that holds providers and cannot outlive them: a session."""

    @property
    def providers(self) -> Sequence[ExecutionProvider]: ...

    def close(self) -> None: ...


class ProviderRegistry:
    """Providers in the order a session with ``providers="auto"`` would use them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._factories: dict[str, Factory] = {}
        self._aliases: dict[str, str] = {}
        self._made: dict[str, ExecutionProvider] = {}
        self._by_name_only: set[str] = set()
        self._numbered: dict[str, Callable[[int], ExecutionProvider]] = {}
        self._discovered = False
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self.claims = ClaimCache()
        self.ledger = Ledger()

    def register(
        self,
        name: str,
        factory: Factory,
        aliases: Sequence[str] = (),
        *,
        first: bool = False,
        auto: bool = True,
        numbered: Callable[[int], ExecutionProvider] | None = None,
    ) -> None:
        """Add a provider; the factory runs when it is first used. Without ``auto`` only its name brings it in.

        ``numbered`` makes it for one device of several: then ``name:1`` is a provider of its own.
        """
        with self._lock:
            if name in self._factories:
                raise InvalidConfig(f"provider {name!r} is already registered")
            taken = {a: n for a, n in [*self._aliases.items(), *((n, n) for n in self._factories)] if a in aliases}
            if taken:
                raise InvalidConfig(f"provider {name!r}: {', '.join(f'{a!r} means {n!r}' for a, n in taken.items())}")
            self._factories = {name: factory, **self._factories} if first else {**self._factories, name: factory}
            self._aliases.update(dict.fromkeys(aliases, name))
            if not auto:
                self._by_name_only.add(name)
            if numbered is not None:
                self._numbered[name] = numbered

    def unregister(self, name: str) -> None:
        with self._lock:
            if name not in self._factories:
                raise InvalidConfig(f"no provider {name!r}{nearest(name, self._factories)}")
            del self._factories[name]
            self._by_name_only.discard(name)
            self._numbered.pop(name, None)
            self._aliases = {a: n for a, n in self._aliases.items() if n != name}
            made = self._made.pop(name, None)
        self.claims.forget(name)
        if made is not None:
            made.close()

    def names(self) -> list[str]:
        """All registered names, in order."""
        self._discover()
        return list(self._factories)

    def automatic(self, name: str) -> bool:
        """Does ``auto`` stand for it too, or must somebody name it?"""
        return self.resolve(name).partition(":")[0] not in self._by_name_only

    def resolve(self, name: str) -> str:
        """The registered name for a name or alias; InvalidConfig with the nearest one for an unknown name."""
        found = self._lookup(name)
        if found is not None:
            return found
        base, _, number = name.rpartition(":")  # one device of several
        kind = self._lookup(base) if number.isascii() and number.isdigit() else None
        if kind in self._numbered:
            return f"{kind}:{int(number)}"
        known = [*self._factories, *self._aliases, *FOREIGN, *FOREIGN.values(), "auto"]
        raise InvalidConfig(f"unknown provider {name!r}{nearest(name, known)}")

    def _lookup(self, name: str) -> str | None:
        self._discover()
        if name in self._factories:
            return name
        own = dict.fromkeys(FOREIGN.values())  # "tensorrt" is understood like ONNX Runtime's name for it
        for names in (self._aliases, {n: n for n in self._factories}, FOREIGN, {n: n for n in own}):
            found = names.get(name) or next((n for a, n in names.items() if a.lower() == name.lower()), None)
            if found is not None:
                return found
        return None

    def get(self, name: str, options: Mapping[str, Any] | None = None) -> ExecutionProvider:
        """The provider itself; ProviderUnavailable with the reason when it cannot be had. ``options`` are those it will
        be configured with, where somebody gave some: with them it may be available although it is not by itself."""
        resolved = self.resolve(name)
        with self._lock:
            made = self._made.get(resolved)
            if made is None:
                factory = self._factories.get(resolved) or self._factory_of_one(resolved)
                if factory is None:
                    raise ProviderUnavailable(name, _absence(resolved))
                try:
                    made = factory()
                except ModuleNotFoundError as error:
                    if _is_ours(error.name or ""):
                        raise  # a flaw of this installation, and nothing a provider may lack
                    raise ProviderUnavailable(name, f"its library is missing ({error})") from error
                self._made[resolved] = made
        reason = made.available()
        if reason is not None and options and isinstance(made, AvailableWith):
            reason = made.available_with(options)
        if reason is not None:
            raise ProviderUnavailable(name, reason)
        return made

    def _factory_of_one(self, name: str) -> Factory | None:
        """What makes the provider of one device of several."""
        base, _, number = name.partition(":")
        numbered = self._numbered.get(base)
        return None if numbered is None else functools.partial(numbered, int(number))

    def available(self, *, auto: bool = False) -> list[str]:
        """Names of providers that can be used here, in order; with ``auto`` those that nobody has to ask for."""
        on_cpu = auto and forced(os.environ)[0] == CPU
        found = []
        for name in self.names():
            if auto and name in self._by_name_only:
                continue
            try:
                provider = self.get(name)
            except ProviderUnavailable as error:
                logger.info("%s", error)
                continue
            if on_cpu and provider.device.kind == "cuda":
                logger.info("provider %r is passed over: the environment insists on the CPU", name)
                continue
            found.append(name)
        return found

    def find_best(self, requirements: Requirements, *, auto: bool = False) -> BestMatch:
        """The first provider in order that has all of it, and what each of the others lacks.

        With ``auto`` only those that nobody has to ask for. Providers are made to be asked, so their libraries load.
        """
        suitable: list[str] = []
        missing: dict[str, tuple[str, ...]] = {}
        on_cpu = forced(os.environ)[0] == CPU
        for name in self.names():
            if auto and name in self._by_name_only:
                continue
            try:
                provider = self.get(name)
                lacks = requirements.missing(provider.capability(), provider.device.kind)
            except ProviderUnavailable as error:
                lacks = (error.reason,)
            except RanvierError as error:
                lacks = (str(error),)
            else:
                if on_cpu and provider.device.kind == "cuda":
                    lacks = ("leave of the environment, which insists on the CPU", *lacks)
            if lacks:
                missing[name] = lacks
            else:
                suitable.append(name)
        return BestMatch(suitable[0] if suitable else None, missing, tuple(suitable[1:]))

    def chain(
        self, wanted: Sequence[str], *, fallback: bool = True, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> tuple[list[ExecutionProvider], list[ProviderUnavailable]]:
        """The providers of a session in order of preference, and those that were asked for and are absent.

        ``auto`` stands for everything available that need not be asked for by name. A listed provider that cannot be
        had is passed over with one warning when another listed one can; when none can, the first error is raised.
        Without ``fallback`` the first absent one raises, and there is one provider only. ``options`` by name, as a
        session has them: some providers are available with them only.
        """
        chosen: dict[str, ExecutionProvider] = {}
        errors: list[ProviderUnavailable] = []
        for name in wanted:
            if name == "auto":
                chosen.update({n: self.get(n) for n in self.available(auto=True) if n not in chosen})
                continue
            try:
                provider = self.get(name, (options or {}).get(self.resolve(name)))
            except ProviderUnavailable as error:
                errors.append(error)
            else:
                chosen.setdefault(provider.name, provider)
            if name in COMPLETE:
                chosen.setdefault(COMPLETE[name], self.get(COMPLETE[name]))
        if errors and (not chosen or not fallback):
            raise errors[0]
        for absent in errors:
            warn_once(f"provider {absent.provider}", f"{absent}; using {', '.join(chosen)}")
        return list(chosen.values())[: None if fallback else 1], errors

    # -- as a whole -------------------------------------------------------------------------------------------------

    def users(self) -> list[User]:
        """Sessions that are open now."""
        with self._lock:
            return list(self._users)

    def watch(self, user: User) -> None:
        """Let :meth:`status` see what a session uses, and :meth:`shutdown` end it."""
        with self._lock:
            self._users.add(user)

    def unwatch(self, user: User) -> None:
        """A session that was closed."""
        with self._lock:
            self._users.discard(user)

    def status(self, name: str | None = None) -> list[ProviderStatus]:
        """How the providers stand, or one of them. Nothing is made or asked for it, so it costs little."""
        names = self.names() if name is None else [self.resolve(name)]
        operations = self.ledger.operations()
        with self._lock:
            made = dict(self._made)
            users = list(self._users)
        return [self._status(each, made.get(each), users, operations.get(each, 0)) for each in names]

    def _status(
        self, name: str, made: ExecutionProvider | None, users: Sequence[User], operations: int
    ) -> ProviderStatus:
        held = [p for user in users for p in user.providers if p.name == name]
        instances = list({id(p): p for p in [*([made] if made is not None else []), *held]}.values())
        reason: str | None = "nobody used it yet"
        if instances:
            reason = instances[0].available()
        elif name not in self._factories:
            reason = _ABSENT
        return ProviderStatus(
            name,
            initialised=bool(instances),
            ready=reason is None,
            reason=reason or "",
            devices=tuple(dict.fromkeys(str(p.device) for p in instances)),
            memory=added([p.allocator().stats() for p in instances]),
            operations=operations,
            last_error=self.ledger.last_error(name),
            sessions=len(held),
        )

    def shutdown(self) -> None:
        """Close all sessions, whose later calls raise SessionClosed, and all providers.

        Doing so twice does nothing more. A provider that is asked for afterwards is made anew.
        """
        with self._lock:
            users = list(self._users)
            self._users.clear()
            made, self._made = self._made, {}
        closing: list[User | ExecutionProvider] = [*users, *made.values()]
        for each in closing:
            try:
                each.close()
            except Exception as error:  # the others shall be closed all the same
                logger.warning("closing %r failed: %s: %s", each, type(error).__name__, error)
        self.claims.forget()

    def _discover(self) -> None:
        """Providers that installed packages bring through entry points; nothing is imported until one is used."""
        with self._lock:
            if self._discovered:
                return
            self._discovered = True
            for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
                if entry.name not in self._factories:
                    self.register(entry.name, functools.partial(_plugin, entry))


def _absence(name: str) -> str:
    """Why a provider that is known by name cannot be had, and how to reach that of ONNX Runtime."""
    there = next((foreign for foreign, own in FOREIGN.items() if own == name), None)
    hint = f"; that of ONNX Runtime is reached by the provider 'onnxruntime' with the option ep={there!r}"
    return _ABSENT if there is None else _ABSENT + hint


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _plugin(entry: importlib.metadata.EntryPoint) -> ExecutionProvider:
    """A provider of another package. One that cannot be imported must not keep the others from working."""
    try:
        made: ExecutionProvider = entry.load()()
    except ImportError as error:
        reason = f"{entry.value} cannot be imported ({error})"
        warn_once(f"provider {entry.name}", f"provider {entry.name!r}: {reason}")
        raise ProviderUnavailable(entry.name, reason) from error
    return made


def _ours(module: str, name: str) -> Factory:
    """A provider of this package, whose module is imported when it is first asked for."""

    def make() -> ExecutionProvider:
        made: ExecutionProvider = getattr(importlib.import_module(f"ranvier.providers.{module}"), name)()
        return made

    return make


def _one_gpu(index: int) -> ExecutionProvider:
    from ranvier.providers.cuda.provider import numbered

    return numbered(index)()


def _at_exit(process: int) -> None:
    """Not in a copy of the process: what it inherited belongs to the one that made it."""
    if os.getpid() == process:
        with contextlib.suppress(Exception):
            REGISTRY.shutdown()


REGISTRY = ProviderRegistry()
atexit.register(_at_exit, os.getpid())
REGISTRY.register("cpu", _ours("cpu.provider", "CpuProvider"), ("CPUExecutionProvider",))
# before the reference, which takes everything; by itself only where it is the way to the GPU
REGISTRY.register(
    "mlx",
    _ours("mlx.provider", "MlxProvider"),
    ("metal",),
    auto=sys.platform == "darwin" and platform.machine() == "arm64",
)
REGISTRY.register("reference", _ours("reference", "ReferenceProvider"), ("numpy",))
# other runtimes and distant devices are used when somebody names them: what runs where shall be no surprise
REGISTRY.register("onnxruntime", _ours("onnxruntime", "OnnxRuntimeProvider"), ("ort",), auto=False)
REGISTRY.register("openvino", _ours("openvino", "OpenVinoProvider"), ("OpenVINOExecutionProvider",), auto=False)
# the CPU provider runs ternary layers itself: this one is a policy, for those who ask for it
REGISTRY.register("bitnet", _ours("bitnet.provider", "BitNetProvider"), ("BitNetExecutionProvider",), auto=False)
# a GPU wakes with seconds of imports: it is there for those who say so
REGISTRY.register(
    "cuda",
    _ours("cuda.provider", "CudaProvider"),
    ("CUDAExecutionProvider", "gpu", "torch"),
    auto=False,
    numbered=_one_gpu,
)
REGISTRY.register("sim", _ours("sim.provider", "SimProvider"), auto=False)
REGISTRY.register("remote", _ours("remote.provider", "RemoteProvider"), auto=False)
