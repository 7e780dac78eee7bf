"""The engine core: step loop, scheduler, lane, plans, memory, sampling, models. Runs in a process of its own."""
