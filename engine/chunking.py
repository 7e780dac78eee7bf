"""How many prompt tokens a step may compute beside its active rows without making them wait too long. Pure."""

from bisect import bisect_right
from dataclasses import dataclass

from engine.search import largest_fitting

DECODE_STEPS_PER_CHUNK = 2.5
"""A step with chunks may always take so many times a decode-only step, else slow lanes would starve prompts."""
LEAST_CHUNKS = 1.1
"""It may always take so many times a step with the least chunk. Steps with chunks have a floor, such as the time that
the host needs to launch them, beneath which more tokens cost next to nothing: with 64 tokens in every such step, 16
users of Qwen3-4B on a slow host got an eighth of the tokens a second.
"""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by active rows and prompt tokens, measured at warm-up and then frozen.

    `seconds[i][j]` belongs to `rows[i]` and `tokens[j]`, both ascending; `tokens` begins with 0.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or self.tokens[:1] != (0,) or len(self.tokens) < 2:
            raise ValueError("a step-cost table needs a row count, and token counts that begin with 0 and go on")
        if list(self.rows) != sorted(set(self.rows)) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError("row and token counts of a step-cost table must ascend")
        if len(self.seconds) != len(self.rows) or any(len(line) != len(self.tokens) for line in self.seconds):
            raise ValueError(f"a step-cost table of {len(self.rows)} x {len(self.tokens)} needs as many times")

    def as_text(self) -> str:
        """Milliseconds, a line for each row count and a column for each token count."""
        lines = [["rows / prompt tokens", *map(str, self.tokens)]]
        for rows, line in zip(self.rows, self.seconds, strict=True):
            lines.append([str(rows), *(f"{1000 * seconds:.1f}" for seconds in line)])
        return "\n".join(f"{first:>20}" + "".join(f"{cell:>9}" for cell in rest) for first, *rest in lines)

    def points(self) -> tuple[tuple[int, int, float], ...]:
        """Rows, prompt tokens and seconds of every measured step."""
        return tuple(
            (rows, tokens, seconds)
            for rows, line in zip(self.rows, self.seconds, strict=True)
            for tokens, seconds in zip(self.tokens, line, strict=True)
        )

    def of(self, rows: int, tokens: int) -> float:
        """Seconds of a step, interpolated between the measured points and extended past the last ones."""
        column = [_line(self.tokens, line, tokens) for line in self.seconds]
        return _line(self.rows, tuple(column), rows)


def _line(points: tuple[int, ...], values: tuple[float, ...], x: int) -> float:
    if len(points) == 1 or x <= points[0]:
        return values[0]
    right = min(bisect_right(points, x), len(points) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (points[right] - points[left])
    return values[left] + slope * (x - points[left])


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """What bounds the prompt tokens of a step."""

    max_step_tokens: int
    page_size: int
    min_chunk_tokens: int
    itl_target_s: float


def chunk_budget(costs: StepCosts, limits: ChunkLimits, rows: int) -> int:
    """Prompt tokens that a step with `rows` active rows may compute.

    max(min_chunk, the most tokens whose step takes at most max(itl_target, 2.5 x the decode-only step, 1.1 x the step
    with min_chunk)), in whole pages, and never more than the step has room for. With no active row nobody waits for a
    token, and the room is the only bound.
    """
    room = limits.max_step_tokens - rows
    if rows == 0 or room <= 0:
        return max(room, 0)
    least = -(-limits.min_chunk_tokens // limits.page_size) * limits.page_size
    allowed = max(
        limits.itl_target_s,
        DECODE_STEPS_PER_CHUNK * costs.of(rows, 0),
        LEAST_CHUNKS * costs.of(rows, min(least, room)),
    )
    most = largest_fitting(0, room, lambda tokens: costs.of(rows, tokens) <= allowed) or 0
    return min(room, max(most - most % limits.page_size, least))


def chunk_budgets(costs: StepCosts, limits: ChunkLimits, max_bucket: int) -> tuple[int, ...]:
    """`chunk_budget` of every row count from 0 to `max_bucket`, so that a step only looks it up."""
    return tuple(chunk_budget(costs, limits, rows) for rows in range(max_bucket + 1))
