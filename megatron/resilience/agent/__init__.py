"""The agent of one machine: starts its ranks, watches them, leaves nothing behind. Imports no torch itself."""
