"""The lane on an NVIDIA GPU. `planner`, `fa3`, `kernels`, `layout` and `staging` are numpy alone and run anywhere."""
