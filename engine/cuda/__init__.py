"""The lane on an NVIDIA GPU. Planning (all but `flashinfer_raw` and what computes) is numpy alone and runs anywhere."""
