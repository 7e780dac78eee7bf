"""How a worker presents itself to Dynamo: names, parsers, planes."""

from pathlib import Path

from dynamo.common.backend.worker import WorkerConfig as DynamoConfig

from worker.config import WorkerConfig
from worker.model import parsers


def served_name(model: str) -> str:
    """The last part of a model's path, without `.gguf`."""
    path = Path(model).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def model_directory(config: WorkerConfig) -> Path:
    """The model's directory; a `.gguf` file is imported first. Raises `ConfigError` or `ModelError` with one line."""
    from engine.models.resolve import resolve_model

    return resolve_model(config.model)


def dynamo_config(config: WorkerConfig) -> DynamoConfig:
    """What Dynamo's Worker is told."""
    tool_call_parser, reasoning_parser = parsers(model_directory(config))
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
