"""Import before `engine.kernels`: lets Triton's kernels run in its interpreter where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
