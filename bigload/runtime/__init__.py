"""Models as torch knows them: their sizes, their ties, and device maps made from an `nn.Module`."""
