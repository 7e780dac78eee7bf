"""Paged KV bookkeeping: geometry, budget, page pool, prefix index, block hashes, page tables and events. No torch here."""
