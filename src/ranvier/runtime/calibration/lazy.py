"""Figures for the providers of a session: those kept on disk, else a short measurement, once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from ranvier.config import SessionConfig
from ranvier.logs import logger
from ranvier.providers.base import ExecutionProvider
from ranvier.runtime.calibration import store
from ranvier.runtime.calibration.measure import measure
from ranvier.runtime.calibration.table import Figures

VARIABLE = "RANVIER_CALIBRATE"
TOGETHER = 1.0  # seconds that an unasked-for calibration may take, all providers together
_OFF = ("off", "0", "no", "false")
_measuring = threading.Lock()  # two at a time would disturb each other
_failed: set[str] = set()  # keys of providers that could not be measured: asked once only


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
    missing = [provider for provider in providers if provider.name not in found]
    if missing and measuring and os.environ.get(VARIABLE, "").strip().lower() not in _OFF:
        with _measuring:
            found = kept(providers, config)
            missing = [provider for provider in providers if provider.name not in found]
            for provider in missing:
                figures = _measured(provider, config, TOGETHER / len(missing))
                if figures is not None:
                    found[provider.name] = figures
    return found if all(provider.name in found for provider in providers) else {}


def calibrated(provider: ExecutionProvider, config: SessionConfig, **how: Any) -> Figures:
    """Measure a provider and keep the figures; errors are the caller's."""
    with _measuring:
        figures = measure(provider, config, **how)
        store.save(_key(provider, config), figures)
    return figures


def _measured(provider: ExecutionProvider, config: SessionConfig, seconds: float) -> Figures | None:
    key = _key(provider, config)
    text = repr(sorted(key.items()))
    if text in _failed:
        return None
    logger.info("measuring %s for placement by cost, which happens once; %s=off prevents it", provider.name, VARIABLE)
    try:
        figures = measure(provider, config, quick=True, budget=seconds)
    except Exception as error:  # a provider may raise anything, and the session may do without its figures
        logger.info("%s cannot be measured (%s): nominal costs decide", provider.name, error)
        _failed.add(text)
        return None
    store.save(key, figures)
    return figures


def _key(provider: ExecutionProvider, config: SessionConfig) -> dict[str, Any]:
    from ranvier.runtime.program import provider_options  # programs are placed by what is measured here

    options = provider_options(provider, config.provider_options.get(provider.name, {}))
    return store.key_of(provider, config.threads, options)
