"""``ranvier worker``: offer this machine to others that run models."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import click

from ranvier.cli.options import with_output
from ranvier.cli.render import Output
from ranvier.errors import InvalidConfig
from ranvier.providers.remote.provider import TOKEN_VARIABLE
from ranvier.rules import amount


def _amount(_ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    try:
        found = None if text is None else amount(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None
    return None if found is None else int(found)


@click.command()
@click.option("--listen", default="127.0.0.1:50551", show_default=True, metavar="HOST:PORT", help="Port 0: any.")
@click.option("--token-file", type=click.Path(path_type=Path), help=f"A file with the token; else {TOKEN_VARIABLE}.")
@click.option("--provider", "-p", "providers", default="cpu,reference", show_default=True, help="Who runs the parts.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of one run.")
@click.option("--memory", callback=_amount, metavar="BYTES", help="What one connection may hold, such as 4G.")
@click.option(
    "--message", callback=_amount, metavar="BYTES", default="2G", show_default=True, help="The largest message taken."
)
@click.option("--connections", type=click.IntRange(min=1), default=8, show_default=True, help="At the same time.")
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM file: connections are encrypted.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM file with the certificate's key.")
@with_output
def command(
    output: Output,
    listen: str,
    token_file: Path | None,
    providers: str,
    threads: int | None,
    memory: int | None,
    message: int,
    connections: int,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Run parts of models for others, until interrupted.

    They name this machine: ranvier run model.onnx --provider remote,cpu with RANVIER_WORKER=HOST:PORT. Without a token
    only this machine may connect.
    """
    from ranvier.runtime.worker.network import Worker, WorkerSettings

    settings = WorkerSettings(
        listen,
        token=_read(token_file).decode().strip() if token_file else os.environ.get(TOKEN_VARIABLE, ""),
        providers=tuple(p.strip() for p in providers.split(",") if p.strip()),
        threads=threads,
        memory_bytes=memory,
        message_bytes=message,
        connections=connections,
        certificate=_read(certificate) if certificate else None,
        key=_read(key) if key else None,
    )
    worker = Worker(settings)

    def end(*_: Any) -> None:
        worker.close()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if output.json:
        output.emit({"address": worker.address, "providers": list(settings.providers), "pid": os.getpid()})
    else:
        output.show(f"listening at {worker.address}, parts run on {', '.join(settings.providers)}")
    worker.wait()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror or error}") from error
