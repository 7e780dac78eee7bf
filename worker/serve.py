"""Runs a backend under Dynamo's Worker, and turns what can go wrong at the start into one line and an exit code."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence

import uvloop
from dynamo.common.backend.worker import Worker

from worker.backend import Backend, Surroundings
from worker.config import ConfigError, WorkerConfig
from worker.flags import HelpRequested, load_config
from worker.registration import dynamo_config, resolved

USAGE_ERROR = 2
FAILURE = 1


class StartError(Exception):
    """The worker cannot start here. The text is one line for the operator."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends the worker. Returns the exit code: 0, 1 for a failure, 2 for a bad configuration."""
    try:
        config = load_config(argv, os.environ)
        check_system_port(os.environ)
        return _serve(config)
    except HelpRequested as request:
        sys.stdout.write(f"{request}\n")
        return 0
    except ConfigError as error:
        return _fail(error, USAGE_ERROR)
    except StartError as error:
        return _fail(error, FAILURE)


def check_system_port(environ: Mapping[str, str]) -> None:
    """Refuse a taken DYN_SYSTEM_PORT. Dynamo would go on without /health and /metrics."""
    text = environ.get("DYN_SYSTEM_PORT", "")
    if not text.isdigit() or int(text) == 0:
        return
    host, port = environ.get("DYN_SYSTEM_HOST", "0.0.0.0"), int(text)  # noqa: S104 - Dynamo's own default
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(
                f"DYN_SYSTEM_PORT {port} on {host} cannot be used ({error.strerror}): choose a free port"
            ) from None


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"pagelane: error: {' '.join(str(error).split())}\n")
    return code


def _serve(config: WorkerConfig, around: Surroundings | None = None) -> int:
    try:
        config = resolved(config)
        dynamo = dynamo_config(config)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from None
    backend = Backend(config, around)
    try:
        uvloop.run(Worker(backend, dynamo).run())
    except Exception as error:
        raise StartError(backend.failure or str(error)) from error
    if backend.failure is not None:
        raise StartError(backend.failure)
    return 0
