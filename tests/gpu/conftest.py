"""What the tests on a GPU share."""

import os

# Plain PyTorch's tensors of many sizes would leave 49 GB in a process's cache, of which it uses 7.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
