"""`efftrain study`: what is compared, how often and by which measure, fixed in a file before the
first run."""
