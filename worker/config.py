"""Settings of a worker: those of its engine core, and those of the Dynamo side.

Each key is documented where it is declared; flags, YAML keys, `--help` and error messages are made from here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from engine.config import CoreConfig, Positive
from engine.ladder import Ladder, LadderError
from kv.budget import SizeError, parse_size
from kv.geometry import PageSizeError, check_page_size

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")]
"""A part of a Dynamo endpoint's path, whose parts are joined by dots."""

Seconds = Annotated[float, Meta(ge=0.01, le=1e9)]

ENVIRONMENT = {
    "served_model_name": "DYN_SERVED_MODEL_NAME",
    "namespace": "DYN_NAMESPACE",
    "component": "DYN_COMPONENT",
    "endpoint_types": "DYN_ENDPOINT_TYPES",
    "discovery_backend": "DYN_DISCOVERY_BACKEND",
    "request_plane": "DYN_REQUEST_PLANE",
    "event_plane": "DYN_EVENT_PLANE",
    "tool_call_parser": "DYN_TOOL_CALL_PARSER",
    "reasoning_parser": "DYN_REASONING_PARSER",
    "custom_jinja_template": "DYN_CUSTOM_JINJA_TEMPLATE",
}
"""Variables that give a key's default, as Dynamo's own backends and its Kubernetes operator name them."""

SHUTDOWN_DEADLINE = ("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", 30.0)
GRACE_PERIOD = ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 5.0)

CORE_STOP_S = 3.0
"""How long the engine core may take to end after it was asked to, in seconds."""
CORE_KILL_S = 1.0
"""How long the end of a killed engine core is waited for, in seconds."""

MAX_SYSTEM_PORT = 32767
"""Largest DYN_SYSTEM_PORT: Dynamo reads it as a signed 16-bit number."""


_LONGEST_LINE = 800
"""Letters of an error: names and values are cut long before, but not paths."""


class ConfigError(ValueError):
    """The configuration cannot be used. The text is one line that names key, value and what is allowed.

    Whatever of the user's stands in it, it is made one line that a terminal can show.
    """

    def __init__(self, text: str) -> None:
        line = " ".join(text.split())
        line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
        super().__init__(line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}...")


def shown(value: object, limit: int = 80) -> str:
    """`value` for a message, cut short."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class WorkerConfig(CoreConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Everything a worker is told at its start."""

    served_model_name: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Name that clients use for the model; null is the hub id or the last part of the path."),
    ] = None
    namespace: Annotated[
        Name, Meta(description="Dynamo namespace; DYN_NAMESPACE_WORKER_SUFFIX is appended if it is set.")
    ] = "dynamo"
    component: Annotated[Name, Meta(description="Dynamo component that this worker is an instance of.")] = "backend"
    endpoint: Annotated[Name, Meta(description="Dynamo endpoint that serves requests.")] = "generate"
    endpoint_types: Annotated[
        str, Meta(min_length=1, description="OpenAI endpoints to offer: chat, completions, or both with a comma.")
    ] = "chat,completions"
    discovery_backend: Annotated[
        Literal["kubernetes", "etcd", "file", "mem"], Meta(description="Where workers and frontends find each other.")
    ] = "etcd"
    request_plane: Annotated[
        Literal["tcp", "nats"], Meta(description="How requests travel from frontend to worker.")
    ] = "tcp"
    event_plane: Annotated[
        Literal["zmq", "nats"] | None, Meta(description="How KV events and load travel; null is Dynamo's own choice.")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(description="Frontend's parser for tool calls; auto takes the model family's, null switches parsing off."),
    ] = "auto"
    reasoning_parser: Annotated[
        str | None,
        Meta(description="Frontend's parser for reasoning; auto takes the model family's, null switches parsing off."),
    ] = "auto"
    custom_jinja_template: Annotated[
        str | None, Meta(description="Chat template file that replaces the model's own.")
    ] = None
    default_max_tokens: Annotated[
        Positive | None,
        Meta(description="max_tokens of a request that names none; null lets it run to the servable length."),
    ] = None
    enable_kv_events: Annotated[
        bool,
        Meta(description="Publish KV events and load, so that the router can route by prefix."),
    ] = True
    load_publish_interval_s: Annotated[
        Seconds, Meta(description="Longest time between two load reports in seconds; changes are reported at once.")
    ] = 0.1
    step_record_dir: Annotated[
        str | None,
        Meta(
            description="Directory for the record of an engine core that was lost: its last 1,000 steps, one line of "
            "JSON each; null is the system's temporary directory."
        ),
    ] = None
    drain_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description="At shutdown, how long running requests may go on, in seconds. With Dynamo's grace period and "
            "4 s to end the engine core it must stay below DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT (30).",
        ),
    ] = 20.0

    def core(self) -> CoreConfig:
        """The part that the engine core is sent."""
        return CoreConfig(**{name: getattr(self, name) for name in CoreConfig.__struct_fields__})


def check(config: WorkerConfig, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for values that no single key's type excludes, and for keys that contradict each other."""
    try:
        check_page_size(config.kv_page_size)
    except PageSizeError as error:
        raise ConfigError(str(error)) from None
    for name, size in (("kv_cache_memory", config.kv_cache_memory), ("gpu_memory_limit", config.gpu_memory_limit)):
        try:
            if size is not None:
                parse_size(size)
        except SizeError as error:
            raise ConfigError(f"{name}: {error}") from None
    if config.max_step_tokens < config.max_bucket:
        raise ConfigError(
            f"max_step_tokens is {config.max_step_tokens} and max_bucket is {config.max_bucket}, but a step must hold "
            "one token of every active request: raise max_step_tokens or lower max_bucket"
        )
    if config.max_chunk_tokens is not None and config.max_chunk_tokens > config.max_step_tokens:
        raise ConfigError(
            f"max_chunk_tokens is {config.max_chunk_tokens} and max_step_tokens is {config.max_step_tokens}, but a "
            "chunk must fit in a step: lower max_chunk_tokens or raise max_step_tokens"
        )
    try:
        Ladder.of(config.max_bucket, config.graph_buckets)
    except LadderError as error:
        raise ConfigError(str(error)) from None
    _check_endpoint_types(config.endpoint_types)
    if config.custom_jinja_template is not None and not _is_file(config.custom_jinja_template):
        raise ConfigError(f"custom_jinja_template is {shown(config.custom_jinja_template)}, but there is no such file")
    _check_drain(config.drain_timeout_s, environ)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a name longer than any file's
        return False


def _check_endpoint_types(value: str) -> None:
    for name in value.split(","):
        if name.strip() not in ("chat", "completions"):
            raise ConfigError(f"endpoint_types is {value!r}, but must be chat, completions or chat,completions")


def _check_drain(drain_s: float, environ: Mapping[str, str]) -> None:
    deadline = _seconds(environ, *SHUTDOWN_DEADLINE)
    grace = _seconds(environ, *GRACE_PERIOD)
    stop = CORE_STOP_S + CORE_KILL_S
    if not drain_s + grace + stop < deadline:
        raise ConfigError(
            f"drain_timeout_s is {drain_s:g}, {GRACE_PERIOD[0]} is {grace:g} and ending the engine core takes up to "
            f"{stop:g}, together at or over {SHUTDOWN_DEADLINE[0]}, which is {deadline:g}: the process would be killed "
            "while it drains; "
            f"lower drain_timeout_s or raise {SHUTDOWN_DEADLINE[0]}"
        )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, but must be a number of seconds") from None
