"""A lane without a device: an executor whose "model" reads what a real one would, and a driver with any lag.

The simulated KV cache stores in every slot the token and the position that were computed there. A row's next token is a
hash of the tokens that the step finds through its block table, so a wrong page, a stale table entry, a page that was
handed on too early or a mistaken prefix hit changes the text, and mostly fails at once because a slot's position is not
the one that was asked for.
"""

import json
from array import array
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from hashlib import blake2b

from engine.messages import Finished, Sampling, Submit
from engine.scheduler import Scheduler
from engine.scheduling import Effects, SchedulerConfig
from engine.step import StepPlan, StepResult
from kv.budget import KvCapacity
from kv.events import Removed, Stored
from kv.hashing import Blake2bHasher, event_hash
from kv.pool import PagePool

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """The simulated model: a token of 0 to VOCAB - 1 that depends on the whole sequence."""
    digest = blake2b(array("i", tokens).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(prompt: list[int], max_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """What a request must produce, whatever else runs beside it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class SimExecutor:
    """Executes plans at launch, in launch order, as a device does; results are merely handed out later."""

    def __init__(self, page_size: int, usable_pages: int, max_bucket: int) -> None:
        self.page_size = page_size
        self.kv: list[list[tuple[int, int] | None]] = [[None] * page_size for _ in range(usable_pages + 1)]
        self.table: list[dict[int, int]] = [{} for _ in range(max_bucket)]
        self.last_token: list[int | None] = [None] * max_bucket
        self.launched: list[StepPlan] = []
        self.fail_steps: set[int] = set()

    def launch(self, plan: StepPlan) -> StepResult:
        """Write the step's KV, then sample every row that asks for it. A planted failure loses the step."""
        self.launched.append(plan)
        if plan.number in self.fail_steps:
            raise MemoryError(f"planted failure of step {plan.number}")
        for start in plan.starts:
            self.last_token[start.row] = None
            self.table[start.row].clear()
        for row, index, page in plan.table:
            self.table[row][index] = page
        tokens = []
        for row, length in zip(plan.decode_rows, plan.decode_lengths, strict=True):
            token = self.last_token[row]
            assert token is not None, f"row {row} decodes before it has sampled"
            self._write(row, length - 1, token)
            tokens.append(self._sample(row, length))
        for chunk in plan.chunks:
            for offset, token in enumerate(chunk.tokens):
                self._write(chunk.row, chunk.start + offset, token)
            if chunk.samples:
                tokens.append(self._sample(chunk.row, chunk.start + len(chunk.tokens)))
        return StepResult(tokens)

    def collect(self, handle: object) -> StepResult:
        """The result of a launched step."""
        assert isinstance(handle, StepResult)
        return handle

    def _page(self, row: int, position: int) -> int:
        page = self.table[row].get(position // self.page_size)
        assert page, f"row {row} has no page for position {position}"
        return page

    def _write(self, row: int, position: int, token: int) -> None:
        self.kv[self._page(row, position)][position % self.page_size] = (position, token)

    def _sample(self, row: int, length: int) -> int:
        tokens = []
        for position in range(length):
            slot = self.kv[self._page(row, position)][position % self.page_size]
            assert slot is not None, f"row {row} reads position {position}, which nobody has written"
            assert slot[0] == position, f"row {row} reads position {position} and finds {slot[0]}"
            tokens.append(slot[1])
        token = next_token(tokens)
        self.last_token[row] = token
        return token


@dataclass
class Job:
    """A request under test and what came back."""

    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...] = ()
    salt: str | None = None
    priority: int = 0
    expected: int | None = None
    """Output tokens that its client expects."""
    output: list[int] = field(default_factory=list)
    finished: Finished | None = None
    cancelled: bool = False


class SimLane:
    """Scheduler, pool and simulated executor with `max_in_flight - 1` steps of lag, checked after every phase."""

    def __init__(self, config: SchedulerConfig, usable_pages: int) -> None:
        self.config = config
        self.pool = PagePool(KvCapacity(usable_pages, config.page_size))
        self.hasher = Blake2bHasher(config.page_size)
        self.scheduler = Scheduler(config, self.pool, self.hasher)
        self.executor = SimExecutor(config.page_size, usable_pages, config.max_bucket)
        self.jobs: dict[int, Job] = {}
        self.results: list[StepResult | Exception] = []
        self.events: list[Stored | Removed] = []
        self.preempted: dict[int, int] = defaultdict(int)
        """Times each request was preempted, seen from outside: by key."""
        self.now = 0.0
        self.trace: list[list[object]] = []
        """Everything that was done to this lane; `replay` does it again."""

    def record(self) -> str:
        """One line of JSON from which `replay` makes this run again."""
        return json.dumps([asdict(self.config), self.pool.capacity.usable_pages, self.trace])

    @classmethod
    def replay(cls, record: str) -> "SimLane":
        """Repeat a recorded run, step by step."""
        config, usable_pages, trace = json.loads(record)
        lane = cls(SchedulerConfig(**config), usable_pages)
        for name, *arguments in trace:
            if name == "submit":
                lane.submit(Job(*arguments))
            elif name == "cancel":
                lane.cancel(*arguments)
            elif name == "fail":
                lane.fail_step(*arguments)
            else:
                lane.turn()
        return lane

    def fail_step(self, number: int) -> None:
        """Have the device fail when it gets this step."""
        self.trace.append(["fail", number])
        self.executor.fail_steps.add(number)

    def submit(self, job: Job) -> int:
        """Queue `job`; returns its key."""
        self.trace.append(["submit", job.prompt, job.max_tokens, job.stop, job.salt, job.priority, job.expected])
        key = len(self.jobs)
        self.jobs[key] = job
        packed = array("i", job.prompt).tobytes()
        hashes = b"".join(self.hasher.chain(packed, job.salt))
        submit = Submit(
            key=key,
            request_id=f"r{key}",
            prompt=packed,
            block_hashes=hashes,
            max_tokens=job.max_tokens,
            stop_token_ids=tuple(job.stop),
            sampling=Sampling(),
            cache_salt=job.salt,
            priority=job.priority,
            expected_output_tokens=job.expected,
        )
        self.scheduler.submit(submit, self.now)
        return key

    def cancel(self, key: int) -> None:
        """Cancel a request that may have ended already."""
        self.trace.append(["cancel", key])
        self.jobs[key].cancelled = True
        self.scheduler.cancel(key)
        self._take(self.scheduler.take_effects())
        self.check()

    def plan(self) -> bool:
        """Phase one, launched at once. False if nothing could be planned."""
        plan = self.scheduler.plan(self.now)
        self.check()
        if plan is None:
            return False
        assert plan.tokens <= self.config.max_step_tokens
        assert len(set(plan.decode_rows) | {c.row for c in plan.chunks}) == len(plan.decode_rows) + len(plan.chunks)
        try:
            self.results.append(self.executor.launch(plan))
        except MemoryError as error:
            self.results.append(error)
        return True

    def resolve(self) -> bool:
        """Phase two of the oldest step. False if none is in flight."""
        if not self.results:
            return False
        result = self.results.pop(0)
        if isinstance(result, Exception):
            self._take(self.scheduler.fail(str(result)))
        else:
            self._take(self.scheduler.resolve(result))
        self.check()
        return True

    def turn(self) -> bool:
        """What a lane does: launch ahead as far as the lag allows, then resolve. False if idle."""
        self.trace.append(["turn"])
        self.now += 1.0
        failed = any(isinstance(result, Exception) for result in self.results)
        planned = not failed and self.plan()  # see Lane: nothing is launched behind a step that the device never got
        if planned and len(self.results) < self.config.max_in_flight:
            return True
        return self.resolve() or planned

    def run(self, max_turns: int = 100_000) -> None:
        """Turn until every request has ended; invariant 7 is that this comes to an end."""
        for _ in range(max_turns):
            if not self.turn():
                break
        self._take(self.scheduler.take_effects())
        assert self.scheduler.idle, f"{len(self.scheduler.waiting)} requests wait for ever"

    def check(self) -> None:
        """Invariants 1, 2 and the accounting of promises."""
        self.pool.check()
        rows = self.scheduler.rows
        assert rows.occupied() <= self.config.max_bucket
        for request in self.scheduler.waiting:
            self.preempted[request.key] = max(self.preempted[request.key], request.preemptions)
        live = [*rows.prefilling.values(), *rows.active.values(), *rows.draining.values()]
        assert len({r.row for r in live}) == len(live)
        assert self.scheduler.promised_pages == sum(r.promised for r in live) <= self.pool.available
        referenced = {page for request in live for page in request.pages}
        assert len(referenced) == self.pool.referenced_pages
        self.events += self.pool.events.drain()

    def check_at_rest(self) -> None:
        """Invariants 4, 5 and 6 once everything has ended."""
        from kv.events import replay

        assert self.pool.referenced_pages == 0
        assert replay(self.events) == {event_hash(digest) for digest in self.pool.index.digests()}
        for job in self.jobs.values():
            assert job.finished is not None
            if job.finished.reason in ("stop", "length"):
                assert job.output == expected_output(job.prompt, job.max_tokens, job.stop)
            else:
                assert job.output == expected_output(job.prompt, job.max_tokens, job.stop)[: len(job.output)]
            assert job.finished.completion_tokens == len(job.output)
            assert job.finished.cached_tokens < len(job.prompt)

    def _take(self, effects: Effects) -> None:
        for key, token in zip(effects.keys, effects.tokens, strict=True):
            assert self.jobs[key].finished is None, "a token came after the end"
            self.jobs[key].output.append(token)
        for finished in effects.finished:
            assert self.jobs[finished.key].finished is None, "a request ended twice"
            self.jobs[finished.key].finished = finished
