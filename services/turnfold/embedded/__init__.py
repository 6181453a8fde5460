"""The laptop default: a broker, an inference server and a tiny model, all in one process tree."""
