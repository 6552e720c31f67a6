"""From kernels to a torch.nn.Module: tensors in, tensors out, with gradients."""
