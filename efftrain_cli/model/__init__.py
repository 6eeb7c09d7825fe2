"""Tokens in, logits out; and what depends on a model's shape: FLOPs, generated text, weights in
Hugging Face's form."""
