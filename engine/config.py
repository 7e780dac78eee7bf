"""Settings of the engine core. Every key is also a key of the worker YAML and a flag of the worker."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_COUNT = 2**31 - 1
"""Largest count that any setting takes: what follows from it must fit the int32 of plans and messages."""

Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
PositiveSeconds = Annotated[float, Meta(ge=0.001, le=1e9)]


class CoreConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What an engine core is told at its start: the worker's first message. Reading it needs no torch."""

    model: Annotated[
        str,
        Meta(
            description="Model directory (config.json, safetensors, tokenizer files), a .gguf file, or the id of a "
            "repository on a hub: org/name or org/name@revision."
        ),
    ]
    revision: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Branch, tag or commit hash of a hub id; null is main."),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="Where the lane computes; auto takes CUDA if it is there.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights, activations and KV cache; auto is float32 on a CPU, else the checkpoint's."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="auto reads the safetensors; dummy makes random weights, for speed tests."),
    ] = "auto"
    kv_page_size: Annotated[
        int,
        Meta(
            description="Tokens per KV page, 16 or 64. A larger page P leaves up to P-1 slots of each request unused "
            "and makes prefix reuse coarser: only whole pages are shared."
        ),
    ] = 16
    kv_cache_memory: Annotated[
        str,
        Meta(
            description="Size of the KV pool on a CPU, such as 512MiB or 2GiB (a GPU derives it from its free memory)."
        ),
    ] = "512MiB"
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of a GPU's memory that the lane may take, other processes' use counted in; "
            "the KV pool gets what weights and buffers leave of it. With gpu_memory_limit, the share of that.",
        ),
    ] = 0.85
    gpu_memory_limit: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Has the lane take the GPU for one with so much memory, such as 24GiB, all of it its own: "
            "to try a smaller card, or to share this one with other processes. null is the card as it is."
        ),
    ] = None
    context_limit: Annotated[
        Annotated[int, Meta(ge=2, le=MAX_COUNT)] | None,
        Meta(description="Longest sequence in tokens, prompt and output together; null is the model's own limit."),
    ] = None
    max_bucket: Annotated[
        Positive,
        Meta(description="Most requests that are active, prefilling or draining at once: the largest decode batch."),
    ] = 16
    cuda_graphs: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto captures the decode steps of a GPU as CUDA graphs before the worker is ready; off "
            "launches kernel by kernel, starts sooner and decodes slower."
        ),
    ] = "auto"
    graph_buckets: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Batch sizes to capture, such as 1,2,4,8; a step runs in the next larger one, and max_bucket "
            "is always the last. null is 1, 2, 4, 8 and then every 8 rows."
        ),
    ] = None
    max_step_tokens: Annotated[
        Positive, Meta(description="Most tokens computed in one step; sizes the activation arena. At least max_bucket.")
    ] = 512
    max_chunk_tokens: Annotated[
        Positive | None,
        Meta(description="Most prompt tokens of one request in one step; null leaves it to max_step_tokens."),
    ] = None
    pipeline_depth: Annotated[
        int, Meta(ge=0, le=2, description="Steps launched ahead of the one whose tokens are being read (0, 1 or 2).")
    ] = 0
    reservation: Annotated[
        Literal["optimistic", "lifetime"],
        Meta(
            description="optimistic reserves the prompt and preempts when pages run out; "
            "lifetime reserves prompt + max_tokens."
        ),
    ] = "optimistic"
    max_preemptions: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="After so many preemptions a request is admitted only with its whole lifetime reserved.",
        ),
    ] = 2
    priority_aging_s: Annotated[
        PositiveSeconds | None,
        Meta(description="Seconds in which a waiting request rises by one priority class; null for never."),
    ] = 30.0
    max_bypass: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Times that a request too large for the free pages may be passed by later ones.",
        ),
    ] = 8
    itl_target_ms: Annotated[
        PositiveSeconds | None,
        Meta(
            description="Longest step in milliseconds that prompts may cause while others generate, measured at "
            "start-up; null lets prompts fill every step."
        ),
    ] = None
    min_chunk_tokens: Annotated[
        Positive, Meta(description="Prompt tokens that a step may always compute, whatever itl_target_ms says.")
    ] = 64
    max_queue: Annotated[
        Positive,
        Meta(description="Most requests waiting beside those that free rows await; one more is refused at once."),
    ] = 1024
    max_queue_s: Annotated[
        PositiveSeconds | None,
        Meta(description="Longest wait for admission in seconds; null waits for ever."),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="CPU threads for the computation; null takes every core."),
    ] = None
    step_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=1e9,
            description="A core whose step takes longer is taken for wedged: its requests fail and the worker ends.",
        ),
    ] = 120.0
