"""Model calls: from a translated request to a turn that the log has acknowledged."""
