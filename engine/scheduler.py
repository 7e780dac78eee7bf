"""The lane's scheduler: which tokens of which requests are computed in the next step. Pure: no torch, no clock, no
sockets.

Two phases. `plan(now)` decides a step and hands it out; `resolve(result)` takes what the oldest launched step gave. Up
to `max_in_flight` steps lie between the two, so `plan` knows how many tokens a row will have, but perhaps not which.

                    submit            admitted             prompt planned
    (worker) ──────────────▶ WAITING ─────────▶ PREFILLING ─────────────▶ ACTIVE
                               ▲                    │                       │  stop, length, cancel, preempted
                               │                    ▼                       ▼
                               └──── preempted ── DRAINING ◀────────────────┘
                                                    │ last launched step resolved
                                                    ▼
                                             row and pages free
"""

from collections import deque
from collections.abc import Sequence

from engine.admission import Demand, demand, never_served
from engine.delivery import Deliveries
from engine.messages import Submit
from engine.queue import WaitingQueue
from engine.request import Request, State
from engine.rows import Rows
from engine.scheduling import Counters, DuplicateKey, Effects, Launched, SchedulerConfig
from engine.sealing import seal
from engine.step import Chunk, RowStart, StepPlan, StepResult
from kv.hashing import BlockHasher
from kv.pool import PagePool
from kv.table import PageTables

DECODE_HEADROOM_PAGES = 1
"""Pages that must be left beside a prompt's own when it enters, so that its first tokens do not preempt anyone."""

CLOSED = "this worker shuts down and admits no more"


