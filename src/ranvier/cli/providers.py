"""``ranvier providers``: what could run a model here."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import click

from ranvier.cli.options import with_output
from ranvier.cli.render import Output, table
from ranvier.errors import ProviderUnavailable
from ranvier.providers.registry import REGISTRY


@click.command()
@click.option("--full", is_flag=True, help="Import other runtimes and count what they have.")
@with_output
def command(output: Output, full: bool) -> None:
    """List execution providers in the order a session would ask them."""
    found = [provider_facts(name, full=full) for name in REGISTRY.names()]
    if output.json:
        output.emit({"providers": found})
        return
    rows = [
        (
            p["name"],
            "yes" if p["available"] else f"no: {p['reason']}",
            "by itself" if p["automatic"] else "by name",
            p["device"],
            p["operators"],
            p["dtypes"],
            ", ".join(p["aliases"]),
            p["notes"],
        )
        for p in found
    ]
    output.show(
        table(["!provider", "available", "used", "!device", "operators", "types", "also known as", "notes"], rows)
    )


def provider_facts(name: str, *, full: bool = True) -> dict[str, Any]:
    """One registered provider; where it cannot be used, the reason. Without ``full`` no other runtime is imported."""
    facts: dict[str, Any] = {"name": name, "available": False, "reason": "", "automatic": REGISTRY.automatic(name)}
    facts |= {"device": "", "aliases": [], "operators": "", "dtypes": "", "memory": [], "notes": ""}
    try:
        provider = REGISTRY.get(name)
    except ProviderUnavailable as error:
        return facts | {"reason": error.reason}
    facts |= {"available": True, "device": str(provider.device), "aliases": list(provider.aliases)}
    library = getattr(provider, "library", None)
    if library is not None and library not in sys.modules and not full:
        version = importlib.metadata.version(library)
        return facts | {"operators": "its own", "dtypes": "its own", "notes": f"{library} {version}"}
    can = provider.capability()
    return facts | {
        "operators": "all" if can.ops is None else str(len(can.ops)),
        "dtypes": "all" if can.dtypes is None else ", ".join(sorted(d.name for d in can.dtypes)),
        "memory": list(can.memory),
        "notes": can.notes,
    }
