"""The ladder of buckets: batch sizes for which decode steps are captured as CUDA graphs. No torch."""

from bisect import bisect_left

STEP = 8
"""Rows between two buckets of the default ladder, from here on; below, each bucket is twice the one before."""


class LadderError(ValueError):
    """The buckets cannot be used; one line that names the value and the way out."""


class Ladder(tuple[int, ...]):
    """Buckets in ascending order; the last one is `max_bucket`."""

    __slots__ = ()

    @classmethod
    def of(cls, max_bucket: int, buckets: str | None = None) -> "Ladder":
        """1, 2, 4, 8, then every 8 rows; or `buckets`, whole numbers with commas between them. `max_bucket` ends both.

        Raises `LadderError`.
        """
        if buckets is None:
            chosen = {1, 2, 4, *range(STEP, max_bucket, STEP)}
            return cls(sorted({size for size in chosen if size < max_bucket} | {max_bucket}))
        chosen = {_bucket(text.strip(), buckets, max_bucket) for text in buckets.split(",")}
        return cls(sorted(chosen | {max_bucket}))

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows` rows, at least one and at most `max_bucket`."""
        if not 1 <= rows <= self[-1]:
            raise LadderError(f"{rows} rows lie in no bucket of 1 to {self[-1]} rows")
        return self[bisect_left(self, rows)]


def _bucket(text: str, buckets: str, max_bucket: int) -> int:
    if not text.isascii() or not text.isdigit():
        raise LadderError(f"graph_buckets is {buckets!r}, but must be whole numbers with commas between them: 1,2,4,8")
    if not 1 <= (size := int(text[:12])) <= max_bucket:
        raise LadderError(
            f"graph_buckets holds {text}, but a bucket has at least 1 row and at most max_bucket, {max_bucket}: "
            "leave it out or raise max_bucket"
        )
    return size
