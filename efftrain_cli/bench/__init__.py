"""`efftrain bench`: where the time of a step goes; beside a ring of devices, other ways to share the model."""
