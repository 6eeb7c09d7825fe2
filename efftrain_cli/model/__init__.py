"""GPT-2 and all that depends on its shape: FLOPs, generation, weights in Hugging Face's form."""
