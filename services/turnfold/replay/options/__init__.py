"""What all commands on the log share: their options, the log they read, the progress bar."""
