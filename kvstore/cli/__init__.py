"""The `kvstore` command: one module for each subcommand."""
