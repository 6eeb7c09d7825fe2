"""The run directory: writing it, reading its rows and events, and what is measured from them."""
