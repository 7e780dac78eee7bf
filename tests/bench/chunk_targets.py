"""What `itl_target_ms` costs and gives: `python -m tests.bench.chunk_targets`, the table of docs/scheduling.md.

The real scheduler in virtual time, with step costs that are fitted to what an H200 showed (docs/gpu.md), under the load
of the rows there: 16, 64 and 256 users who send 1024 tokens and get 128, two requests each; and 16 streams beside which
prompts of 4096 tokens arrive one by one. All times are milliseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from engine.chunking import ChunkLimits, StepCosts, chunk_budgets
from engine.scheduling import SchedulerConfig
from engine.warmup import CHUNK_TOKENS
from tests.traffic import Arrival, Run, Traffic

ROWS, STEP_TOKENS, PAGES = 256, 2048, 50_000
USERS = (16, 64, 256)
TARGETS_MS = (None, 10.0, 20.0, 30.0)


@dataclass(frozen=True, slots=True)
class Card:
    """Milliseconds of steps."""

    name: str
    decode: dict[int, float]
    """Of a decode step, by rows."""
    token: float
    """Of each prompt token."""
    hidden: float
    """Of what prompt tokens cost beside decode rows: the weights are read anyway."""
    launches: float
    """That the host needs for a step with chunks."""

    def step(self, rows: int, tokens: int) -> float:
        """Seconds."""
        if not tokens:
            return self.decode[rows] / 1000
        prompt = tokens * self.token if rows == 0 else self.decode[rows] + max(0.0, tokens * self.token - self.hidden)
        return max(self.launches, prompt) / 1000

    def costs(self) -> StepCosts:
        """The card's steps."""
        tokens = (0, 1, *range(64, 1024, 64), 1024, 2048)
        return StepCosts(tuple(self.decode), tokens, tuple(tuple(self.step(r, n) for n in tokens) for r in self.decode))

    def measured(self) -> StepCosts:
        """What the lane knows of them."""
        tokens = (0, *sorted({min(size, STEP_TOKENS - ROWS + 1) for size in CHUNK_TOKENS}))
        known, rows = self.costs(), (1, ROWS // 2 - 1, ROWS - 1)
        return StepCosts(rows, tokens, tuple(tuple(known.of(r, n) for n in tokens) for r in rows))


SMALL = {0: 0.0, 1: 3.3, 16: 4.2, 64: 6.1, 256: 15.3}
CARDS = (
    Card("Qwen3-4B", SMALL, 0.014, 2.3, 7.5),
    Card("Qwen3-4B, slow host", SMALL, 0.014, 2.3, 17.0),
    Card("Qwen3-14B, slow host", {0: 0.0, 1: 8.4, 16: 9.1, 64: 11.5, 256: 21.0}, 0.044, 5.5, 15.0),
)


def lane(card: Card, target_ms: float | None) -> Traffic:
    """A lane of that card; without a target prompts fill its steps."""
    budgets: tuple[int, ...] = ()
    if target_ms is not None:
        limits = ChunkLimits(STEP_TOKENS, page_size=16, min_chunk_tokens=64, itl_target_s=target_ms / 1000)
        budgets = chunk_budgets(card.measured(), limits, ROWS)
    config = SchedulerConfig(
        page_size=16,
        servable_length=8192,
        max_bucket=ROWS,
        max_step_tokens=STEP_TOKENS,
        max_chunk_tokens=STEP_TOKENS,
        max_in_flight=2,
        low_water_pages=PAGES // 100,
        chunk_budgets=budgets,
    )
    return Traffic(config, PAGES, card.costs())


def closed_loop(card: Card, target_ms: float | None, users: int) -> Run:
    """Two requests of every user."""
    return lane(card, target_ms).run_users([[Arrival(0.0, 1024, 128)] * 2] * users)


def long_prompts(card: Card, target_ms: float | None) -> Run:
    """The prompts of 4096 tokens are the last requests of the trace."""
    streams = [[Arrival(0.0, 512, 1024)] * 2] * 16
    return lane(card, target_ms).run_users([*streams, [Arrival(1.0, 4096, 1)] + [Arrival(0.25, 4096, 1)] * 11])


def gaps_ms(run: Run, until: float = float("inf")) -> list[float]:
    """Between the tokens of each request, ascending."""
    return sorted(1e3 * (b - a) for times in run.tokens.values() for a, b in pairwise(times) if b <= until)


def first_tokens_ms(run: Run, first_key: int = 0) -> list[float]:
    """How long requests waited, ascending."""
    return sorted(1e3 * (at - run.sent[key]) for key, at in run.first_token.items() if key >= first_key)


def quantile(ascending: list[float], share: float) -> float:
    """Of ascending values."""
    return ascending[min(len(ascending) - 1, int(len(ascending) * share))]


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| | target | tok/s, 16 / 64 / 256 users | ITL p99 | TTFT p50 | prompts of 4096: ITL p99 / TTFT p50 |"
    yield "|---|---|---|---|---|---|"
    for card in CARDS:
        for target in TARGETS_MS:
            runs = [closed_loop(card, target, users) for users in USERS]
            rates = " / ".join(f"{run.tokens_per_second:,.0f}" for run in runs)
            gaps = " / ".join(f"{quantile(gaps_ms(run), 0.99):.0f}" for run in runs)
            firsts = " / ".join(f"{quantile(first_tokens_ms(run), 0.5):,.0f}" for run in runs)
            run = long_prompts(card, target)
            arrived = first_tokens_ms(run, 32)
            gap = quantile(gaps_ms(run, max(run.first_token[key] for key in range(32, 44))), 0.99)
            name = "none" if target is None else f"{target:.0f}"
            yield f"| {card.name} | {name} | {rates} | {gaps} | {firsts} | {gap:.1f} / {quantile(arrived, 0.5):.0f} |"


def main() -> None:
    """Print the table."""
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
