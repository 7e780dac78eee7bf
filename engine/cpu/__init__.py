"""The CPU lane: a reference executor in torch over the same capacity, layout and tables as every other lane."""
