"""The shape of the KV cache: the one place that knows what a page is, in tokens and in bytes."""

from dataclasses import dataclass

PAGE_SIZES = (16, 64)
"""Page sizes that Pagelane serves, in tokens."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each dtype that the KV cache may hold."""


class PageSizeError(ValueError):
    """The page size is none of `PAGE_SIZES`."""

    def __init__(self, page_size: object) -> None:
        allowed = " or ".join(str(size) for size in PAGE_SIZES)
        super().__init__(f"kv_page_size is {page_size!r}, but must be {allowed} tokens")


def check_page_size(page_size: int) -> int:
    """Return `page_size` if it is served, else raise `PageSizeError`, which names the allowed ones."""
    if isinstance(page_size, bool) or page_size not in PAGE_SIZES:
        raise PageSizeError(page_size)
    return page_size


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape of a page-first KV cache.

    A page holds K and V of `page_size` tokens for every layer in one contiguous run, laid out as
    `[layers, 2, page_size, kv_heads, head_dim]`, so that moving a page is one copy.
    """

    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvGeometry.{name} is {getattr(self, name)}, but must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KvGeometry.dtype is {self.dtype!r}, but must be one of {', '.join(DTYPE_BYTES)}")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one page: (layers, 2, page_size, kv_heads, head_dim)."""
        return (self.layers, 2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.token_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens of one sequence occupy."""
        return -(-tokens // self.page_size)
