"""``ranvier providers``: what could run a model here."""

from __future__ import annotations

from typing import Any

import click

from ranvier.cli.options import with_output
from ranvier.cli.render import Output, table
from ranvier.errors import ProviderUnavailable
from ranvier.providers.registry import REGISTRY


@click.command()
@with_output
def command(output: Output) -> None:
    """List execution providers in the order a session would ask them."""
    found = [provider_facts(name) for name in REGISTRY.names()]
    if output.json:
        output.emit({"providers": found})
        return
    rows = [
        (
            p["name"],
            "yes" if p["available"] else f"no: {p['reason']}",
            p["device"],
            p["operators"],
            p["dtypes"],
            ", ".join(p["aliases"]),
            p["notes"],
        )
        for p in found
    ]
    output.show(table(["!provider", "available", "!device", "operators", "types", "also known as", "notes"], rows))


def provider_facts(name: str) -> dict[str, Any]:
    """One registered provider; where it cannot be used, the reason."""
    facts: dict[str, Any] = {"name": name, "available": False, "reason": "", "device": "", "aliases": []}
    facts |= {"operators": "", "dtypes": "", "memory": [], "notes": ""}
    try:
        provider = REGISTRY.get(name)
    except ProviderUnavailable as error:
        return facts | {"reason": error.reason}
    can = provider.capability()
    return facts | {
        "available": True,
        "device": str(provider.device),
        "aliases": list(provider.aliases),
        "operators": "all" if can.ops is None else str(len(can.ops)),
        "dtypes": "all" if can.dtypes is None else ", ".join(sorted(d.name for d in can.dtypes)),
        "memory": list(can.memory),
        "notes": can.notes,
    }
