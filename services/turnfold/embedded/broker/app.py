"""Runs the broker as a process: opens the data directory, serves, and says in one line what is wrong."""

import asyncio
import errno
import logging
import resource
import ssl
from pathlib import Path

import typer

from turnfold.embedded.broker.broker import Broker, DataDirectoryInUse
from turnfold.embedded.broker.login import Users, read_users
from turnfold.embedded.broker.server import Listener, serve_until_stopped, write_ready_file
from turnfold.schemas.errors import UserError


class StartError(UserError):
    """Why the broker cannot start, and what to do about it, in one line."""


def run(
    data: Path,
    *,
    host: str,
    port: int,
    advertised_host: str = "",
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
    tls_client_ca: Path | None = None,
    users: Path | None = None,
    fsync: bool = False,
    auto_create_topics: bool = True,
    ready_file: Path | None = None,
    exit_with_parent: bool = False,
) -> None:
    """Serve until stopped by a signal.

    Raises StartError if the port or the data cannot be had, or a file of keys or users is not one.
    """
    logging.basicConfig(level=logging.WARNING, format="turnfold broker: %(message)s")

    def announce(bound_port: int) -> None:
        typer.echo(
            f"turnfold broker (development only) listening on {host}:{bound_port}, data in {data}"
        )
        if ready_file is not None:
            write_ready_file(ready_file, host, bound_port)

    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # it would speak of an earlier run
    _allow_many_files()
    listener = Listener(
        host,
        port,
        advertised_host=advertised_host,
        tls=_tls(tls_certificate, tls_key, tls_client_ca),
        users=None if users is None else _users(users),
    )
    broker = _open(data, fsync=fsync, auto_create_topics=auto_create_topics)
    serving = serve_until_stopped(broker, listener, announce, watch_stdin=exit_with_parent)
    try:
        asyncio.run(serving)
    except OSError as error:
        raise StartError(_explain(error, host, port)) from error


def _allow_many_files() -> None:
    """Every partition keeps files open: take as many as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where the limit is "none", the kernel still has one of its own; stay with ours then.
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open(data: Path, *, fsync: bool, auto_create_topics: bool) -> Broker:
    try:
        return Broker(data, fsync=fsync, auto_create_topics=auto_create_topics)
    except DataDirectoryInUse as error:
        raise StartError(
            f"another broker is using the data in {data}: stop it, or choose another --data"
        ) from error
    except OSError as error:
        raise StartError(
            f"cannot use {data} for data ({error.strerror}): choose another --data"
        ) from error


def _tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None
) -> ssl.SSLContext | None:
    """With a `client_ca` the broker asks clients for certificates too."""
    if certificate is None:
        if key is not None or client_ca is not None:
            raise StartError("expected --tls-certificate too, which the other TLS options go with")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        files = f"{certificate}{f' and {key}' if key else ''}"
        raise StartError(
            f"expected PEM files with a certificate chain and its private key in {files}: {error}"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise StartError(
                f"expected a PEM file with certificates in {client_ca}: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _users(path: Path) -> Users:
    try:
        return read_users(path)
    except (OSError, ValueError) as error:
        raise StartError(f"cannot use {path} for users: {error}") from error


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken: stop what listens there, "
            "or choose another --port (0 takes any free one)"
        )
    if error.errno in (errno.EACCES, errno.EADDRNOTAVAIL) or error.errno is None:
        return f"cannot listen on {host}:{port} ({error}): choose another --host or --port"
    return str(error)
