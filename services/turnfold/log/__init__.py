"""Access to the log: the only package that talks to Kafka's client library.

`client` connects, reads and writes; `service` runs a process with health endpoints and a clean
shutdown; `settings` holds what every process needs to be told.
"""
