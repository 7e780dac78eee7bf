"""Paged KV bookkeeping: geometry, budget, page pool, prefix index, block hashes, page tables, events. No torch here."""
