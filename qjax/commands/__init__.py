"""What each subcommand of `qjax` does: `run(args) -> int`, the exit status."""
