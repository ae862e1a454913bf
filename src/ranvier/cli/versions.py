"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib import metadata


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ranvier_version() -> str:
    return package_version("ranvier") or "(run from a source tree)"
