"""Files of offload folders and of `torch.distributed.checkpoint`, byte by byte: what writers and readers share."""
