"""GGUF: headers and their encoding, names of tensors, config.json and metadata made of each other, tokenizers."""
