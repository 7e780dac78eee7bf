"""What a KV router knows of the workers: `python -m tests.router_view BLOCK_SIZE`, with the stack's environment.

Starts a router of its own beside the frontend's, which asks the workers for all they hold, and prints as JSON the block
hashes by worker id.
"""

import asyncio
import json
import sys
from collections import defaultdict

from dynamo.llm import KvRouter, KvRouterConfig
from dynamo.runtime import DistributedRuntime

ENDPOINT = "dynamo.backend.generate"
SETTLE_S = 0.3


async def view(block_size: int) -> dict[int, list[int]]:
    """Block hashes by worker, once two readings agree."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    router = KvRouter(runtime.endpoint(ENDPOINT), block_size, KvRouterConfig())
    last, dump = "", await router.dump_events()
    while dump != last:
        await asyncio.sleep(SETTLE_S)
        last, dump = dump, await router.dump_events()
    return blocks(json.loads(dump))


def blocks(events: list[dict]) -> dict[int, list[int]]:
    held = defaultdict(list)
    for event in events:
        for block in event["event"]["data"]["stored"]["blocks"]:
            held[event["worker_id"]].append(block["block_hash"])
    return held


if __name__ == "__main__":
    print(json.dumps(asyncio.run(view(int(sys.argv[1])))))
