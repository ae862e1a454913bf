"""Figures for the providers of a session: those kept on disk, else a short measurement, once.

What was measured while the machine was at work is provisional: it is used, for it is the best there is, and measured
again by a later session, a few times at most. Of several such measurements the shortest times count.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.logs import logger
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.calibration import store
from ranvier.runtime.calibration.measure import measure
from ranvier.runtime.calibration.table import Figures, least_of

VARIABLE = "RANVIER_CALIBRATE"
TOGETHER = 1.0  # seconds that an unasked-for calibration may take, all providers together
AGAIN = 60.0  # seconds, at least, until figures that are provisional are measured again
TIMES = 5  # measurements on a machine that is always at work; then they are what the machine is like
_OFF = ("off", "0", "no", "false")
_measuring = threading.Lock()  # two at a time would disturb each other
_failed: set[str] = set()  # keys of providers that could not be measured: asked once only
_measured_at: dict[str, float] = {}  # when this process measured, by the key


def kept(providers: Sequence[ExecutionProvider], config: SessionConfig) -> dict[str, Figures]:
    """What is known already, by provider."""
    found = {provider.name: store.load(_key(provider, config)) for provider in providers}
    return {name: figures for name, figures in found.items() if figures is not None}


def figures_for(
    providers: Sequence[ExecutionProvider], config: SessionConfig, *, measuring: bool = True
) -> dict[str, Figures]:
    """Figures of all of them, or of none: measured times must not compete with nominal ones.

    Without ``measuring``, and with ``RANVIER_CALIBRATE=off``, only what is known counts, and nominal costs decide
    where not all of them are.
    """
    found = kept(providers, config)
    if measuring and _wanted(providers, found, config) and os.environ.get(VARIABLE, "").strip().lower() not in _OFF:
        with _measuring:
            found = kept(providers, config)
            wanted = _wanted(providers, found, config)
            for provider in wanted:
                figures = _measured(provider, config, TOGETHER / len(wanted), found.get(provider.name))
                if figures is not None:
                    found[provider.name] = figures
    return found if all(provider.name in found for provider in providers) else {}


def _wanted(
    providers: Sequence[ExecutionProvider], found: dict[str, Figures], config: SessionConfig
) -> list[ExecutionProvider]:
    """Those to measure: nothing is known of them, or only what was measured on a machine at work, a while ago."""
    return [
        provider
        for provider in providers
        if provider.name not in found
        or (0 < found[provider.name].provisional < TIMES and _now() - _last(provider, config) >= AGAIN)
    ]


def _last(provider: ExecutionProvider, config: SessionConfig) -> float:
    return _measured_at.get(_text(_key(provider, config)), -AGAIN)


def calibrated(provider: ExecutionProvider, config: SessionConfig, **how: Any) -> Figures:
    """Measure a provider and keep the figures; errors are the caller's."""
    with _measuring:
        figures = measure(provider, config, **how)
        store.save(_key(provider, config), figures)
    return figures


def _measured(
    provider: ExecutionProvider, config: SessionConfig, seconds: float, before: Figures | None
) -> Figures | None:
    key = _key(provider, config)
    text = _text(key)
    if text in _failed:
        return None
    logger.info("measuring %s for placement by cost, which happens once; %s=off prevents it", provider.name, VARIABLE)
    try:
        figures = measure(provider, config, quick=before is None or before.quick, budget=seconds)
    except Exception as error:  # a provider may raise anything, and the session may do without its figures
        logger.info("%s cannot be measured (%s): nominal costs decide", provider.name, error)
        _failed.add(text)
        return None
    _measured_at[text] = _now()
    if figures.provisional:
        logger.info("the machine is at work: the figures of %s are provisional", provider.name)
        figures = figures if before is None else least_of(before, figures)
    store.save(key, figures)
    return figures


def _text(key: dict[str, Any]) -> str:
    return repr(sorted(key.items()))


_now = time.monotonic


def _key(provider: ExecutionProvider, config: SessionConfig) -> dict[str, Any]:
    from ranvier.runtime.program import provider_options  # programs are placed by what is measured here

    options = provider_options(provider, config.provider_options.get(provider.name, {}))
    return store.key_of(provider, config.threads, options)
