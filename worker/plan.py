"""`pagelane plan`: what a worker's configuration takes of a GPU or a host, before one is there."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from engine.memory import MIB
from kv.budget import SizeError, parse_size
from worker.config import ConfigError, WorkerConfig
from worker.flags import HelpRequested, load_config, split_flags
from worker.process import failed

if TYPE_CHECKING:
    from engine.planning import LanePlan

USAGE = """usage: pagelane plan --config FILE [--card NAME] [--device-memory SIZE] [--json] [--KEY VALUE ...]

Say what a worker of this configuration takes of its GPU (or host), whether it starts, how many tokens its KV cache
holds, and what to change if that is not enough. Needs no GPU and no weights, only the model's config.json.

  --config FILE, --model DIR, --kv-page-size N, ...
      the worker's settings; pagelane worker --help lists them
  --card NAME
      the GPU to plan for, such as H200 or L4; by default the one that is here
  --device-memory SIZE
      how much memory it has, such as 12GiB, as the driver reports it; without --card and a GPU, of an H200 taken for a
      smaller card, which is what gpu_memory_limit does. Of a CPU worker, the host's memory
  --json
      the plan as JSON: starts, kv_tokens, parts (bytes), advice and more

Exit code: 0 if the worker starts, 1 if it does not, 2 for a command line that cannot be used."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says."""

    worker: WorkerConfig
    card: str | None
    memory: int | None
    """Bytes."""
    as_json: bool


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 for a worker that starts, 1 for one that does not, 2 for a bad command line."""
    try:
        asked = parse(list(argv))
    except HelpRequested:
        sys.stdout.write(f"{USAGE}\n")
        return 0
    except ConfigError as error:
        return failed(error, 2)
    from engine.planning import Target, model_config_of, plan_lane

    core = asked.worker.core()
    try:
        plan = plan_lane(core, model_config_of(core, _say), Target(asked.card, asked.memory))
    except (ValueError, OSError) as error:
        return failed(error, 2)
    text = msgspec.json.format(msgspec.json.encode(plan)).decode() if asked.as_json else shown(core.model, plan)
    sys.stdout.write(f"{text}\n")
    return 0 if plan.starts else 1


def parse(argv: list[str]) -> Asked:
    """Read the command line. Raises `ConfigError` and `HelpRequested`."""
    own, rest = split_flags(argv, ("--card", "--device-memory"), ("--json",))
    config = load_config(rest, os.environ)
    memory = None
    if "--device-memory" in own:
        try:
            memory = parse_size(own["--device-memory"])
        except SizeError as error:
            raise ConfigError(f"--device-memory: {error}") from None
    return Asked(config, own.get("--card"), memory, "--json" in own)


def shown(model: str, plan: "LanePlan") -> str:
    """The plan as text."""
    return "\n".join(_lines(model, plan))


def _lines(model: str, plan: "LanePlan") -> Iterator[str]:
    place = plan.card or "a CPU"
    about = "" if plan.device_memory_known else ", about: this card was not seen, give --device-memory"
    yield f"{model} on {place} of {plan.device_memory / MIB:.0f} MiB{about}"
    if plan.parts:
        yield f"the worker may take {plan.allowed / MIB:.0f} MiB of it"
    yield ""
    bounds = ("graphs", "workspaces", "context") if plan.upper_bound else ()
    if plan.parts:
        yield f"{'part':<12} {'planned MiB':>12}"
        for name, size in [*plan.parts.items(), ("total", sum(plan.parts.values()))]:
            yield f"{name:<12} {size / MIB:>12.1f}{'  at most' if name in bounds else ''}"
        if plan.source is not None:
            yield f"graphs, workspaces and context: {'' if plan.upper_bound else 'as measured in '}{plan.source}"
        yield ""
    if plan.starts:
        yield f"starts: yes, with {plan.kv_tokens} KV tokens: {plan.kv_pages} pages of {plan.kv_page_size}"
        yield f"longest request: {plan.servable_length} tokens (context_limit {plan.context_limit})"
        counts = ", ".join(f"{one.streams} of {one.tokens} tokens" for one in plan.streams)
        yield f"requests at once: {counts} (max_bucket {plan.max_bucket})"
    else:
        yield f"starts: no: {plan.reason}"
    yield from (f"advice: {advice}" for advice in plan.advice if advice != plan.reason)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
