"""`efftrain study` and `efftrain race`: what is compared, how often and by which measure, fixed
before the first run."""
