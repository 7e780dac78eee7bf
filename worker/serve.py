"""Runs a backend under Dynamo's Worker, and turns what can go wrong at the start into one line and an exit code."""

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import uvloop
from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.common.backend.worker import Worker
from dynamo.common.backend.worker import WorkerConfig as DynamoConfig

from engine.models.chat_template import check_template_file, check_templates, has_chat_template
from engine.models.folder import check_tokenizer
from worker.backend import Backend, Surroundings
from worker.config import MAX_SYSTEM_PORT, ConfigError, WorkerConfig
from worker.flags import HelpRequested, load_config
from worker.process import failed
from worker.registration import dynamo_config, resolved

USAGE_ERROR = 2
FAILURE = 1
WITHDRAWAL_S = 1.0
"""How long threads of Dynamo's runtime may take, once it says that it has ended, to take the rest of this worker out of
discovery. Nothing tells when they have; cut short, the entry of the worker's local indexer stays until its lease ends.
"""


class StartError(Exception):
    """The worker cannot start here. The text is one line for the operator."""


def run(argv: Sequence[str], around: Surroundings | None = None) -> NoReturn:
    """`main` as a process: ends it with the exit code and nothing else.

    The interpreter is not finalised. Threads of Dynamo's runtime outlive its shutdown, and one that wants the
    interpreter meanwhile aborts the process ("FATAL: exception not rethrown", about one exit in five under load), which
    turns a clean drain into exit code 134.
    """
    code = main(argv, around)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str], around: Surroundings | None = None) -> int:
    """Serve until a signal ends the worker. Returns the exit code: 0, 1 for a failure, 2 for a bad configuration."""
    try:
        config = load_config(argv, os.environ)
        check_system_port(os.environ)
        return _serve(config, around)
    except HelpRequested as request:
        sys.stdout.write(f"{request}\n")
        return 0
    except ConfigError as error:
        return failed(error, USAGE_ERROR)
    except StartError as error:
        return failed(error, FAILURE)


def check_system_port(environ: Mapping[str, str]) -> None:
    """Refuse a DYN_SYSTEM_PORT that is no port or is taken. Dynamo would go on without /health and /metrics."""
    text = environ.get("DYN_SYSTEM_PORT", "").strip()
    if text in ("", "0", "-1"):
        return
    if not (text.isascii() and text.isdigit() and int(text) <= MAX_SYSTEM_PORT):
        raise ConfigError(
            f"DYN_SYSTEM_PORT is {text!r}, but must be a port from 1 to {MAX_SYSTEM_PORT} (Dynamo reads it as a signed "
            "16-bit number), or 0 or -1 for none"
        )
    host, port = environ.get("DYN_SYSTEM_HOST", "0.0.0.0"), int(text)  # noqa: S104 - Dynamo's own default
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(
                f"DYN_SYSTEM_PORT {port} on {host} cannot be used ({error.strerror}): choose a free port"
            ) from None


def make_health_tell_of(endpoint: str, environ: MutableMapping[str, str]) -> None:
    """Have /live and /health tell of the endpoint that serves requests, unless `environ` says otherwise.

    Left alone, Dynamo counts every endpoint: the one for KV queries turns both green a moment before requests can be
    served. The endpoint has no canary, so that Dynamo turns it green when it serves and red at SIGTERM, for good: with
    one, each token of a running stream would turn it green again.
    """
    environ.setdefault("DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", json.dumps([endpoint]))


def tell_of_signals(backend: Backend) -> None:
    """Let `backend` know of the signals that end this process, before Dynamo takes them over: its handlers call those
    that they find.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: backend.leave())


def check_texts(config: WorkerConfig, dynamo: DynamoConfig) -> None:
    """Refuse what the frontend would need to turn text into tokens and back and does not have.

    Dynamo would find out after the model is loaded, or never say: the model just would not appear.
    """
    for key, value, known in (
        ("tool_call_parser", dynamo.tool_call_parser, get_tool_parser_names()),
        ("reasoning_parser", dynamo.reasoning_parser, get_reasoning_parser_names()),
    ):
        if value is not None and value not in known:
            raise ConfigError(f"{key} is {value!r}, but Dynamo knows {', '.join(sorted(known))}, and null is none")
    directory = Path(dynamo.model_name)
    check_tokenizer(directory / "tokenizer.json")
    if config.custom_jinja_template:
        check_template_file(Path(config.custom_jinja_template).resolve())
    else:
        check_templates(directory)
        if "chat" in config.endpoint_types and not has_chat_template(directory):
            raise ConfigError(
                f"{directory} has no chat template, so it cannot serve chat: set custom_jinja_template to a template, "
                "or endpoint_types to completions"
            )


def _say(line: str) -> None:
    sys.stderr.write(f"pagelane: {line}\n")
    sys.stderr.flush()


def _serve(config: WorkerConfig, around: Surroundings | None) -> int:
    try:
        config = resolved(config, _say)
        dynamo = dynamo_config(config)
        check_texts(config, dynamo)
    except (ValueError, OSError) as error:
        raise StartError(str(error)) from None
    backend = Backend(config, around)
    make_health_tell_of(config.endpoint, os.environ)
    tell_of_signals(backend)
    try:
        uvloop.run(Worker(backend, dynamo).run())
    except Exception as error:
        if backend.leaving and backend.failure is None:
            return 0
        raise StartError(backend.failure or str(error)) from error
    finally:
        time.sleep(WITHDRAWAL_S)
    if backend.failure is not None:
        raise StartError(backend.failure)
    return 0