class Scheduler:
    """Queues, admission and step plans of one lane.

    It owns the rows and the queue and is the only user of the page pool. Callers alternate `plan` and `resolve`, and
    pass on the effects that `resolve` and `take_effects` return.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool, hasher: BlockHasher) -> None:
        self.config = config
        self.pool = pool
        self.hasher = hasher
        self.tables = PageTables(config.max_bucket)
        self.rows = Rows(config.max_bucket)
        self.waiting = WaitingQueue(config.priority_aging_s)
        self.counters = Counters()
        self.in_flight: deque[Launched] = deque()
        self.promised_pages = 0
        self._live: dict[int, Request] = {}
        self._deliveries = Deliveries(self.counters)
        self._steps = 0
        self._submitted = 0
        self._admissions = 0
        self._closed = False

    # Requests come and go

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it with a terminal effect if it can never be served or the queue is full.

        Raises `DuplicateKey`, and changes nothing, while another request of that key is live.
        """
        if submit.key in self._live:
            raise DuplicateKey(f"key {submit.key} of request {submit.request_id!r} is in use")
        request = Request.from_submit(submit, self.hasher.digest_size, now, self._submitted)
        self._submitted += 1
        complaint = never_served(request, self.config)
        if complaint:
            self._deliveries.finish(request, "error", complaint)
        elif self._closed:
            self._deliveries.finish(request, "error", CLOSED, refused=True)
        elif len(self.waiting) - self.rows.free() >= self.config.max_queue:
            self.counters.refused_queue_full += 1
            self._deliveries.finish(
                request,
                "error",
                f"{len(self.waiting)} requests are waiting, rows are free for {self.rows.free()} of them and max_queue "
                f"is {self.config.max_queue}; retry later, add workers or raise max_queue",
                refused=True,
            )
        else:
            self._live[request.key] = request
            self.waiting.append(request)

    def cancel(self, key: int) -> None:
        """End a request early. Its pages return now, or when the last launched step that uses them resolves."""
        request = self._live.get(key)
        if request is not None and not request.ended:
            self._deliveries.finish(request, "cancelled")
            self._let_go(request)

    def close(self) -> None:
        """Take in nothing more: refuse what waits. Running requests go on, also those that preemption has put back."""
        self._closed = True
        for request in list(self.waiting):
            if not request.preemptions:
                self._deliveries.finish(request, "error", CLOSED, refused=True)
                self._let_go(request)

    def take_effects(self) -> Effects:
        """Effects that have come up outside `resolve`: refusals and cancellations."""
        return self._deliveries.take()

    @property
    def idle(self) -> bool:
        """True if there is no live request."""
        return not self._live

    def queue_age(self, now: float) -> float:
        """Seconds since the arrival of the request that has waited longest; 0 for an empty queue."""
        oldest = self.waiting.oldest_arrival()
        return 0.0 if oldest is None else now - oldest

    # Phase one

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step, or None if nothing can run now. The step counts as launched from here on."""
        if len(self.in_flight) >= self.config.max_in_flight:
            return None
        self._expire(now)
        decoding = self._decoding_rows()
        lengths = []
        for request in decoding:
            request.planned += 1
            request.outputs_planned += 1
            request.in_flight += 1
            lengths.append(request.planned)
        chunks: list[Chunk] = []
        chunked: list[Request] = []
        budget = self.config.chunk_tokens(len(decoding))
        for request in list(self.rows.prefilling.values()):
            if budget <= 0:
                break
            budget -= self._plan_chunk(request, budget, chunks)
            chunked.append(request)
        entered = self._admit_waiting(budget, chunks, now)
        starts = [RowStart(request.row, request.sampling, request.row_context()) for request in entered]
        chunked += entered
        self.rows.check()
        if not decoding and not chunks:
            return None
        plan = StepPlan(self._steps, starts, self.tables.drain(), [r.row for r in decoding], lengths, chunks)
        self._steps += 1
        self._count(plan)
        self.in_flight.append(Launched(plan, decoding, chunked))
        return plan

    def _decoding_rows(self) -> list[Request]:
        """Active rows of the next step, each with a page for the token it writes. Rows whose last token is already on
        its way get no surplus step; rows that found no page wait for the next step, or are preempted.
        """
        page_size = self.config.page_size
        ready = []
        growing = []
        for request in self.rows.active.values():
            if request.outputs_planned < request.max_tokens:
                ready.append(request)
                if request.planned == len(request.pages) * page_size:
                    growing.append(request)
        stalled = set()
        for request in growing:
            if request.state is not State.ACTIVE:
                continue
            if request.promised or self._make_room(request):
                self._add_pages(request, 1)
            else:
                stalled.add(request.key)
        return [r for r in ready if r.state is State.ACTIVE and r.key not in stalled]

    def _plan_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plan the next prompt tokens of a prefilling request and return how many. A chunk that does not end the prompt
        ends on a page boundary if it reaches one.
        """
        start = request.planned
        end = min(request.target, start + min(budget, self.config.max_chunk_tokens))
        if end < request.target:
            boundary = end - end % self.config.page_size
            end = boundary if boundary > start else end
        last = end == request.target
        chunks.append(request.chunk(start, end))
        request.planned = end
        request.in_flight += 1
        if last:
            request.outputs_planned += 1
            self.rows.activate(request)
        return end - start

    def _count(self, plan: StepPlan) -> None:
        self.counters.computed_tokens += plan.tokens
        if plan.chunks:
            self.counters.unified_steps += 1
        else:
            self.counters.decode_steps += 1

    # Admission

    def _admit_waiting(self, budget: int, chunks: list[Chunk], now: float) -> list[Request]:
        """Admit waiting requests, each with its first chunk, while rows, pages and the step's `budget` allow.

        A request that does not fit may be passed by later ones `max_bypass` times; then it blocks the queue.
        """
        entered: list[Request] = []
        passed: list[Request] = []
        while budget > 0 and not passed and self.waiting and self.rows.has_room():
            for request in self.waiting.first(self.config.lookahead, now):
                if budget <= 0 or not self.rows.has_room() or self._is_exhausted(passed):
                    break
                wanted = self._demand(request)
                if wanted is None:
                    passed.append(request)
                    continue
                self._enter(request, wanted)
                budget -= self._plan_chunk(request, budget, chunks)
                entered.append(request)
                for blocked in passed:
                    blocked.bypassed += 1
                self.counters.bypasses += len(passed)
        return entered

    def _is_exhausted(self, passed: list[Request]) -> bool:
        """True if one of these may not be passed once more."""
        return any(request.bypassed >= self.config.max_bypass for request in passed)

    def _demand(self, request: Request) -> Demand | None:
        """What `request` needs of the pool, None if it does not fit now.

        It must leave the low-water mark, what running requests are expected to grow by, and what it is expected to grow
        by itself: a page if its client has said nothing. With no row occupied all this is waived: any request within
        the servable length fits then, and so a guess delays a request at most until the lane is empty.
        """
        pool = self.pool
        unpromised = pool.available - self.promised_pages
        growing = self.rows.expected_growth(self.config.page_size)
        state = (unpromised - growing, pool.events.stored_blocks, self._admissions, self.rows.occupied() == 0)
        if request.blocked_in == state:
            return None
        wanted = demand(request, pool, self.config)
        margin = 0
        if self.rows.occupied():
            margin = self.config.low_water_pages + growing + max(DECODE_HEADROOM_PAGES, wanted.growth)
        if wanted.fits(pool, self.promised_pages, margin):
            return wanted
        request.blocked_in = state
        return None

    def _enter(self, request: Request, wanted: Demand) -> None:
        """Take `request` from the queue and give it a row, its hit and its prompt's pages."""
        self.waiting.remove(request)
        self._admissions += 1
        self.pool.acquire(wanted.hit)
        self.rows.enter(request)
        request.blocked_in = None
        request.pages = list(wanted.hit)
        request.sealed = len(wanted.hit)
        request.planned = request.written = len(wanted.hit) * self.config.page_size
        request.target = len(request.tokens)
        request.protected = wanted.reserved > 0
        request.promised = wanted.reserved
        self.promised_pages += wanted.reserved
        self.tables.begin(request.row, wanted.hit)
        self._add_pages(request, wanted.fresh)
        self._count_admission(request)

    def _count_admission(self, request: Request) -> None:
        if request.preemptions:
            self.counters.recomputed_tokens += max(0, min(request.lost, request.target) - request.planned)
        else:
            request.cached_tokens = request.planned
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.cached_tokens += request.planned
            self._deliveries.admit(request)

    def _expire(self, now: float) -> None:
        """Refuse requests that have waited longer than `max_queue_s` and never ran."""
        limit = self.config.max_queue_s
        if limit is None:
            return
        for request in self.waiting.late(now - limit):
            self.counters.refused_queue_time += 1
            text = (
                f"waited {now - request.arrival:.1f} s for a row, max_queue_s is {limit:g}; retry later or add workers"
            )
            self._deliveries.finish(request, "error", text, refused=True)
            self._let_go(request)

    # Pages

    def _add_pages(self, request: Request, count: int) -> None:
        for page in self.pool.allocate(count).pages:
            request.pages.append(page)
            self.tables.append(request.row, page)
        used = min(count, request.promised)
        request.promised -= used
        self.promised_pages -= used

    def _make_room(self, request: Request) -> bool:
        """Have one unpromised page available for `request`, preempting if need be. False if it must wait for draining
        rows or was itself the victim: of the rows whose lifetime is not reserved, the newest of the lowest class.
        """
        while self.pool.available <= self.promised_pages:
            if any(r.pages for r in self.rows.draining.values()):
                return False
            candidates = (*self.rows.prefilling.values(), *self.rows.active.values())
            victim = max((r for r in candidates if not r.protected), key=lambda r: (-r.priority_class, r.order))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        self.counters.preemptions += 1
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Plan nothing more for `request`, and free what it holds as soon as no launched step uses it."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
            del self._live[request.key]
            return
        if request.state is not State.DRAINING:
            self.rows.drain(request)
            self.promised_pages -= request.promised
            request.promised = 0
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Return row and pages of a drained request; a preempted one goes back to its place in the queue."""
        self.tables.clear(request.row)
        self.rows.leave(request)
        self.pool.release(request.pages)
        request.pages = []
        request.protected = False
        if request.ended:
            del self._live[request.key]
            return
        request.state = State.WAITING
        request.lost = request.written
        request.planned = request.written = request.sealed = 0
        request.outputs_planned = request.outputs
        self.waiting.put_back(request)

    # Phase two

    def resolve(self, result: StepResult) -> Effects:
        """Take the tokens of the oldest launched step; returns these and all effects since the last call."""
        launched = self._retire_step()
        sampling = launched.decoding + [
            request for request, chunk in zip(launched.chunked, launched.plan.chunks, strict=True) if chunk.samples
        ]
        if len(result.tokens) != len(sampling):
            raise RuntimeError(
                f"step {launched.plan.number} sampled {len(sampling)} rows, but {len(result.tokens)} tokens came"
            )
        for request, length in zip(launched.decoding, launched.plan.decode_lengths, strict=True):
            request.written = length
        for request, chunk in zip(launched.chunked, launched.plan.chunks, strict=True):
            request.written = chunk.start + len(chunk.tokens)
        self.counters.padding_tokens += result.padding_tokens
        requests = (*launched.decoding, *launched.chunked)
        for request in requests:
            if request.row in result.failed_rows:
                self._poison(request, "the model gave numbers that are not finite for this request")
        for place, scored in result.prompt_logprobs.items():
            self._deliveries.prompt_logprobs(launched.chunked[place], launched.plan.chunks[place].start, scored)
        for place, (request, token) in enumerate(zip(sampling, result.tokens, strict=True)):
            self._deliveries.token(request, token, result.logprobs.get(place))
        self._settle(requests)
        return self.take_effects()

    def fail(self, message: str) -> Effects:
        """The oldest launched step has failed: end the requests in it, and only these."""
        launched = self._retire_step()
        for request in (*launched.decoding, *launched.chunked):
            self._poison(request, message, retryable=True)
            self._let_go(request)
        return self.take_effects()

    def _poison(self, request: Request, message: str, retryable: bool = False) -> None:
        """End a request whose pages can no longer be trusted."""
        request.poisoned = True
        if not request.ended:
            self._deliveries.finish(request, "error", message, retryable=retryable)

    def _retire_step(self) -> Launched:
        launched = self.in_flight.popleft()
        for request in (*launched.decoding, *launched.chunked):
            request.in_flight -= 1
        return launched

    def _settle(self, requests: Sequence[Request]) -> None:
        """Seal what a resolved step has filled, then let go of requests that ended in it or have drained."""
        for request in requests:
            seal(request, self.pool, self.hasher, self.config.page_size)
            if request.ended or request.state is State.DRAINING:
                self._let_go(request)
