"""From text to windows of tokens: text, tokenizer, corpus, prepare, windows; each module uses those before it."""
