"""How a worker presents itself to Dynamo: names, parsers, planes."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from dynamo.common.backend.worker import WorkerConfig as DynamoConfig

from engine.models.hub import parse_hub_id
from engine.models.resolve import Say, resolve_model
from kv.geometry import PAGE_SIZES
from worker.config import WorkerConfig
from worker.model import parsers

logger = logging.getLogger("pagelane.registration")

PAGE_SIZE_KEY = "pagelane_kv_page_size"
"""Key of the registration's runtime data that holds the page size in decimal."""

LEASED = ("etcd", "file")
"""Discovery backends in which a registration lasts as long as a lease."""

LEASE_S = 10.0
"""How long Dynamo's lease on a registration lasts without being kept alive."""

DISCOVERY_S = 0.25
"""How long to wait for what discovery knows of other workers; file discovery answers in a few milliseconds."""


def served_name(model: str) -> str:
    """A hub id without its revision, or the last part of a path, without `.gguf`: a link's own, not its target's."""
    hub_id = None if Path(model).expanduser().exists() else parse_hub_id(model)
    if hub_id is not None:
        return hub_id.repo
    path = Path(os.path.abspath(Path(model).expanduser()))
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def resolved(config: WorkerConfig, say: Say = lambda line: None) -> WorkerConfig:
    """`config` with the model's directory for `model`, and with the name that it is served under.

    A `.gguf` file is imported first, or at least read from end to end, and a hub id downloaded, so this is not for an
    event loop; `say` is told how far that has come. Raises `ModelError`, a ValueError, with one line.
    """
    directory = resolve_model(config.model, config.load_format, revision=config.revision, say=say)
    name = config.served_model_name or served_name(config.model)
    return msgspec.structs.replace(config, model=str(directory), revision=None, served_model_name=name)


def dynamo_config(config: WorkerConfig) -> DynamoConfig:
    """What Dynamo's Worker is told; `config.model` is a directory."""
    tool_call_parser, reasoning_parser = parsers(Path(config.model))
    return DynamoConfig(
        namespace=config.namespace,
        component=config.component,
        endpoint=config.endpoint,
        model_name=config.model,
        served_model_name=config.served_model_name or served_name(config.model),
        endpoint_types=config.endpoint_types,
        discovery_backend=config.discovery_backend,
        request_plane=config.request_plane,
        event_plane=config.event_plane,
        custom_jinja_template=config.custom_jinja_template,
        tool_call_parser=tool_call_parser if config.tool_call_parser == "auto" else config.tool_call_parser,
        reasoning_parser=reasoning_parser if config.reasoning_parser == "auto" else config.reasoning_parser,
        enable_local_indexer=True,
        enable_kv_routing=config.enable_kv_events,
    )


@dataclass(frozen=True, slots=True)
class RegistrationWatch:
    """How a worker looks whether it is still registered. Times in seconds."""

    period_s: float = 0.5
    lost_after_s: float = 3.0
    """How long the registration may be missing: discovery may be slow, but what is gone does not come back."""
    appears_within_s: float = 60.0
    """How long a worker may take to be found for the first time."""
    lease_s: float = LEASE_S
    clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    """Runs on while the machine is suspended, as leases do."""


async def registration_lost(client: Any, worker_id: int, watch: RegistrationWatch) -> str:
    """Wait until worker `worker_id` can no longer be found through `client`, Dynamo's of its endpoint. Returns why.

    Dynamo never registers a worker again whose lease has run out (1.6.1, seen): it would live on and serve nothing.
    """
    patience = watch.appears_within_s
    looked = found = watch.clock()
    while True:
        await asyncio.sleep(watch.period_s)
        now = watch.clock()
        if now - looked > watch.lease_s:
            return f"this worker stood still for {now - looked:.0f} s and its lease lasts {watch.lease_s:g} s"
        looked = now
        registered = _registered(client)
        if registered is None:
            found = now
            continue
        if worker_id in registered:
            found, patience = now, watch.lost_after_s
        elif now - found >= patience:
            return f"this worker has not been in discovery for {now - found:.1f} s"


def _registered(client: Any) -> list[int] | None:
    """Ids of the workers that discovery knows, None if it cannot be asked: that says nothing about anybody."""
    try:
        return list(client.instance_ids())
    except Exception as error:
        logger.warning("discovery cannot be asked whether this worker is registered: %s", error)
        return None


async def other_page_size(endpoint: Any, page_size: int) -> int | None:
    """The page size of a worker that is registered on `endpoint` with another one than `page_size`, or None."""
    client = await endpoint.client()

    async def registered(size: int) -> bool:
        with contextlib.suppress(Exception):  # a timeout: nobody has this page size
            return bool(await client.wait_for_instances_by_runtime_data(PAGE_SIZE_KEY, str(size), 1, DISCOVERY_S))
        return False

    others = [size for size in PAGE_SIZES if size != page_size]
    found = await asyncio.gather(*map(registered, others))
    return next((size for size, there in zip(others, found, strict=True) if there), None)
