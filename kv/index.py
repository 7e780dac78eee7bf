"""The prefix index: which page holds which block."""

from collections.abc import Sequence


def max_hit_blocks(tokens: int, page_size: int) -> int:
    """Most blocks of a prompt of `tokens` tokens that may come from the cache: at least one token is left to compute.

    The logits of the prompt's last token are not cached: a hit on the whole prompt would leave nothing to sample from.
    """
    return max(tokens - 1, 0) // page_size


class PrefixIndex:
    """Digest -> page, and page -> digest of every sealed page.

    A digest maps to one page, its owner. Other sealed pages with the same content are copies: `match` never returns
    them, but when the owner goes, a copy takes its place and the block stays in the index.
    """

    def __init__(self) -> None:
        self.owners: dict[bytes, int] = {}
        """Owner of each block in the index. Not to be written from outside."""
        self.contents: dict[int, bytes] = {}
        """Block of each sealed page, owner or copy. Not to be written from outside."""
        self._copies: dict[bytes, list[int]] = {}

    def digests(self) -> list[bytes]:
        """Digests of all blocks in the index, in no promised order."""
        return list(self.owners)

    def match(self, digests: Sequence[bytes], limit: int) -> list[int]:
        """Pages of the longest run of blocks in the index that begins at `digests[0]`, at most `limit` of them."""
        if limit < len(digests):
            digests = digests[: max(limit, 0)]
        pages: list[int] = []
        append = pages.append
        for page in map(self.owners.get, digests):
            if page is None:
                break
            append(page)
        return pages

    def insert(self, digest: bytes, page: int) -> bool:
        """Record an unsealed page's block: as owner (True), or as copy if another page owns it (False)."""
        self.contents[page] = digest
        if self.owners.setdefault(digest, page) == page:
            return True
        self._copies.setdefault(digest, []).append(page)
        return False

    def remove(self, page: int) -> int | None:
        """Forget a sealed page; return the page that owns its block now, or None if the block has left the index."""
        digest = self.contents.pop(page)
        owner = self.owners[digest]
        copies = self._copies.get(digest)
        if copies is None:
            del self.owners[digest]
            return None
        if owner == page:
            owner = self.owners[digest] = copies.pop(0)
        else:
            copies.remove(page)
        if not copies:
            del self._copies[digest]
        return owner

    def copies(self) -> list[int]:
        """All pages that are copies."""
        return [page for pages in self._copies.values() for page in pages]
