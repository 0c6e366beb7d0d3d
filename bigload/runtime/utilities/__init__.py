"""Small functions of accelerate that transformers, diffusers and peft import."""
