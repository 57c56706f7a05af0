"""`trainmover prove`: shows on the user's own job that replacing a machine changes no bit of it."""
