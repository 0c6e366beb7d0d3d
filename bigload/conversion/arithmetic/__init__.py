"""Operations of computed tensors, as values: what computes rows of a tensor from rows of others."""
