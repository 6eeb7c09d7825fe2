"""From text to windows of tokens: text, tokenizer, shards, prepare, windows; each module uses those before it."""
