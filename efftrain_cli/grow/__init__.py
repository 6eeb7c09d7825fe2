"""`efftrain grow`: a finished run's state made larger, and the plan of when to grow."""
