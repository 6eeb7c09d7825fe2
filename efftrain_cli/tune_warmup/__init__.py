"""`efftrain tune-warmup`: the search for a warmup by short runs, with receipts."""
