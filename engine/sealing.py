"""Offers pages that a request has filled to the prefix index."""

from engine.request import Request
from kv.hashing import BlockHasher
from kv.pool import PagePool, SealedBlock


def seal(request: Request, pool: PagePool, hasher: BlockHasher, page_size: int) -> None:
    """Offer full, written pages. Slots behind the last delivered token hold surplus and stay unsealed, and so does
    everything of a request whose pages are not to be trusted.
    """
    if request.poisoned:
        return
    full = min(request.written, len(request.tokens)) // page_size
    while request.sealed < full:
        block = request.sealed
        tokens = request.tokens[block * page_size : (block + 1) * page_size].tobytes()
        parent = request.digests[block - 1] if block else None
        if block == len(request.digests):
            root = parent or hasher.root(request.cache_salt)
            request.digests.append(hasher.extend(root, tokens))
        pool.seal(request.pages[block], SealedBlock(request.digests[block], parent, tokens, request.cache_salt))
        request.sealed += 1
