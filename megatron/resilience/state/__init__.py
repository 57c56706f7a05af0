"""A rank's whole state between two iterations: what it owns, and its way from a leaver rank to the rank after it."""
