"""The `trainmover` command: one file per subcommand."""
